"""The state that bench/checkpoint.py saves, and the raw speed of host and disk for as many bytes."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

BLOCK = 16 << 20
_SECTOR = 4096
_COPIES = 3
_PARAMETERS = 16  # with two moments each: 48 large tensors


class State:
    """A model and an Adam whose moments are there already, all fp32.

    Args:
        nbytes: of parameters and moments together.
        seed: of the values.
    """

    def __init__(self, nbytes: int, seed: int) -> None:
        torch.manual_seed(seed)
        width = 1024
        rows = nbytes // (3 * _PARAMETERS * width * 4)
        self.model = torch.nn.ParameterDict(
            {f"weight{number:02d}": torch.randn(rows, width) for number in range(_PARAMETERS)}
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for one in self.model.parameters():
            self.optimizer.state[one] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn_like(one, requires_grad=False),
                "exp_avg_sq": torch.rand_like(one, requires_grad=False),
            }
        self.nbytes = sum(one.numel() * one.element_size() for one in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return the large tensors as they are now; a load may have replaced some."""
        found = [one.detach() for one in self.model.parameters()]
        for values in self.optimizer.state.values():
            found += [values["exp_avg"], values["exp_avg_sq"]]
        return found

    def holders(self) -> dict[str, Any]:
        """Return the live objects."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tree(self) -> dict[str, Any]:
        """Return what the live objects hold."""
        return {name: holder.state_dict() for name, holder in self.holders().items()}

    def change(self) -> None:
        """Write every tensor, as an optimizer's step does."""
        for one in self.tensors():
            one.add_(1)

    def fingerprint(self) -> list[int]:
        """Return a number for each tensor that differs between any two steps."""
        return [int(one.view(torch.int32).sum(dtype=torch.int64)) for one in self.tensors()]


class Raw:
    """The state's bytes in one warm buffer, copied, written and read in the simplest way.

    Args:
        state: whose bytes.
        folder: on the disk that is measured.
        name: of its files.
    """

    def __init__(self, state: State, folder: Path, name: str) -> None:
        self._state = state
        self._folder, self._name = folder, name
        self._files: list[Path] = []
        self._written = 0
        self._memory = mmap.mmap(-1, state.nbytes)  # page-aligned, as O_DIRECT wants it
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self.copy()

    @property
    def path(self) -> Path:
        """The file that was written last."""
        return self._files[-1]

    def copy(self) -> float:
        """Return the seconds of a torch copy_ of the whole state into warm memory, the median of three."""
        return statistics.median(self._copy() for _ in range(_COPIES))

    def _copy(self) -> float:
        began, place = time.perf_counter(), 0
        for one in self._state.tensors():
            end = place + one.numel() * one.element_size()
            self.buffer[place:end].view(torch.float32).view(one.shape).copy_(one)
            place = end
        return time.perf_counter() - began

    def move(self) -> float:
        """Return the seconds of such a copy by one thread, the median of three."""
        return statistics.median(self._move() for _ in range(_COPIES))

    def _move(self) -> float:
        began, place = time.perf_counter(), self.buffer.data_ptr()
        for one in self._state.tensors():
            nbytes = one.numel() * one.element_size()
            ctypes.memmove(place, one.data_ptr(), nbytes)
            place += nbytes
        return time.perf_counter() - began

    def fresh(self, huge: bool) -> float:
        """Return the seconds of a first write to as much new memory.

        If a hypervisor reclaims free pages, this may be a large part of a load.

        Args:
            huge: in huge pages, as outlast asks for them; else in ordinary ones.
        """
        memory = mmap.mmap(-1, len(self.view), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        began = time.perf_counter()
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        return time.perf_counter() - began

    def digest(self) -> float:
        """Return the seconds of outlast's digests of all bytes, by one thread."""
        from outlast.checkpoint.content.digest import chunk_digests

        began = time.perf_counter()
        chunk_digests(self.view)
        return time.perf_counter() - began

    def write(self, direct: bool) -> float:
        """Return the seconds of a write to a new file, synced.

        Each time to a new one, the one before the last removed: a file written over would find the
        memory of its old pages, which no checkpoint does.

        Args:
            direct: past the page cache.
        """
        self._written += 1
        self._files.append(self._folder / f"{self._name}-{self._written}")
        for old in self._files[:-2]:
            old.unlink()
        del self._files[:-2]
        os.sync()  # what was removed before is not this write's to pay for
        size = len(self.view)
        whole = size - size % _SECTOR if direct else size
        began = time.perf_counter()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(self.path, flags | (os.O_DIRECT if direct else 0), 0o600)
        for place in range(0, whole, BLOCK):
            block = self.view[place : min(place + BLOCK, whole)]
            if os.pwrite(descriptor, block, place) != len(block):
                raise OSError(f"{self.path}: a short write")
        if whole < size:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
            os.pwrite(descriptor, self.view[whole:], whole)
        os.fsync(descriptor)
        seconds = time.perf_counter() - began
        os.close(descriptor)
        return seconds

    def read(self, direct: bool = False) -> float:
        """Return the seconds of a read into the warm buffer.

        Args:
            direct: past the page cache.
        """
        began = time.perf_counter()
        descriptor = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        size = len(self.view)
        for place in range(0, size, BLOCK):
            block = self.view[place : min(place + BLOCK, size)]
            if direct and len(block) % _SECTOR:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
            if os.preadv(descriptor, [block], place) != len(block):
                raise OSError(f"{self.path}: a short read")
        os.close(descriptor)
        return time.perf_counter() - began


def drop(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(paths: list[Path]) -> None:
    """Read files into the page cache."""
    scratch = bytearray(BLOCK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def sync(paths: list[Path]) -> None:
    """Sync files and their folders."""
    for path in [*paths, *{one.parent for one in paths}]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
