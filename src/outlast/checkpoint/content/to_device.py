"""Copies of verified tensors to a device: through two windows of pinned memory, and small ones together.

The host waits for each copy from pageable memory. With 40,000 small tensors the calls take longer than the
transfer. So threads fill one window while the device reads the other. The tensors below 1 MiB of a window are
transferred together, and one call on the device copies them to their places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.memory import ALIGNMENT, copy_slices
from outlast.checkpoint.content.transfers import SMALL, is_asynchronous, octets_in_memory

BLOCK = 64 << 20  # bytes of a window; the device needs room for the small tensors of one window twice

Move = tuple[torch.Tensor, torch.Tensor]  # target on a device, source on the host; of one form, without gaps


def copy_to_devices(moves: Sequence[Move], threads: int) -> None:
    """Copy tensors from the host to devices, and wait for the end.

    Args:
        moves: targets and sources; the elements of both are in memory in the same order, without gaps.
        threads: of the host that copy, the caller's included.

    Raises:
        RuntimeError: a device failed; the targets hold some of it.
    """
    by_device: dict[torch.device, list[Move]] = {}
    for target, source in moves:
        by_device.setdefault(target.device, []).append((target, source))
    for device, mine in by_device.items():
        with (
            torch.cuda.device(device) if is_asynchronous(device) else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            _copy(device, mine, threads)


def _copy(device: torch.device, moves: Sequence[Move], threads: int) -> None:
    """Copy tensors to one device, small ones first, and wait for the end."""
    total = sum(_aligned(source.nbytes) for _, source in moves)
    windows = [_Window(min(BLOCK, total), device) for _ in range(1 if total <= BLOCK else 2)]
    at = 0
    for target, source in sorted(moves, key=lambda move: move[1].nbytes >= SMALL):
        octets, address, begin = octets_in_memory(target.detach()), source.data_ptr(), 0
        while begin < octets.numel():
            end = min(octets.numel(), begin + windows[at].room)
            windows[at].add(octets[begin:end], address + begin, small=source.nbytes < SMALL)
            begin = end
            if not windows[at].room:
                windows[at].send(threads)
                at = (at + 1) % len(windows)
    windows[at].send(threads)
    for window in windows:
        window.until_read()


class _Window:
    """Host memory for one transfer, and its list of copies."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._octets = _pinned(nbytes, device)
        self._read = torch.cuda.Event() if is_asynchronous(device) else None  # type: ignore[no-untyped-call]
        self._used = 0
        self._fills: list[tuple[int, int, int]] = []  # as copy_slices takes them
        self._large: list[tuple[torch.Tensor, int]] = []  # bytes on the device, and their place
        self._small: list[tuple[torch.Tensor, int]] = []

    @property
    def room(self) -> int:
        """Bytes that are free."""
        return max(0, self._octets.numel() - self._used)

    def add(self, target: torch.Tensor, address: int, small: bool) -> None:
        """Add a copy from an address of the host to bytes on the device."""
        self._fills.append((self._octets.data_ptr() + self._used, address, target.numel()))
        (self._small if small else self._large).append((target, self._used))
        self._used += _aligned(target.numel())

    def until_read(self) -> None:
        """Wait until the device has read the last content."""
        if self._read is not None:
            self._read.synchronize()

    def send(self, threads: int) -> None:
        """Wait until the device has read the last content, fill the window, and begin its transfer."""
        self.until_read()
        copy_slices(self._fills, threads)
        beside = self._read is not None
        for target, begin in self._large:
            target.copy_(self._octets[begin : begin + target.numel()], non_blocking=beside)
        if self._small:
            first, (last, end) = self._small[0][1], self._small[-1]
            there = self._octets[first : end + last.numel()].to(last.device, non_blocking=beside)
            sources = [there[begin - first : begin - first + one.numel()] for one, begin in self._small]
            _torch_compat.copy_each([target for target, _ in self._small], sources)
        if self._read is not None:
            self._read.record()
        self._used = 0
        for listed in (self._fills, self._large, self._small):
            listed.clear()


def _pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return pinned host memory; pageable memory if the driver refuses."""
    if is_asynchronous(device):
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
