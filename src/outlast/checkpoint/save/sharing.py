"""The tensors that all ranks hold alike: each is written once for all of them, and compared at every save.

After the first step of a session ranks compare digests, and what all of them hold is divided among files, one
a rank of a node. Nothing in such a file is of a rank or a node: every node writes the same bytes. At each
save ranks compare digests before anything is copied. What they do not hold alike any more, each of them
writes into its own file.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from outlast.agreement.worker.reports import Agreed, Outcome
from outlast.checkpoint.content.format import Layout, lay_out, note_of, order_of, readdress
from outlast.checkpoint.content.rank_file import whose_alike
from outlast.checkpoint.content.state import Captured, Derived, capture
from outlast.checkpoint.content.tensor_digest import digests_of
from outlast.checkpoint.content.typed_json import dtype_name
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.policy.manifest import Identity, some
from outlast.checkpoint.save.buffers import Buffers
from outlast.errors import CheckpointError
from outlast.recovery.policy.events import Note

LEAST_BYTES = 64 << 10  # of a tensor that is worth sharing
_UNLIKE_SAVES = 3  # in a row, after which tensors are not compared any more
Spread = Callable[..., Iterable[int]]


def notes_of_alike(step: int, identity: Identity) -> dict[str, str]:
    """Return what the header of such a file says besides its tensors."""
    return note_of(whose_alike(step, identity))


@functools.cache
def digesters(threads: int) -> ThreadPoolExecutor:
    """Return the threads that take digests while training stands still."""
    return ThreadPoolExecutor(threads, "digest")


def compare(around: SaveContext, state: Mapping[str, object], spread: Spread) -> dict[str, torch.Tensor]:
    """Return what all ranks hold alike, the live tensors by key; every rank calls it at the same time.

    Parts of distributed tensors are not among them: each rank has its own.

    Args:
        around: this rank's ties to the world.
        state: the live objects.
        spread: like ``map``; may call in several threads.

    Raises:
        UsageError: something in the state of a rank cannot be saved exactly.
        PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
        ExchangeFailed: ranks did not answer.
    """
    tensors: dict[str, torch.Tensor] = {}

    def digests() -> dict[str, str]:
        captured = capture(state)
        tensors.update(
            (key, one)
            for key, one in captured.tensors.items()
            if key not in captured.pieces and one.numel() * one.element_size() >= LEAST_BYTES
        )
        numbers = digests_of(list(tensors.values()), spread)
        return {
            key: f"{number:016x} {dtype_name(one.dtype)}{list(one.shape)}{order_of(one) or ''}"
            for (key, one), number in zip(tensors.items(), numbers, strict=True)
        }

    return {key: tensors[key] for key in _find_alike(around, digests)[0]}


def _fine(agreed: Agreed) -> Agreed:
    """Return a round in which every rank's part went well; a refusal by the system costs the save only."""
    if agreed.worst[1].outcome is Outcome.SYSTEM:
        raise OSError(agreed.text)
    agreed.raise_common(CheckpointError)
    return agreed


def _find_alike(around: SaveContext, digests: Callable[[], Mapping[str, str]]) -> tuple[list[str], list[int]]:
    """Return the keys of the tensors that all ranks hold alike, and the ranks that differ from rank 0.

    Args:
        around: this rank's ties to the world.
        digests: returns those of this rank, by key.
    """
    mine: dict[str, str] = {}

    def part() -> dict[str, Any]:
        mine.update(digests())
        return {"digests": sorted(mine.items())} if around.leads else {}

    first = _fine(around.rounds.hold("digests", part)).reports[0].data["digests"]
    if not first:
        return [], []
    agreed = _fine(around.rounds.hold("alike", lambda: {"mask": mask(first, mine)}))
    masks = [report.data["mask"] for report in agreed.reports]
    return held_by_all(first, masks), [rank for rank, one in enumerate(masks) if one != masks[0]]


