"""populate: how long a thread that makes the pages of a buffer keeps the main thread, by how it makes them.

The main thread either runs Python, or maps, writes and unmaps 1 MiB again and again, as torch's allocator
does with large tensors. "longest_ms" is the longest of its turns: Python's lock, or that of the memory map.

    python bench/populate.py --gib 4 --out populate.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import figures

from outlast.checkpoint.content.memory import populate

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
LIBC = ctypes.CDLL(None)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def python() -> None:
    """Do nothing."""


def mapping() -> None:
    """Take the lock of the memory map twice."""
    address = LIBC.mmap(None, 1 << 20, ACCESS, PRIVATE, -1, 0)
    ctypes.memset(address, 1, 4096)
    LIBC.munmap(address, 1 << 20)


def pythons_own(descriptor: int, nbytes: int) -> object:
    os.posix_fallocate(descriptor, 0, nbytes)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def libcs(descriptor: int, nbytes: int) -> object:
    os.posix_fallocate(descriptor, 0, nbytes)
    address = LIBC.mmap(None, nbytes, ACCESS, mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, 0)
    kept = contextlib.ExitStack()
    kept.callback(LIBC.munmap, address, nbytes)
    return kept


def windows(descriptor: int, nbytes: int) -> object:
    memory = mmap.mmap(descriptor, nbytes)
    populate(descriptor, memory)
    return memory


def measured(make: Callable[[], object], turn: Callable[[], None]) -> dict[str, float]:
    """Return the longest turn while a thread makes a buffer, and how long that took; it is unmapped later."""
    over, kept = threading.Event(), []

    def work() -> None:
        kept.append(make())
        over.set()

    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while not over.is_set():
        turn()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    if isinstance(kept[0], contextlib.ExitStack):
        kept[0].close()
    return {"longest_ms": longest * 1e3, "made_s": last - began}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    options = parser.parse_args()
    nbytes, lines = int(options.gib * 2**30), figures.Lines(options.out)
    found: list[dict[str, Any]] = [figures.surroundings(0)]
    for turn in (python, mapping):
        for make in (pythons_own, libcs, windows):
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                os.ftruncate(file.fileno(), nbytes)
                times = measured(lambda: make(file.fileno(), nbytes), turn)  # noqa: B023 - called within the turn
            found.append({"record": "populate", "main": turn.__name__, "made": make.__name__, **times})
    for line in found:
        lines.write(line)
        figures.say(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
