"""Samples of the memory that processes and their descendants use, private and shared."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

EVERY = 0.02


def held(pids: list[int], folder: Path | None) -> int:
    """Return the bytes of memory of processes and their descendants, shared pages once.

    Args:
        pids: the processes.
        folder: on tmpfs; its blocks count even if no process maps them. None: there is none.
    """
    own = shared = 0
    for pid in family(pids):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Pss_Anon", "Pss_File"):
                    own += int(rest.split()[0]) << 10
                elif name == "Pss_Shmem":
                    shared += int(rest.split()[0]) << 10
    return own + max(shared, 0 if folder is None else blocks(folder))


def blocks(folder: Path) -> int:
    """Return the bytes that files below a folder occupy."""
    found = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(root, name)).st_blocks * 512
    return found


def family(pids: list[int]) -> set[int]:
    """Return processes and their descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    left = list(pids)
    while left:
        pid = left.pop()
        found.add(pid)
        left += children.get(pid, [])
    return found


class Watch:
    """Samples in a thread until it is told to stop.

    Args:
        pids: the processes.
        folder: on tmpfs, None when there is none.
    """

    def __init__(self, pids: list[int], folder: Path | None) -> None:
        self._pids, self._folder = pids, folder
        self._over = threading.Event()
        self.baseline = held(pids, folder)
        self.peak, self.samples = self.baseline, 0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(EVERY):
            self.peak = max(self.peak, held(self._pids, self._folder))
            self.samples += 1

    def stop(self) -> None:
        """Take no more samples."""
        self._over.set()
        self._thread.join()