class Sharing:
    """One rank's part in a session.

    Args:
        around: this rank's ties to the world.
        held: what all ranks hold alike, by key.
        files: among how many files it is divided at most.
        own: the number of the one that this rank writes, if there are as many.
        buffers: returns those for a file, by its number and how many files there are.
        spread: like ``map``; may call in several threads.
    """

    def __init__(
        self,
        around: SaveContext,
        held: Mapping[str, torch.Tensor],
        files: int,
        own: int,
        buffers: Callable[[int, int], Buffers],
        spread: Spread,
    ) -> None:
        self._around = around
        self._spread = spread
        self._files = divide({key: one.numel() * one.element_size() for key, one in held.items()}, files)
        self._forms = {key: (one.dtype, one.shape, one.stride()) for key, one in held.items()}
        self._same = Derived[list[str]]()  # keys of a state's tensors that have these forms
        self._own = own if own < len(self._files) else -1
        self._notes = notes_of_alike(0, around.identity)
        self._alike = frozenset(held)  # what ranks held alike at the latest save
        self._layouts = Derived[list[Layout]]()
        self.nbytes = 0 if self._own < 0 else self._laid_out(held)[self._own].nbytes  # of that file
        self.buffers = None if self._own < 0 else buffers(self._own, len(self._files))
        self._step = -1  # of the latest save
        self._mine: dict[str, int] = {}  # digests of this rank at that save, of what ranks may hold alike
        self._unlike_saves = 0  # in a row, with the same tensors
        self.waited = 0.0  # seconds, for the other ranks at that save

    def share(
        self, capture: Callable[[Mapping[str, object]], Captured], state: Mapping[str, object], step: int
    ) -> tuple[Captured, Share]:
        """Capture a state, and compare; every rank calls it for the same steps.

        A rank that could not stage a step may be asked for the same step again: the others are not, so it
        compares with what it held.

        Returns:
            The state, and this rank's part in the save.

        Raises:
            UsageError: something in the state of a rank cannot be saved exactly.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            OSError: it raised that on some rank.
            CheckpointError: ranks save different steps.
            ExchangeFailed: ranks did not answer.
        """
        self.waited = 0.0
        if step == self._step:
            captured = capture(state)
            same = self._digests(captured) == self._mine
            return captured, self._part(captured, step) if same else NO_PART
        taken: list[Captured] = []
        arrived = time.monotonic()

        def digest() -> dict[str, Any]:
            nonlocal arrived
            taken.append(capture(state))
            self._mine = self._digests(taken[0])
            arrived = time.monotonic()
            return {"step": step, "digest": xxh3_64_hexdigest(repr(list(self._mine.items())).encode())}

        said = _fine(self._around.rounds.hold("compared", digest))
        self.waited = time.monotonic() - arrived
        steps = sorted({report.data["step"] for report in said.reports})
        if len(steps) > 1:
            raise CheckpointError(f"ranks save different steps ({some(steps)}); nothing is saved")
        before, self._alike = self._alike, frozenset(self._mine)
        if len({report.data["digest"] for report in said.reports}) > 1:
            self._compare_each(before, step)
        elif before < self._alike == self._forms.keys():
            reason = f"step {step}: ranks hold alike again what they should, and write it once"
            self._around.record(Note, reason=reason)
        self._step = step
        again = self._unlike_saves if before == self._alike else 0
        self._unlike_saves = again + 1 if self._alike < self._forms.keys() else 0
        if self._unlike_saves == _UNLIKE_SAVES:
            self._forms = {key: form for key, form in self._forms.items() if key in self._alike}
        return taken[0], self._part(taken[0], step)

    def _digests(self, captured: Captured) -> dict[str, int]:
        """Return the digests of the tensors that still have the form in which ranks held them alike."""
        keys = self._same.of(
            (captured.form, self._forms),
            lambda: [key for key, one in self._forms.items() if one == _form_of(captured, key)],
        )
        numbers = digests_of([captured.tensors[key] for key in keys], self._spread)
        return dict(zip(keys, numbers, strict=True))

    def _compare_each(self, before: Collection[str], step: int) -> None:
        """Find out what all ranks hold alike where that is not everything."""
        mine = {key: f"{number:016x}" for key, number in self._mine.items()}
        found, ranks = _find_alike(self._around, lambda: mine)
        self._alike = frozenset(found)
        if self._alike != before:
            apart, who = some(self._forms.keys() - self._alike), f" (rank {some(ranks)} not as rank 0)"
            self._around.record(
                Note,
                reason=f"step {step}: ranks do not hold {apart} alike any more{who if ranks else ''}, which"
                f" may be silent corruption; each rank writes its own, after {_UNLIKE_SAVES} such saves for"
                " good",
            )

    def _part(self, captured: Captured, step: int) -> Share:
        notes = notes_of_alike(step, self._around.identity)
        layouts = [readdress(one, self._notes, notes) for one in self._laid_out(captured.tensors)]
        borrowed = {key: number for number, layout in enumerate(layouts) for key in layout.entries}
        if not borrowed:
            return NO_PART
        return Share(tuple(layouts), self._own, borrowed, self._mine, self.buffers)

    def _laid_out(self, tensors: Mapping[str, torch.Tensor]) -> list[Layout]:
        """Return the layouts of all files, with what ranks hold alike."""

        def lay_out_all() -> list[Layout]:
            here = [[key for key in keys if key in self._alike] for keys in self._files]
            return [lay_out({key: tensors[key] for key in keys}, self._notes) for keys in here]

        return self._layouts.of(self._alike, lay_out_all)


