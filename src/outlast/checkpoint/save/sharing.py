"""The tensors that all ranks hold alike: each is written once for all of them, and compared at every save.

After the first step of a session ranks compare digests, and what all of them hold is divided among files, one
a rank of a node. Nothing in such a file is of a rank or a node: every node writes the same bytes. At each
save ranks compare digests before anything is copied. What they do not hold alike any more, each of them
writes into its own file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from outlast.agreement.worker.reports import Agreed, Rounds
from outlast.checkpoint.content.format import Layout, lay_out, note_of, order_of, readdress
from outlast.checkpoint.content.rank_file import document_of, whose_alike
from outlast.checkpoint.content.state import Captured, capture
from outlast.checkpoint.content.tensor_digest import digests_of
from outlast.checkpoint.content.typed_json import dtype_name
from outlast.checkpoint.policy.manifest import Identity, alike_files, some
from outlast.checkpoint.policy.sharing import LEAST_BYTES, divide, held_by_all, mask
from outlast.checkpoint.save.buffers import Buffer, Buffers
from outlast.checkpoint.tiers.memory_folder import write_whole
from outlast.errors import CheckpointError


def notes_of_alike(step: int, identity: Identity) -> dict[str, str]:
    """Return what the header of such a file says besides its tensors."""
    return note_of(whose_alike(step, identity))


@functools.cache
def digesters() -> ThreadPoolExecutor:
    """Return the threads that take digests."""
    return ThreadPoolExecutor(torch.get_num_threads(), "digest")


def compare(rounds: Rounds, leads: bool, state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return what all ranks hold alike, the live tensors by key; every rank calls it at the same time.

    Parts of distributed tensors are not among it: a rank has those for itself.

    Args:
        rounds: of the ranks.
        leads: this is rank 0.
        state: the live objects.

    Raises:
        UsageError: something in the state of a rank cannot be saved exactly.
        PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
        ExchangeFailed: ranks did not answer.
    """
    mine: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def digests() -> dict[str, object]:
        captured = capture(state)
        tensors.update(
            (key, one)
            for key, one in captured.tensors.items()
            if key not in captured.pieces and one.numel() * one.element_size() >= LEAST_BYTES
        )
        mine.update(_digests(tensors))
        return {"digests": sorted(mine.items())} if leads else {}

    said = _fine(rounds.hold("digests", digests))
    found = _held_by_all(rounds, said.reports[0].data["digests"], mine)[0]
    return {key: tensors[key] for key in found}


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of type, shape, memory order and bytes of each tensor, by key."""
    numbers = digests_of(list(tensors.values()), digesters().map)
    return {
        key: f"{number:016x} {dtype_name(one.dtype)}{list(one.shape)}{order_of(one) or ''}"
        for (key, one), number in zip(tensors.items(), numbers, strict=True)
    }


def _fine(agreed: Agreed) -> Agreed:
    agreed.raise_common(CheckpointError)
    return agreed


def _held_by_all(
    rounds: Rounds, digests: list[tuple[str, str]], mine: Mapping[str, str]
) -> tuple[list[str], list[int]]:
    """Return the keys of the tensors that all ranks hold alike, and the ranks that differ from rank 0.

    Args:
        rounds: of the ranks.
        digests: of rank 0, by key.
        mine: this rank's.
    """
    if not digests:
        return [], []
    agreed = _fine(rounds.hold("alike", lambda: {"mask": mask(digests, mine)}))
    masks = [report.data["mask"] for report in agreed.reports]
    return held_by_all(digests, masks), [rank for rank, one in enumerate(masks) if one != masks[0]]


class Sharing:
    """One rank's part in a session.

    Args:
        identity: this rank.
        rounds: with the other ranks.
        held: what all ranks hold alike, by key.
        files: among how many files it is divided at most.
        own: the number of the one that this rank writes, if there are as many.
        buffers: returns those for a file, by its number and how many files there are.
        report: takes a sentence when ranks begin or cease to differ.
    """

    def __init__(
        self,
        identity: Identity,
        rounds: Rounds,
        held: Mapping[str, torch.Tensor],
        files: int,
        own: int,
        buffers: Callable[[int, int], Buffers],
        report: Callable[[str], object],
    ) -> None:
        self._identity = identity
        self._rounds = rounds
        self._report = report
        self._files = divide({key: one.numel() * one.element_size() for key, one in held.items()}, files)
        self._forms = {key: (one.dtype, one.shape, one.stride()) for key, one in held.items()}
        self._own = own if own < len(self._files) else -1
        self._notes = notes_of_alike(0, identity)
        self._layouts = [lay_out({key: held[key] for key in keys}, self._notes) for keys in self._files]
        self.buffers = None if self._own < 0 else buffers(self._own, len(self._files))
        self._step = -1  # of the latest save
        self._mine: dict[str, str] = {}  # digests of this rank at that save, of what ranks may hold alike
        self._alike = frozenset(held)  # what ranks held alike at that save

    def prepare(self) -> None:
        """Begin to make the buffers that will be needed."""
        if self.buffers is not None:
            self.buffers.prepare_beside(self._layouts[self._own].nbytes)

    def share(self, state: Mapping[str, object], step: int) -> tuple[Captured, Share]:
        """Capture a state, and compare; every rank calls it for the same steps.

        A rank that could not stage a step may be asked for the same step again: the others are not, so it
        compares with what it held.

        Returns:
            The state, and this rank's part in the save.

        Raises:
            UsageError: something in the state of a rank cannot be saved exactly.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            ExchangeFailed: ranks did not answer.
        """
        if step == self._step:
            captured = capture(state)
            same = self._digests(captured) == self._mine
            return captured, self._part(captured, step) if same else _NO_PART
        taken: list[Captured] = []

        def digest() -> dict[str, Any]:
            taken.append(capture(state))
            self._mine = self._digests(taken[0])
            return {"digest": xxh3_64_hexdigest(repr(list(self._mine.items())).encode())}

        said = _fine(self._rounds.hold("compared", digest))
        before, self._step, self._alike = self._alike, step, frozenset(self._mine)
        if len({report.data["digest"] for report in said.reports}) > 1:
            self._find_alike(before)
        elif before < self._alike == self._forms.keys():
            self._report(f"step {step}: ranks hold alike again what they should, and write it once")
        return taken[0], self._part(taken[0], step)

    def _digests(self, captured: Captured) -> dict[str, str]:
        """Return the digests of the tensors that still have the form in which ranks held them alike."""
        forms = self._forms.items()
        return _digests(
            {key: captured.tensors[key] for key, form in forms if form == _form_of(captured, key)}
        )

    def _find_alike(self, before: Collection[str]) -> None:
        """Find out what all ranks hold alike where that is not everything."""
        mine, leads = self._mine, self._identity.rank == 0
        said = _fine(self._rounds.hold("digests", lambda: {"digests": sorted(mine.items())} if leads else {}))
        found, ranks = _held_by_all(self._rounds, said.reports[0].data["digests"], mine)
        self._alike = frozenset(found)
        if self._alike != before:
            apart = some(self._forms.keys() - self._alike)
            self._report(
                f"step {self._step}: ranks do not hold {apart} alike, as they did before (rank {some(ranks)}"
                " not as rank 0), which may be silent corruption; each rank writes its own until they do"
            )

    def _part(self, captured: Captured, step: int) -> Share:
        notes, alike = notes_of_alike(step, self._identity), self._alike
        if len(alike) == len(self._forms):
            self._layouts = layouts = [readdress(layout, self._notes, notes) for layout in self._layouts]
            self._notes = notes
        else:
            layouts = [
                lay_out({key: captured.tensors[key] for key in keys if key in alike}, notes)
                for keys in self._files
            ]
        borrowed = {key: number for number, layout in enumerate(layouts) for key in layout.entries}
        return Share(tuple(layouts), self._own, borrowed, self.buffers) if borrowed else _NO_PART


def _form_of(captured: Captured, key: str) -> tuple[torch.dtype, torch.Size, tuple[int, ...]] | None:
    tensor = captured.tensors.get(key)
    if tensor is None or key in captured.pieces:
        return None
    return tensor.dtype, tensor.shape, tensor.stride()


@dataclass
class Share:
    """A rank's part in one save.

    Args:
        layouts: of all files that ranks share.
        own: the number of the one that this rank writes; -1: none.
        borrowed: the tensors in them: number of the file, by key.
        buffers: of the file that this rank writes.
    """

    layouts: tuple[Layout, ...]
    own: int
    borrowed: Mapping[str, int]
    buffers: Buffers | None
    _buffer: Buffer | None = None

    @property
    def written(self) -> tuple[Layout, Buffer] | None:
        """The file that this rank writes."""
        return None if self._buffer is None else (self.layouts[self.own], self._buffer)

    @property
    def written_keys(self) -> Collection[str]:
        """The tensors in the file that this rank writes."""
        return self.layouts[self.own].entries.keys() if self._buffer is not None else ()

    def claim(self, name: str, timeout: float, nudge: Callable[[], None]) -> bool:
        """Take a buffer for the file; see :meth:`Buffers.claim`."""
        assert self.buffers is not None
        self._buffer = None
        self._buffer = self.buffers.claim(name, self.layouts[self.own].nbytes, timeout, nudge)
        return self._buffer is not None

    def give_back(self) -> None:
        """Put the buffer into the pool again."""
        if self._buffer is not None and self.buffers is not None:
            self.buffers.give_back(self._buffer)

    def leave_document(self, step: int, identity: Identity) -> None:
        """Write the document of the file that this rank has written.

        Raises:
            OSError: the memory folder refused.
        """
        if self._buffer is not None:
            layout, place = self.layouts[self.own], (self.own, len(self.layouts))
            self._buffer.memory[: len(layout.header)] = layout.header
            values = {"identity": whose_alike(step, identity), "aliases": {}, **layout.place}
            document = document_of(values, layout.listing)
            write_whole(self._buffer.path.with_name(alike_files(*place).document), document)


_NO_PART = Share((), -1, {}, None)
