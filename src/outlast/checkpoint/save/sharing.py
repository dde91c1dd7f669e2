"""What a rank does about the tensors that all ranks hold alike: writes some for all, borrows the others.

Found once a session, when it saves first: ranks compare digests, and what all of them have is divided among
the ranks of a node. From then on each save reads what it borrows instead of copying it: the digests say
whether this rank still holds what another one writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.content.alike import (
    Unwritten,
    digests_of,
    document_of_alike,
    notes_of_alike,
)
from outlast.checkpoint.content.format import Layout, lay_out, readdress
from outlast.checkpoint.content.state import Captured, capture
from outlast.checkpoint.policy.manifest import Identity
from outlast.checkpoint.policy.sharing import ALL, divide, held_by_all, mask
from outlast.checkpoint.save.buffers import Buffer, Buffers
from outlast.checkpoint.tiers.memory_folder import Claims, draft_file, write_whole
from outlast.errors import CheckpointError


@functools.cache
def _digesters() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "digest")


def compare(rounds: Rounds, leads: bool, state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return what all ranks hold alike, the live tensors by key; every rank calls it at the same time.

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

    def say() -> dict[str, object]:
        captured = capture(state)
        tensors.update(captured.tensors)
        mine.update(digests_of(captured, _digesters().map))
        return {"digests": sorted(mine.items())} if leads else {}

    said = rounds.hold("digests", say)
    said.raise_common(CheckpointError)
    digests = said.reports[0].data["digests"]
    if not digests:
        return {}
    answered = rounds.hold("alike", lambda: {"mask": mask(digests, mine)})
    masks = [report.data["mask"] for report in answered.reports]
    return {key: tensors[key] for key in held_by_all(digests, masks)}


class Sharing:
    """One rank's part in a session.

    Args:
        identity: this rank.
        held: what all ranks hold alike, by key.
        files: among how many files it is divided at most.
        own: the number of the one that this rank writes, if there are as many.
        buffers: returns those for a file, by its number and how many files there are.
    """

    def __init__(
        self,
        identity: Identity,
        held: Mapping[str, torch.Tensor],
        files: int,
        own: int,
        buffers: Callable[[int, int], Buffers],
    ) -> None:
        self._identity = identity
        self._files = divide({key: one.numel() * one.element_size() for key, one in held.items()}, files)
        self._forms = {key: (one.dtype, one.shape) for key, one in held.items()}
        self._own = own if own < len(self._files) else -1
        self._notes = notes_of_alike(0, identity)
        self._layouts = [lay_out({key: held[key] for key in keys}, self._notes) for keys in self._files]
        self.buffers = None if self._own < 0 else buffers(self._own, len(self._files))
        self.apart: frozenset[str] = frozenset()  # what ranks turned out not to hold alike

    def prepare(self) -> None:
        """Begin to make the buffers that will be needed."""
        if self.buffers is not None:
            self.buffers.prepare_beside(self._layouts[self._own].nbytes)

    def share(self, captured: Captured, step: int) -> Share | None:
        """Return this rank's part in one save; None where it does not have these tensors any more.

        Then it saves as if nothing were shared, and so do all others if they have done the same with
        theirs. Where they have not, this save is lost.
        """
        if any(_form_of(captured, key) != form for key, form in self._forms.items()):
            return None
        notes = notes_of_alike(step, self._identity)
        self._layouts = [readdress(layout, self._notes, notes) for layout in self._layouts]
        self._notes = notes
        apart = self.apart
        borrowed = {
            key: number
            for number, keys in enumerate(self._files)
            for key in keys
            if ALL not in apart and key not in apart
        }
        tensors = {key: captured.tensors[key] for key in self._forms}
        return Share(tuple(self._layouts), self._own, tensors, borrowed, self.buffers)


def _form_of(captured: Captured, key: str) -> tuple[torch.dtype, torch.Size] | None:
    tensor = captured.tensors.get(key)
    return None if tensor is None or key in captured.pieces else (tensor.dtype, tensor.shape)


@dataclass
class Share:
    """A rank's part in one save.

    Args:
        layouts: of all files that ranks share.
        own: the number of the one that this rank writes; -1: none.
        tensors: in these files, by key.
        borrowed: those of them that are not in the rank's own file: number of the file, by key.
        buffers: of the file that this rank writes.
    """

    layouts: tuple[Layout, ...]
    own: int
    tensors: Mapping[str, torch.Tensor]
    borrowed: dict[str, int]
    buffers: Buffers | None
    _buffer: Buffer | None = None
    _digests: dict[int, dict[int, str]] = field(default_factory=dict)

    @property
    def written(self) -> tuple[Layout, Buffer] | None:
        """The file that this rank writes."""
        return None if self._buffer is None else (self.layouts[self.own], self._buffer)

    def claim(self, name: str, timeout: float, nudge: Callable[[], None]) -> bool:
        """Take a buffer for the file; see :meth:`Buffers.claim`."""
        assert self.buffers is not None
        self._buffer = self.buffers.claim(name, self.layouts[self.own].nbytes, timeout, nudge)
        return self._buffer is not None

    def give_back(self) -> None:
        """Put the buffer into the pool again."""
        if self._buffer is not None and self.buffers is not None:
            self.buffers.give_back(self._buffer)

    def digest(self, late: Collection[str]) -> None:
        """Digest the files that others write, but for chunks with nothing in them but tensors that can wait.

        Args:
            late: keys of the tensors that do not change for a while.
        """
        for number, file in self._files_of_others():
            wanted = file.with_any(self.tensors.keys() - set(late))
            self._digests[number] = file.digests(wanted, _digesters().map)

    def digest_rest(self) -> None:
        """Digest what could wait; in this thread only, beside training."""
        for number, file in self._files_of_others():
            known = self._digests[number]
            known |= file.digests(set(file.chunks) - known.keys())

    def _files_of_others(self) -> Iterator[tuple[int, Unwritten]]:
        for number, layout in enumerate(self.layouts):
            if number != self.own and self.borrowed:
                yield number, Unwritten(layout, self.tensors)

    def claims(self, failed: bool) -> Claims:
        """Return what this rank says of the files; all chunks were digested, or the save has failed."""
        if not self.borrowed or failed:
            return Claims(0, self.own)
        files = len(self.layouts)
        apart = tuple(sorted(self.tensors.keys() - self.borrowed.keys()))
        digests = {number: tuple(_in_order(found)) for number, found in self._digests.items()}
        return Claims(files, self.own, apart, digests)

    def leave_draft(self, step: int, identity: Identity) -> None:
        """Write the document of the file that this rank has written, which lacks its digests.

        Raises:
            OSError: the memory folder refused.
        """
        if self._buffer is not None:
            layout, place = self.layouts[self.own], (self.own, len(self.layouts))
            self._buffer.memory[: len(layout.header)] = layout.header
            document = document_of_alike(layout, step, identity, place)
            write_whole(self._buffer.path.with_name(draft_file(*place)), document)


def _in_order(digests: Mapping[int, str]) -> Sequence[str]:
    return [digests[number] for number in sorted(digests)]