def _form_of(captured: Captured, key: str) -> tuple[torch.dtype, torch.Size, tuple[int, ...]] | None:
    tensor = captured.tensors.get(key)
    if tensor is None or key in captured.pieces:
        return None
    return tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class Share:
    """A rank's part in one save.

    Args:
        layouts: of all files that ranks share.
        own: the number of the one that this rank writes; -1: none.
        borrowed: the tensors in them: number of the file, by key.
        digests: of what this rank held when ranks compared, by key.
        buffers: of the file that this rank writes; None: it writes none.
    """

    layouts: tuple[Layout, ...]
    own: int
    borrowed: Mapping[str, int]
    digests: Mapping[str, int]
    buffers: Buffers | None


NO_PART = Share((), -1, {}, {}, None)


def mask(digests: Sequence[tuple[str, str]], mine: Mapping[str, str]) -> str:
    """Return which of the leading rank's tensors a rank holds alike: a bit for each, as a hexadecimal number.

    Args:
        digests: of the leading rank, each with its tensor's key.
        mine: this rank's, by key.
    """
    bits = "".join("01"[mine.get(key) == digest] for key, digest in digests)
    return f"{int(bits or '0', 2):x}"


def held_by_all(digests: Sequence[tuple[str, str]], masks: Iterable[str]) -> list[str]:
    """Return the keys of the tensors that every rank holds alike.

    Args:
        digests: of the leading rank, each with its tensor's key.
        masks: what each rank answered, see :func:`mask`.
    """
    common = -1  # every bit
    for one in masks:
        common &= int(one, 16)
    last = len(digests) - 1
    return [key for place, (key, _) in enumerate(digests) if common >> (last - place) & 1]


def divide(nbytes: Mapping[str, int], files: int) -> tuple[tuple[str, ...], ...]:
    """Divide tensors among files, the largest first, each to the file that has least.

    Args:
        nbytes: of each tensor, by key.
        files: how many; fewer are used where there are fewer tensors.
    """
    found: list[list[str]] = [[] for _ in range(min(files, len(nbytes)))]
    sizes = [0] * len(found)
    for key in sorted(nbytes, key=lambda key: (-nbytes[key], key)):
        place = sizes.index(min(sizes))
        found[place].append(key)
        sizes[place] += nbytes[key]
    return tuple(map(tuple, found))
