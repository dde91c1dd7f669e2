"""Whole files read or looked through by several threads, each chunk verified before a byte of it is used.

While one thread waits for the disk others digest. What the page cache holds comes from there; the rest is
read past it, which spares the processor a copy and the host as much memory again.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from outlast.checkpoint.digest import chunk_digest
from outlast.checkpoint.memory import aligned
from outlast.checkpoint.tier import CopyFolder, read_exactly
from outlast.core.fields import Damage, DamagedCopy
from outlast.core.manifest import Shard

_READERS = 4
_UNIT_BYTES = 4 << 20  # what a thread reads at a time from the disk
_DIRECT_BYTES = 4 << 20  # what is smaller goes through the page cache
_BLOCK_BYTES = 4096  # what O_DIRECT wants addresses, sizes and places in a file to be multiples of
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the only one that mincore defines


@dataclass(frozen=True)
class Room:
    """Where bytes of a file go.

    Args:
        begin: the first of them, in the file.
        end: behind the last of them.
        address: of the memory that takes them.
    """

    begin: int
    end: int
    address: int


def read_verified(folder: CopyFolder, shard: Shard, rooms: Sequence[Room]) -> None:
    """Read every byte of a safetensors file, and verify each chunk before it is copied to where it goes.

    Args:
        folder: the copy.
        shard: what the JSON file says of the file.
        rooms: where parts of it go; they do not overlap, and what lies between them goes nowhere.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
        OSError: the file system refused.
    """
    wanted = sorted((room for room in rooms if room.begin < room.end), key=lambda room: room.begin)
    ends = [room.end for room in wanted]
    together = max(1, _UNIT_BYTES // shard.chunk_bytes)
    with folder.open(shard.file, shard.nbytes) as (descriptor, _), _opened(descriptor, shard) as file:

        def worker() -> Callable[[int], None]:
            view, base = aligned(together * shard.chunk_bytes + 2 * _BLOCK_BYTES)

            def work(unit: int) -> None:
                begin = unit * together * shard.chunk_bytes
                end = min(begin + together * shard.chunk_bytes, shard.nbytes)
                offset = file.read(view, begin, end)
                verify_chunks(shard, view[offset : offset + end - begin], begin)
                for place in range(bisect_right(ends, begin), len(wanted)):
                    room = wanted[place]
                    if room.begin >= end:
                        break
                    low, high = max(room.begin, begin), min(room.end, end)
                    source = base + offset + low - begin
                    ctypes.memmove(room.address + low - room.begin, source, high - low)

            return work

        threads = min(_READERS, 2 * torch.get_num_threads())
        in_threads(worker, -(-len(shard.digests) // together), threads)


def verify_chunks(shard: Shard, content: memoryview, begin: int) -> None:
    """Compare the digests of whole chunks of a file.

    Args:
        shard: what the JSON file says of the file.
        content: the chunks.
        begin: where the first of them begins in the file.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
    """
    edges = [*range(0, len(content), shard.chunk_bytes), len(content)]
    for number, (low, high) in enumerate(itertools.pairwise(edges), begin // shard.chunk_bytes):
        found = chunk_digest(content[low:high])
        if found != shard.digests[number]:
            expected = f"digest {shard.digests[number]} of bytes {begin + low} to {begin + high}"
            raise DamagedCopy(Damage(shard.file, expected, found))


def verify_mapped(shard: Shard, content: memoryview) -> None:
    """Compare the digests of all chunks of a file that is in memory.

    Raises:
        DamagedCopy: names the first bytes that are not as they were saved.
    """
    size = shard.chunk_bytes

    def work(number: int) -> None:
        verify_chunks(shard, content[number * size : (number + 1) * size], number * size)

    in_threads(lambda: work, len(shard.digests), max(2, torch.get_num_threads()))


def in_threads(worker: Callable[[], Callable[[int], None]], count: int, threads: int) -> None:
    """Call for each number below ``count``, in several threads, in order of beginning.

    Args:
        worker: called once by each thread; returns what the thread calls for each number that it takes.
        count: how many numbers.
        threads: how many, the caller's included.

    Raises:
        Exception: what the first number of those that failed raised; after a failure none is begun.
    """
    numbers = itertools.count()
    failed: dict[int, BaseException] = {}

    def serve() -> None:
        number = -1
        try:
            work = worker()
            while not failed and (number := next(numbers)) < count:
                work(number)
        except BaseException as error:  # noqa: BLE001 - raised to the caller once all threads ended
            failed[number] = error

    helpers = [
        threading.Thread(target=serve, name="reading", daemon=True) for _ in range(min(threads, count) - 1)
    ]
    for helper in helpers:
        helper.start()
    serve()
    for helper in helpers:
        while helper.is_alive():  # an interrupted caller, too, must not free what they write to
            try:
                helper.join(1.0)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.setdefault(-1, error)
    if failed:
        raise failed[min(failed)]


class _File:
    """An open file, and the same file opened past the page cache."""

    def __init__(self, descriptor: int, direct: int, shard: Shard) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._file = shard.file
        self._cached = _cached(descriptor, shard.nbytes) if direct >= 0 else b""

    def read(self, target: memoryview, begin: int, end: int) -> int:
        """Read a range to a page-aligned place; return where in it the first byte of the range came to lie.

        Raises:
            DamagedCopy: the file ends before.
            OSError: the file system refused.
        """
        if self._direct >= 0 and not self._holds(begin, end):
            first = begin - begin % _BLOCK_BYTES
            wanted = -(-end // _BLOCK_BYTES) * _BLOCK_BYTES - first
            try:
                if os.preadv(self._direct, [target[:wanted]], first) >= end - first:
                    return begin - first
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        read_exactly(self._descriptor, target[: end - begin], begin, self._file)
        return 0

    def _holds(self, begin: int, end: int) -> bool:
        """Say whether the page cache has most of a range."""
        pages = self._cached[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
        return 2 * pages.count(0) < len(pages)


@contextmanager
def _opened(descriptor: int, shard: Shard) -> Iterator[_File]:
    direct = -1
    if shard.nbytes >= _DIRECT_BYTES and hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # refused: the page cache serves every file system
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield _File(descriptor, direct, shard)
    finally:
        if direct >= 0:
            os.close(direct)


def _cached(descriptor: int, nbytes: int) -> bytes:
    """Return for each page of a file whether the page cache has it: 0 is no.

    Nothing is read through the mapping, so a file that shrinks meanwhile does no harm.
    """
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    try:
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE)
    except (OSError, ValueError):
        return bytes(found)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found)
    return bytes(found).translate(_LOWEST_BIT)
