"""From a mapped file to live objects: what they would keep gets memory of its own first."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from outlast.checkpoint.codecs import Coded
from outlast.checkpoint.mapped import MappedFile
from outlast.checkpoint.memory import ALIGNMENT, allocate, as_tensor
from outlast.checkpoint.reading import in_threads
from outlast.checkpoint.state import tensors_in

_SLICE_BYTES = 8 << 20  # what a thread copies at a time
_Move = tuple[torch.Tensor, torch.Tensor]  # to, from; both contiguous and on the host


def land(state: Mapping[str, object], saved: dict[str, Any], file: MappedFile) -> None:
    """Replace lent tensors that a live object would keep; modules copy, so theirs stay as they are.

    An optimizer keeps what it is given. Where it holds tensors of the same form, these are given the
    saved content and stand for it; everything else comes to new memory.

    Args:
        state: the live objects.
        saved: each one's content, by name; changed in place.
        file: lends the tensors in it.
    """
    replaced: dict[int, torch.Tensor] = {}
    moves: list[_Move] = []
    for name, holder in state.items():
        if isinstance(holder, torch.optim.Optimizer) and _plain(holder):
            taken = {one.data_ptr() for group in holder.param_groups for one in group["params"]}
            for old, live in _pairs(holder, saved[name]):
                if file.lends(old) and id(old) not in replaced and _alike(old, live, taken):
                    moves.append((live, old))
                    replaced[id(old)] = live
                    taken.add(live.data_ptr())
    for name, holder in state.items():
        if not isinstance(holder, torch.nn.Module):
            kept = {id(one): one for _, one in tensors_in(saved[name])}
            wanted = {place: one for place, one in kept.items() if file.lends(one) and place not in replaced}
            replaced.update(_room_for(wanted, moves))
            saved[name] = _exchange(saved[name], lambda one: replaced.get(id(one), one))
    _carry_out(moves)


def _plain(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer takes its state as torch's own do."""
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and not optimizer._optimizer_load_state_dict_pre_hooks


def _pairs(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield saved tensors with the live ones in whose place they come."""
    then = chain.from_iterable(group["params"] for group in saved["param_groups"])
    now = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, param in zip(then, now, strict=True):
        live = optimizer.state.get(param, {})
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and isinstance(live.get(name), torch.Tensor):
                yield value, live[name]


def _alike(saved: torch.Tensor, live: torch.Tensor, taken: set[int]) -> bool:
    """Say whether a live tensor can stand for a saved one.

    Args:
        saved: what was saved.
        live: on the host.
        taken: where memory lies that is something else's, too.
    """
    return (
        type(live) is torch.Tensor
        and live.device.type == "cpu"
        and live.is_contiguous()
        and not (live.requires_grad or live.is_conj() or live.is_neg())
        and (live.dtype, live.shape) == (saved.dtype, saved.shape)
        and live.data_ptr() not in taken
        and live.untyped_storage().nbytes() == live.numel() * live.element_size()
    )


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


def _exchange(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Exchange the tensors in a decoded value; containers are changed in place."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Coded):
        _exchange(value.parts, change)
    elif isinstance(value, dict):
        for key, each in value.items():
            value[key] = _exchange(each, change)
    elif type(value) is list:
        value[:] = [_exchange(each, change) for each in value]
    elif type(value) is tuple:
        return tuple(_exchange(each, change) for each in value)
    return value
