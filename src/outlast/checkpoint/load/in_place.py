"""From verified files to live objects: straight to their tensors where that is safe, else to new memory.

Saved content may go to a live tensor of the same form without memory of its own on the way. A file of the
node's memory tier is mapped and used where it is. Nobody else writes these files, and while ranks load
nobody stages. Afterwards the file becomes a buffer again and is overwritten, so what is still in use by then
is moved to other pages at the same addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from outlast._torch_compat import takes_plainly
from outlast.checkpoint.content.codecs import Coded
from outlast.checkpoint.content.memory import block_of, copy_slices
from outlast.checkpoint.content.state import content_of, entries_of, takes_as_torch_does, tensors_in
from outlast.checkpoint.load.reading import HeldFile, Room
from outlast.checkpoint.policy.manifest import Shard
from outlast.checkpoint.tiers.tier import CopyFolder

_Pair = tuple[torch.Tensor, torch.Tensor]  # saved, live
_Range = tuple[int, int, int]  # addresses, and the saved tensor that goes there; 0: none


def places_for(state: Mapping[str, object], saved: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Pair saved tensors with live ones that can stand for them: on the host, of the same form.

    A live tensor that was given the content of a saved one may then be loaded in its stead: a module
    finds nothing to copy, an optimizer keeps what it has. That holds of those that take their state as
    torch's own do. Tensors of which it is not certain that nothing else is written to the same memory
    are left out.

    Args:
        state: the live objects.
        saved: each one's content, by name.

    Returns:
        Live tensors by the identity of saved ones.
    """
    shared = _shared(saved)
    found: dict[int, torch.Tensor] = {}
    ranges: list[_Range] = []
    for name, holder in state.items():
        mine: set[_Range] = set()
        for old, live in _pairs(holder, saved[name]):
            if id(old) in shared or id(old) in found:
                continue
            found[id(old)] = live
            ranges.append(_range(live, id(old)))
            mine.add(_range(live, 0))
        ranges += {_range(one, 0) for one in _written(holder)} - mine
    params = {_range(one, 0) for holder in state.values() for one in _params(holder)}
    ranges += params - {(begin, end, 0) for begin, end, _ in ranges}
    for place in _overlapping(ranges):
        found.pop(place, None)
    return found


def _shared(saved: Mapping[str, Any]) -> set[int]:
    """Return the saved tensors that more than one object takes."""
    seen: set[int] = set()
    shared: set[int] = set()
    for content in saved.values():
        here = {id(one) for _, one in tensors_in(content)}
        shared |= seen & here
        seen |= here
    return shared


def _pairs(holder: object, saved: Any) -> Iterator[_Pair]:
    """Yield saved tensors with live ones that may be written to in their stead."""
    if isinstance(holder, torch.nn.Module):
        if takes_plainly(holder):
            for name, live in holder.state_dict().items():
                if isinstance(saved.get(name), torch.Tensor) and _alike(saved[name], live):
                    yield saved[name], live
    elif isinstance(holder, torch.optim.Optimizer) and takes_as_torch_does(holder):
        params = {one.data_ptr() for one in _params(holder)}
        for old, live in _optimizer_pairs(holder, saved):
            if _alike(old, live) and old.stride() == live.stride() and live.data_ptr() not in params:
                yield old, live


def _written(holder: object) -> Iterator[torch.Tensor]:
    """Yield the live tensors to which an object copies what it takes."""
    if isinstance(holder, (torch.nn.Module, torch.Tensor, dict, list)):
        for _, one in tensors_in(content_of(holder)):
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided:
                yield one


def _params(holder: object) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer steps."""
    if isinstance(holder, torch.optim.Optimizer):
        for one in chain.from_iterable(group["params"] for group in holder.param_groups):
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided:
                yield one


def _optimizer_pairs(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[_Pair]:
    for _, old, live in entries_of(optimizer, saved):
        for name, value in old.items():
            if isinstance(value, torch.Tensor) and isinstance(live.get(name), torch.Tensor):
                yield value, live[name]


def _alike(saved: torch.Tensor, live: Any) -> bool:
    """Say whether the bytes of a saved tensor can be put where a live one has its own."""
    return (
        type(live) is torch.Tensor
        and live.device.type == "cpu"
        and live.layout is torch.strided
        and live.is_contiguous()
        and saved.is_contiguous()
        and not (live.requires_grad or live.is_conj() or live.is_neg())
        and (live.dtype, live.shape) == (saved.dtype, saved.shape)
        and live.numel() > 0
    )


def _range(tensor: torch.Tensor, place: int) -> _Range:
    """Return the addresses between which a tensor's elements lie."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps) if tensor.numel() else -1
    return begin, begin + (last + 1) * tensor.element_size(), place


def _overlapping(ranges: list[_Range]) -> Iterator[int]:
    """Yield the saved tensors of ranges that have a byte in common with another one."""
    reached, holder = 0, 0
    for begin, end, place in sorted(ranges):
        if begin < end and begin < reached:
            yield from (place, holder)
        if end > reached:
            reached, holder = end, place


