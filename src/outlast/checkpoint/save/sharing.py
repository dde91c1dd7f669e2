"""The tensors that all ranks hold alike: each is written once for all of them, and compared at every save.

After the first step of a session ranks compare digests, and what all of them hold is divided among files, one
a rank of a node. Nothing in such a file is of a rank or a node: every node writes the same bytes. From then
on a rank copies the file that it writes, and takes the digests of the chunks of the others from its own
tensors: the checkpoint writer compares them with those of the files.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from xxhash import xxh3_64

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.content.digest import chunk_digest, combined
from outlast.checkpoint.content.format import Layout, lay_out, note_of, order_of, readdress
from outlast.checkpoint.content.rank_file import document_of, whose_alike
from outlast.checkpoint.content.state import Captured, capture
from outlast.checkpoint.content.transfers import is_plain, octets_of
from outlast.checkpoint.content.typed_json import dtype_name
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, Identity, alike_files
from outlast.checkpoint.policy.sharing import ALL, LEAST_BYTES, chunks_of, divide, held_by_all, mask
from outlast.checkpoint.save.buffers import Buffer, Buffers
from outlast.checkpoint.tiers.memory_folder import Claims, write_whole
from outlast.errors import CheckpointError

_RUN_CHUNKS = 32  # what a thread digests at a time
Spread = Callable[[Callable[[range], dict[int, bytes]], Sequence[range]], Iterable[dict[int, bytes]]]


def notes_of_alike(step: int, identity: Identity) -> dict[str, str]:
    """Return what the header of such a file says besides its tensors."""
    return note_of(whose_alike(step, identity))


class Unwritten:
    """The layout of a safetensors file with these tensors.

    Args:
        layout: of the file.
        tensors: by key; they must not change meanwhile.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        self._layout = layout
        self._tensors = tensors
        self._octets: dict[str, torch.Tensor] = {}  # of those that cannot be read where they are

    @property
    def chunks(self) -> range:
        """The numbers of its chunks."""
        return range(-(-self._layout.nbytes // CHUNK_BYTES))

    def with_any(self, keys: Collection[str]) -> set[int]:
        """Return the numbers of the chunks in which one of some tensors has bytes."""
        entries = self._layout.entries
        found = (chunks_of(entries[key]) for key in entries.keys() & set(keys))
        return {number for numbers in found for number in numbers}

    def digests(self, numbers: Collection[int], spread: Spread = map) -> dict[int, bytes]:
        """Return the digests of some of its chunks, by number.

        Args:
            numbers: of the chunks.
            spread: like ``map``; may call in several threads.
        """
        found: dict[int, bytes] = {}
        for one in spread(self._digest, list(_runs(sorted(numbers)))):
            found |= one
        return found

    def _digest(self, run: range) -> dict[int, bytes]:
        begin = run.start * CHUNK_BYTES
        end = min(run.stop * CHUNK_BYTES, self._layout.nbytes)
        found: dict[int, bytes] = {}
        place, state = begin, xxh3_64()
        for view, _ in self._views(begin, end):
            at = 0
            while at < len(view):
                part = view[at : at + CHUNK_BYTES - place % CHUNK_BYTES]
                at, place = at + len(part), place + len(part)
                number = (place - 1) // CHUNK_BYTES
                if len(part) == CHUNK_BYTES:
                    found[number] = chunk_digest(part)
                    continue
                state.update(part)
                if place % CHUNK_BYTES == 0 or place == end:
                    found[number] = state.digest()
                    state = xxh3_64()
        return found

    def _views(self, begin: int, end: int) -> Iterator[tuple[memoryview, object]]:
        """Yield the bytes of a range in pieces, each with what keeps them in memory."""
        header = self._layout.header
        if begin < len(header):
            yield memoryview(header)[begin:end], None
        for key, entry in self._layout.entries.items():
            low, high = max(begin, entry.begin), min(end, entry.end)
            if low < high:
                yield self._view(key, low - entry.begin, high - entry.begin)

    def _view(self, key: str, begin: int, end: int) -> tuple[memoryview, object]:
        tensor = self._tensors[key]
        if is_plain(tensor):
            return _at(tensor.data_ptr() + begin, end - begin), tensor
        if key not in self._octets:
            self._octets[key] = octets_of(tensor)
        octets = self._octets[key][begin:end].cpu()
        return _at(octets.data_ptr(), end - begin), octets


def _at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the numbers in runs without gaps, none of them long."""
    first = 0
    for place in range(1, len(numbers) + 1):
        ends = place == len(numbers) or numbers[place] != numbers[place - 1] + 1
        if ends or place - first == _RUN_CHUNKS:
            yield range(numbers[first], numbers[place - 1] + 1)
            first = place


def digests_of(captured: Captured, spread: Spread = map) -> dict[str, str]:
    """Return a digest of type, shape, memory order and bytes of each tensor that ranks may share, by key.

    Not of parts of distributed tensors: a rank has those for itself.
    """
    found = {}
    for key, tensor in captured.tensors.items():
        if key not in captured.pieces and tensor.numel() * tensor.element_size() >= LEAST_BYTES:
            order = order_of(tensor)
            form = {"form": f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{order or ''}"}
            one = Unwritten(lay_out({"": tensor}, form), {"": tensor})
            chunks = one.digests(one.chunks, spread)
            found[key] = combined(_in_order(chunks))
    return found


@functools.cache
def digesters() -> ThreadPoolExecutor:
    """Return the threads that take digests."""
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
        mine.update(digests_of(captured, digesters().map))
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
        self._forms = {key: (one.dtype, one.shape, one.stride()) for key, one in held.items()}
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
    _digests: dict[int, dict[int, bytes]] = field(default_factory=dict)

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
        self._buffer = self.buffers.claim(name, self.layouts[self.own].nbytes, timeout, nudge)
        return self._buffer is not None

    def give_back(self) -> None:
        """Put the buffer into the pool again."""
        if self._buffer is not None and self.buffers is not None:
            self.buffers.give_back(self._buffer)

    def digest(self, late: Collection[str]) -> None:
        """Digest the shared files of other ranks, except chunks that hold only lazy tensors.

        Args:
            late: keys of the tensors that do not change for a while.
        """
        for number, file in self._files_of_others():
            wanted = file.with_any(self.tensors.keys() - set(late))
            self._digests[number] = file.digests(wanted, digesters().map)

    def digest_rest(self) -> None:
        """Digest the lazy tensors; in this thread only, beside training."""
        for number, file in self._files_of_others():
            known = self._digests[number]
            known |= file.digests(set(file.chunks) - known.keys())

    def _files_of_others(self) -> Iterator[tuple[int, Unwritten]]:
        for number, layout in enumerate(self.layouts):
            if number != self.own and self.borrowed:
                yield number, Unwritten(layout, self.tensors)

    def claims(self, failed: bool) -> Claims:
        """Return this rank's digests of the files; all chunks were digested, or the save has failed."""
        if not self.borrowed or failed:
            return Claims(0, self.own)
        files = len(self.layouts)
        apart = tuple(sorted(self.tensors.keys() - self.borrowed.keys()))
        digests = {number: _in_order(found).hex() for number, found in self._digests.items()}
        return Claims(files, self.own, apart, digests)

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


def _in_order(digests: Mapping[int, bytes]) -> bytes:
    return b"".join(digests[number] for number in sorted(digests))
