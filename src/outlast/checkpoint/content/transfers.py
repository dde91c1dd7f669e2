"""Copies between devices and host memory: small tensors together.

Into an image there is one wait for each device. A copy that waits for its end costs about 20 us whatever its
size, and small ones are most of a state: those below 1 MiB are put one behind the other on the device first.
Large ones go to their places directly. A permuted tensor is made contiguous in parts, so that the device need
not have room for all of it.

Verified tensors reach a device through two windows of pinned memory. The host waits for each copy from
pageable memory. With 40,000 small tensors the calls take longer than the transfer. So threads fill one window
while the device reads the other. The tensors below 1 MiB of a window are transferred together, and one call
on the device copies them to their places.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.memory import ALIGNMENT, copy_slices

SMALL = 1 << 20  # bytes; at 50 GB/s such a copy takes as long as to begin one
GATHERED = 64 << 20  # bytes that are gathered at a time, and that are made contiguous at a time
_TINY = 16 << 10  # bytes; a larger tensor of the host takes longer to copy twice than to look at
_RUN = 4 << 20  # bytes of them that are put one behind the other at a time; a cache holds them
WINDOW = 256 << 20  # bytes; no copy crosses a multiple of it, where registered memory has a seam
BLOCK = 64 << 20  # bytes of a window; the device needs room for the small tensors of one window twice

Move = tuple[torch.Tensor, torch.Tensor]  # target on a device, source on the host; of one form, without gaps
_JOINED = (  # what every device can put one behind the other; other types are taken as bytes
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class CopyPlan:
    """How tensors come to their places in an image: found once for tensors of one form.

    Args:
        begins: where the bytes of each tensor begin in the image.
        runs: small tensors of one device and type that follow each other.
        moves: other plain tensors of the host: which, begin and bytes.
        rest: all others.
    """

    begins: Sequence[int]
    runs: Sequence[_Run]
    moves: Sequence[tuple[int, int, int]]
    rest: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], begins: Sequence[int]) -> CopyPlan:
        """Return the plan for tensors whose bytes begin at ``begins`` in the image."""
        runs: list[_Run] = []
        moves: list[tuple[int, int, int]] = []
        rest: list[int] = []
        for at, (one, begin) in enumerate(zip(tensors, begins, strict=True)):
            nbytes, here, plain = one.numel() * one.element_size(), _is_here(one), _is_in_order(one)
            tiny, most = (_TINY, _RUN) if here else (SMALL, GATHERED)
            if nbytes >= tiny or (here and not (plain and one.dtype in _JOINED)):
                if here and plain:
                    moves.append((at, begin, nbytes))
                else:
                    rest.append(at)
            elif (
                runs
                and (runs[-1].stop, runs[-1].begin + runs[-1].nbytes) == (at, begin)
                and runs[-1].nbytes + nbytes <= most
                and (tensors[at - 1].dtype, tensors[at - 1].device) == (one.dtype, one.device)
            ):
                runs[-1] = replace(runs[-1], stop=at + 1, nbytes=runs[-1].nbytes + nbytes)
            else:
                runs.append(_Run(at, at + 1, begin, nbytes))
        return cls(begins, runs, moves, rest)

    def copy(self, tensors: Sequence[torch.Tensor], image: torch.Tensor, threads: int) -> None:
        """Copy the bytes of tensors to their places, and wait for the end.

        Args:
            tensors: of the form of those that this was made of.
            image: bytes in host memory.
            threads: that copy within the host's memory, the caller's included.
        """
        devices = self.send(tensors, image)
        target = image.data_ptr()
        apart = ((tensors[at : at + 1], self.begins[at]) for at in self.rest)
        for alike, begin in (*((tensors[run.first : run.stop], run.begin) for run in self.runs), *apart):
            if _is_here(alike[0]):  # while the devices are at work
                octets = _joined(alike)
                # Not copy_: its threads wait for each other, longer on a busy host than the copy takes.
                ctypes.memmove(target + begin, octets.data_ptr(), octets.numel())
        moves = ((target + begin, tensors[at].data_ptr(), nbytes) for at, begin, nbytes in self.moves)
        copy_slices(moves, threads)
        for device in devices:
            if is_asynchronous(device):
                torch.cuda.current_stream(device).synchronize()

    def send(self, tensors: Sequence[torch.Tensor], image: torch.Tensor) -> set[torch.device]:
        """Begin the copies from devices; return these. Copies into registered memory run beside others."""
        devices = set()
        for run in self.runs:
            if not _is_here(tensors[run.first]):
                devices.add(tensors[run.first].device)
                _place(_joined(tensors[run.first : run.stop]), image, run.begin)
        for at in self.rest:
            if not _is_here(tensors[at]):
                devices.add(tensors[at].device)
                begin = self.begins[at]
                for octets in _in_parts(tensors[at].detach()):
                    _place(octets, image, begin)
                    begin += octets.numel()
        return devices


@dataclass(frozen=True)
class _Run:
    """Tensors that follow each other, in number from ``first`` to before ``stop``, and in an image."""

    first: int
    stop: int
    begin: int
    nbytes: int


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors of one device and type, one behind the other, as bytes."""
    if tensors[0].dtype in _JOINED:
        return octets_in_memory(_torch_compat.one_behind_the_other([one.detach() for one in tensors]))
    return torch.cat([octets_of(one) for one in tensors])


def _place(octets: torch.Tensor, image: torch.Tensor, begin: int) -> None:
    """Begin to copy bytes to their place, in parts that cross no multiple of the window."""
    at = 0
    while at < octets.numel():
        nbytes = min(octets.numel() - at, WINDOW - (begin + at) % WINDOW)
        part = octets.narrow(0, at, nbytes)
        image.narrow(0, begin + at, nbytes).copy_(part, non_blocking=is_asynchronous(part.device))
        at += nbytes


def copy_tensors(pairs: Iterable[tuple[torch.Tensor, int]], image: torch.Tensor, threads: int) -> None:
    """Copy the bytes of tensors to their places in an image, and wait for the end.

    Args:
        pairs: tensors of any device, and where their bytes begin in the image.
        image: bytes in host memory.
        threads: that copy within the host's memory, the caller's included.
    """
    listed = list(pairs)
    tensors, begins = [one for one, _ in listed], [begin for _, begin in listed]
    CopyPlan.of(tensors, begins).copy(tensors, image, threads)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor, in order, are bytes of the host's memory."""
    return tensor.is_cpu and _is_in_order(tensor)


def _is_in_order(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def octets_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, in order, as bytes on its own device."""
    return octets_in_memory(tensor.detach().resolve_conj().resolve_neg().contiguous())


def octets_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor without gaps as bytes, in the order of its memory."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, and a view keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the host goes on while a copy from a device is under way; else it waits for each."""
    return device.type == "cuda"


def _in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in order: at once where they are there, else part by part."""
    nbytes = tensor.numel() * tensor.element_size()
    if _is_in_order(tensor) or nbytes <= GATHERED:
        yield octets_of(tensor)
    elif tensor.shape[0] == 1:
        yield from _in_parts(tensor.select(0, 0))
    else:
        rows = max(1, GATHERED * tensor.shape[0] // nbytes)
        for part in torch.split(tensor, rows):
            yield from _in_parts(part)


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
