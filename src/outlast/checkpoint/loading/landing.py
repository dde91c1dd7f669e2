"""From a verified file to live objects: to tensors that they have, or to memory of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from outlast.checkpoint.content.codecs import Coded
from outlast.checkpoint.content.memory import ALIGNMENT, allocate, as_tensor
from outlast.checkpoint.content.state import tensors_in
from outlast.checkpoint.loading.mapped import MappedFile
from outlast.checkpoint.loading.places import places_for
from outlast.checkpoint.loading.reading import HeldFile, Room, in_threads

_SLICE_BYTES = 8 << 20  # what a thread copies at a time
_Move = tuple[torch.Tensor, torch.Tensor]  # to, from; both contiguous and on the host


class Landing(Protocol):
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
        _carry_out(moves)

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
    places, size = {}, 0
    for number, tensor in tensors.items():
        places[number] = size
        size += -(-_nbytes(tensor) // ALIGNMENT) * ALIGNMENT
    block = as_tensor(allocate(size))
    found = {}
    for number, one in tensors.items():
        octets = block[places[number] : places[number] + _nbytes(one)]
        found[number] = octets.view(one.dtype).view(one.shape)
        moves.append((found[number], one))
    return found


def _carry_out(moves: list[_Move]) -> None:
    """Copy in threads that, unlike those of torch's copy_, do not wait for each other on a busy host."""
    slices = [
        (target.data_ptr() + place, source.data_ptr() + place, min(_SLICE_BYTES, _nbytes(source) - place))
        for target, source in moves
        for place in range(0, _nbytes(source), _SLICE_BYTES)
    ]

    def work(number: int) -> None:
        ctypes.memmove(*slices[number])

    in_threads(lambda: work, len(slices), torch.get_num_threads())


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
