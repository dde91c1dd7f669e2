"""Copies of verified tensors to a device: through two windows of registered memory, and small ones together.

A copy from ordinary memory runs at a tenth of the link's speed and waits for its end, and one copy for each
of 40,000 tensors costs more than their bytes. So threads of the host fill one window while the device reads
the other; what is smaller than 1 MiB is put in its places on the device, by one call for a window.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from outlast.checkpoint.content.memory import copy_slices
from outlast.checkpoint.content.transfers import SMALL

WINDOW = 64 << 20  # bytes; small tensors of a window are on the device twice
_PLACE = 64  # bytes; what begins at a multiple of it is copied at full speed, whatever its type

Upload = tuple[torch.Tensor, torch.Tensor]  # to a device, from the host; of one form, without gaps


def upload(moves: Sequence[Upload], threads: int) -> None:
    """Copy tensors from the host to devices, and wait for the end.

    Args:
        moves: targets and sources; the elements of both lie in memory in the same order, without gaps.
        threads: of the host that copy, the caller's included.

    Raises:
        RuntimeError: a device failed; the targets hold some of it.
    """
    by_device: dict[torch.device, list[Upload]] = {}
    for target, source in moves:
        by_device.setdefault(target.device, []).append((target, source))
    for device, mine in by_device.items():
        _send(device, mine, threads)


class _Window:
    """Memory of the host, and what is to be copied into it and from there."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._octets = _registered(nbytes, device)
        self._read = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used = 0
        self._fills: list[tuple[int, int, int]] = []  # as copy_slices takes them
        self._large: list[tuple[torch.Tensor, int]] = []  # octets on the device, and their place
        self._small: list[tuple[torch.Tensor, int]] = []

    @property
    def room(self) -> int:
        """Bytes that are free."""
        return max(0, self._octets.numel() - self._used)

    def take(self, target: torch.Tensor, address: int) -> None:
        """Take bytes on the way from an address of the host to octets on the device."""
        nbytes = target.numel()
        self._fills.append((self._octets.data_ptr() + self._used, address, nbytes))
        (self._small if nbytes < SMALL else self._large).append((target, self._used))
        self._used += -(-nbytes // _PLACE) * _PLACE

    def send(self, threads: int) -> None:
        """Send it, once the device has read what was in it before."""
        waits = self._read is not None
        if self._read is not None:
            self._read.synchronize()
        copy_slices(self._fills, threads)
        for target, begin in self._large:
            target.copy_(self._octets[begin : begin + target.numel()], non_blocking=waits)
        if self._small:
            first, (last, end) = self._small[0][1], self._small[-1]
            octets = self._octets[first : end + last.numel()]
            there = octets.to(last.device, non_blocking=waits)
            targets = [target for target, _ in self._small]
            sources = [there[begin - first : begin - first + one.numel()] for one, begin in self._small]
            torch._foreach_copy_(targets, sources)
        if self._read is not None:
            self._read.record()
        self._used = 0
        for listed in (self._fills, self._large, self._small):
            listed.clear()


def _send(device: torch.device, moves: Sequence[Upload], threads: int) -> None:
    """Copy tensors to one device, small ones first, and wait for the end."""
    total = sum(-(-nbytes_of(source) // _PLACE) * _PLACE for _, source in moves)
    with _on(device) as wait, torch.no_grad():
        windows = [_Window(min(WINDOW, total), device) for _ in range(1 if total <= WINDOW else 2)]
        at = 0
        for target, source in sorted(moves, key=lambda move: nbytes_of(move[1]) >= SMALL):
            octets, address = _octets(target), source.data_ptr()
            begin = 0
            while begin < octets.numel():
                end = min(octets.numel(), begin + windows[at].room)
                windows[at].take(octets[begin:end], address + begin)
                begin = end
                if not windows[at].room:
                    windows[at].send(threads)
                    at = (at + 1) % len(windows)
        windows[at].send(threads)
        wait()


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[Callable[[], object]]:
    """Make a device the current one; yield what waits for it."""
    if device.type != "cuda":
        yield lambda: None
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).synchronize


def _registered(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of the host that a device reads at the link's speed, or ordinary one if it is refused."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor without gaps as bytes, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()
