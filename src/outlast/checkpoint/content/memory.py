"""Host memory for whole shards, and copies within it by several threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch

from outlast.ipc.limits import processors

Key = TypeVar("Key")
ALIGNMENT = 64  # bytes; that of torch's own allocator: kernels may round differently on other addresses
_SLICE_BYTES = 8 << 20  # what a thread copies at a time
_PAGES_BYTES = 64 << 20  # populated at a time


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Make many objects that all live to the end of the block, without a search for garbage among them.

    With 40,000 tensors the searches took as long again as the rest of a capture, and longer than a layout.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


def share_of_processors(ranks: int) -> int:
    """Return how many threads each of the ranks of a node may use while training stands still.

    OMP_NUM_THREADS, 1 as a rule, is for training.
    """
    return max(1, processors() // ranks)


def allocate(nbytes: int) -> mmap.mmap:
    """Return private zeroed memory of at least one byte, in huge pages where the kernel grants them.

    First writes into ordinary pages run at a tenth of the memory's speed; for a load, which
    always writes into new memory, that would be most of its time.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return memory  # a kernel without huge pages: slower, nothing else
    return memory


class Loan(NamedTuple):
    """Memory of a load.

    Args:
        memory: for a whole file.
        reserve: allocates the pages of a range; called with its begin and size before it is written.
        is_filled: it has the content of the file already, which is to be verified.
    """

    memory: mmap.mmap
    reserve: Callable[[int, int], object] = lambda *_: None
    is_filled: bool = False


def populate(descriptor: int, memory: mmap.mmap, rest: Callable[[float], object] = lambda _: None) -> None:
    """Allocate the pages of a file in memory and map them, in windows; threads of Python go on meanwhile.

    mmap.mmap(MAP_POPULATE) holds Python's lock until all pages exist. It and madvise also hold the lock of
    the memory map, which each large allocation of torch takes (two cores; on an H200 a step took 6.6 s).
    Reads hold neither lock and take as long: 1 s a GiB where pages are allocated, 0.14 s where they exist. On
    tmpfs a page that a read has mapped can be written. libc reads the pages: a thread that is in torch when
    the interpreter ends aborts the process.

    Args:
        descriptor: of the file, which has its size.
        memory: all of it, shared.
        rest: called after each window with the seconds that it took.

    Raises:
        OSError: there is no room; or the script has closed the descriptor.
    """
    status = os.fstat(descriptor)
    address = address_of(memory) if len(memory) else 0
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    for begin in range(0, len(memory), _PAGES_BYTES):
        nbytes, began = min(_PAGES_BYTES, len(memory) - begin), time.monotonic()
        if not os.path.samestat(status, os.fstat(descriptor)):  # its number is that of a file of the script
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.posix_fallocate(descriptor, begin, nbytes)
        libc.memcmp(address + begin, address + begin, nbytes)  # glibc and musl read equal addresses, too
        rest(time.monotonic() - began)


def address_of(memory: mmap.mmap) -> int:
    """Return where it begins, which is valid as long as it is mapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def as_tensor(memory: mmap.mmap) -> torch.Tensor:
    """Return the memory as bytes in a tensor that shares and keeps it."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def block_of(sizes: Mapping[Key, int]) -> dict[Key, torch.Tensor]:
    """Return memory for tensors, as bytes, by key; it is one block, which is freed with the last of them.

    Args:
        sizes: bytes of each tensor.
    """
    places, size = {}, 0
    for key, nbytes in sizes.items():
        places[key] = (size, size + nbytes)
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    octets = as_tensor(allocate(size))
    return {key: octets[begin:end] for key, (begin, end) in places.items()}


def copy_slices(moves: Iterable[tuple[int, int, int]], threads: int) -> None:
    """Copy bytes from address to address, large moves in slices that threads share.

    Unlike the threads of torch's copy_ none waits for another: one that gets no processor leaves its
    share to the others.

    Args:
        moves: target, source and number of bytes of each.
        threads: how many, the caller's included.
    """
    slices: list[tuple[int, int, int]] = []
    for target, source, nbytes in moves:
        if nbytes < _SLICE_BYTES:
            ctypes.memmove(target, source, nbytes)
        else:
            places = range(0, nbytes, _SLICE_BYTES)
            slices += [(target + at, source + at, min(_SLICE_BYTES, nbytes - at)) for at in places]

    def work(number: int) -> None:
        ctypes.memmove(*slices[number])

    in_threads(lambda: work, len(slices), threads)


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
    try:
        if failed:
            raise failed[min(failed)]
    finally:
        failed.clear()  # an error keeps its frames, and these keep what they have read
