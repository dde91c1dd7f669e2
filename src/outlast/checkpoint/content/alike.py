"""A file of tensors that all ranks hold alike: laid out and digested by every rank, written by one.

Nothing in it is of a rank or a node, so whoever writes it writes the same bytes. A rank that does not write
it takes the digests of its chunks from its own tensors: the saver compares them with those of the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from xxhash import xxh3_64

from outlast.checkpoint.content.digest import CHUNK_BYTES, chunk_digest, combined
from outlast.checkpoint.content.format import Layout, is_plain, lay_out, note_of, octets_of
from outlast.checkpoint.content.rank_file import unfinished, whose_alike
from outlast.checkpoint.content.state import Captured
from outlast.checkpoint.content.typed_json import dtype_name
from outlast.checkpoint.policy.manifest import Identity, Shard, alike_files
from outlast.checkpoint.policy.sharing import LEAST_BYTES, chunks_of
from outlast.fields import FORMAT_VERSION

_RUN_CHUNKS = 32  # what a thread digests at a time
Spread = Callable[[Callable[[range], dict[int, str]], Sequence[range]], Iterable[dict[int, str]]]


def notes_of_alike(step: int, identity: Identity) -> dict[str, str]:
    """Return what the header of such a file says besides its tensors."""
    return note_of(whose_alike(step, identity))


def document_of_alike(layout: Layout, step: int, identity: Identity, place: tuple[int, int]) -> bytes:
    """Return what the JSON file of such a file says, but for the digests.

    Args:
        layout: of its tensors.
        step: completed steps.
        identity: whose state it is.
        place: number of the file, and how many there are.
    """
    shard = Shard(alike_files(*place)[0], layout.nbytes, CHUNK_BYTES, (), {}, {}).to_json()
    del shard["tensors"], shard["digests"]
    values = {"format": FORMAT_VERSION, "identity": whose_alike(step, identity)}
    return unfinished(values, shard, layout.listing)


class Unwritten:
    """A safetensors file as it would be if these tensors were written.

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
        found = (chunks_of(entries[key], CHUNK_BYTES) for key in entries.keys() & set(keys))
        return {number for numbers in found for number in numbers}

    def digests(self, numbers: Collection[int], spread: Spread = map) -> dict[int, str]:
        """Return the digests of some of its chunks, by number.

        Args:
            numbers: of the chunks.
            spread: like ``map``; may call in several threads.
        """
        found: dict[int, str] = {}
        for one in spread(self._digest, list(_runs(sorted(numbers)))):
            found |= one
        return found

    def _digest(self, run: range) -> dict[int, str]:
        begin = run.start * CHUNK_BYTES
        end = min(run.stop * CHUNK_BYTES, self._layout.nbytes)
        found: dict[int, str] = {}
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
                    found[number] = state.hexdigest()
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
    """Return a digest of type, shape and bytes of each tensor that ranks may share, by key.

    Not of parts of distributed tensors: a rank has those for itself.
    """
    found = {}
    for key, tensor in captured.tensors.items():
        if key not in captured.pieces and tensor.numel() * tensor.element_size() >= LEAST_BYTES:
            form = {"form": f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"}
            one = Unwritten(lay_out({"": tensor}, form), {"": tensor})
            chunks = one.digests(one.chunks, spread)
            found[key] = combined(chunks[number] for number in one.chunks)
    return found