_MEMORY = "/dev/shm"
_MAY_MOVE, _TO_PLACE = 1, 2  # MREMAP_MAYMOVE, MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """The content of a file, of which parts are lent as tensors.

    Args:
        memory: a private mapping: what is written to a tensor does not come to the file.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._lent: dict[int, tuple[int, int, weakref.ref[memoryview]]] = {}

    @property
    def content(self) -> memoryview:
        """All bytes of the file."""
        return memoryview(self._memory)

    def lend(self, begin: int, end: int) -> torch.Tensor:
        """Return a range as bytes in a tensor."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        octets = self.content[begin:end]
        found = torch.frombuffer(octets, dtype=torch.uint8)
        self._lent[found.data_ptr()] = (begin, end, weakref.ref(octets))  # lives as long as the storage does
        return found

    def lends(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is one that was lent."""
        return tensor.untyped_storage().data_ptr() in self._lent

    def part(self) -> int:
        """Give what is still in use memory of its own, at the same addresses; return how many bytes that are.

        Raises:
            OSError: there is no memory.
        """
        kept = sorted((begin, end) for begin, end, octets in self._lent.values() if octets() is not None)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        done = 0  # in whole pages; two tensors may share one
        for begin, end in kept:
            first = max(done, begin - begin % mmap.PAGESIZE)
            done = max(first, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
            if first < done:
                _replace(base + first, done - first)
        return sum(end - begin for begin, end in kept)


def _replace(address: int, nbytes: int) -> None:
    """Put copies in the place of mapped pages.

    Pages that a write made private are not enough: they, too, go when the file is cut.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(nbytes)
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, size, access, kind, -1, ctypes.c_long(0))
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), f"no memory for {nbytes} bytes of what was loaded")
    ctypes.memmove(copy, address, nbytes)
    old, new = ctypes.c_void_p(copy), ctypes.c_void_p(address)
    if libc.mremap(old, size, size, _MAY_MOVE | _TO_PLACE, new) == _FAILED:
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes of what was loaded cannot be put in their place")


def map_file(folder: CopyFolder, shard: Shard) -> MappedFile | None:
    """Map a rank's safetensors file; None when it must be read.

    Args:
        folder: a copy in the node's memory tier.
        shard: what the JSON file says of the file.

    Raises:
        DamagedCopy: the file is missing, no regular file, or of another size.
        OSError: the file system refused.
    """
    with folder.open(shard.file, shard.nbytes) as (descriptor, _):
        try:
            if os.fstat(descriptor).st_dev != os.stat(_MEMORY).st_dev:
                return None
            return MappedFile(mmap.mmap(descriptor, shard.nbytes, flags=mmap.MAP_PRIVATE))
        except (OSError, ValueError):
            return None


_Move = tuple[torch.Tensor, torch.Tensor]  # to, from; both in one block, of one order, and on the host


class InPlaceLoad(Protocol):
    """What was verified and is still to come to the live objects, once all ranks have agreed."""

    def land(self) -> None:
        """Bring it to live tensors, or to memory of its own, and let these stand for what was lent.

        Raises:
            DamagedCopy: it is no longer as it was verified; the live tensors must not be used.
            OSError: it cannot be read any more; the same.
        """
        ...

    def close(self) -> None:
        """Let go of the file, after the live objects have taken what they take.

        Raises:
            OSError: there is no memory.
        """
        ...


class FromMapping:
    """From mapped files.

    Args:
        state: the live objects.
        saved: each one's content, by name; changed in place.
        files: lend the tensors in them.
    """

    def __init__(
        self, state: Mapping[str, object], saved: dict[str, Any], files: Sequence[MappedFile]
    ) -> None:
        self._state, self._saved, self._files = state, saved, files

    def land(self) -> None:
        """Replace lent tensors that a live object would keep; modules copy, so theirs may stay."""
        replaced = places_for(self._state, self._saved)
        lent = {id(one): one for _, one in tensors_in(self._saved) if id(one) in replaced}
        moves: list[_Move] = [(replaced[place], one) for place, one in lent.items()]
        for name, holder in self._state.items():
            if not isinstance(holder, torch.nn.Module):
                kept = {id(one): one for _, one in tensors_in(self._saved[name])}
                wanted = {at: one for at, one in kept.items() if self._lends(one) and at not in replaced}
                replaced.update(_room_for(wanted, moves))
        _exchange(self._saved, replaced)
        addresses = [(to.data_ptr(), source.data_ptr(), _nbytes(source)) for to, source in moves]
        copy_slices(addresses, torch.get_num_threads())

    def _lends(self, tensor: torch.Tensor) -> bool:
        return any(file.lends(tensor) for file in self._files)

    def close(self) -> None:
        """Give what is still in use memory of its own."""
        for file in self._files:
            file.part()


class FromFile:
    """From files that are read a second time.

    Args:
        saved: each object's content, by name; changed in place.
        places: live tensors that stand for saved ones, by the identity of these.
        files: verified, each with where the content of these live tensors is in it.
    """

    def __init__(
        self,
        saved: dict[str, Any],
        places: Mapping[int, torch.Tensor],
        files: Sequence[tuple[HeldFile, Sequence[Room]]],
    ) -> None:
        self._saved, self._places, self._files = saved, places, files

    def land(self) -> None:
        """Read the live tensors."""
        for file, rooms in self._files:
            file.read(rooms)
        _exchange(self._saved, self._places)

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._files:
            file.close()


def _room_for(tensors: Mapping[int, torch.Tensor], moves: list[_Move]) -> dict[int, torch.Tensor]:
    """Return memory for tensors in one block, freed with the last of them; note what comes to it."""
    octets = block_of({number: _nbytes(tensor) for number, tensor in tensors.items()})
    found = {
        number: octets[number].view(one.dtype).as_strided(one.shape, one.stride())
        for number, one in tensors.items()
    }
    moves += [(found[number], one) for number, one in tensors.items()]
    return found


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _exchange(value: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """Exchange the tensors in a decoded value for others; containers are changed in place."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if isinstance(value, Coded):
        _exchange(value.parts, others)
    elif isinstance(value, dict):
        for key, each in value.items():
            value[key] = _exchange(each, others)
    elif type(value) is list:
        value[:] = [_exchange(each, others) for each in value]
    elif type(value) is tuple:
        return tuple(_exchange(each, others) for each in value)
    return value
