"""From verified bytes to live objects: straight to their tensors where that is safe, else to new memory.

Once the live objects have taken their state, nothing uses the verified files any more: those in memory become
buffers again. No rank stages while ranks load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from outlast._torch_compat import takes_plainly
from outlast.checkpoint.content.codecs import Coded, local_of
from outlast.checkpoint.content.memory import copy_slices
from outlast.checkpoint.content.restore import entries_of, takes_as_torch_does
from outlast.checkpoint.content.state import content_of, tensors_in
from outlast.checkpoint.content.transfers import copy_to_devices
from outlast.checkpoint.load.reading import reserve
from outlast.checkpoint.policy.table import is_dense
from outlast.parallelism.policy.slices import Part

_EXTRA_STATE = "_extra_state"  # torch's name, the last part of the key
_DEVICES = ("cpu", "cuda")  # types of devices on which addresses show which tensors share memory
_Pair = tuple[torch.Tensor, torch.Tensor]  # saved, live
_Range = tuple[int, int, int]  # addresses, and the saved tensor that goes there; 0: none


def places_for(state: Mapping[str, object], saved: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Pair saved tensors with live ones that can stand for them: on the host or a GPU, of the same form.

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
    taken = ({id(one) for _, one in tensors_in(content)} for content in saved.values())
    return {place for place, count in Counter(chain.from_iterable(taken)).items() if count > 1}


def _pairs(holder: object, saved: Any) -> Iterator[_Pair]:
    """Yield saved tensors with live ones that may be written to in their stead."""
    if isinstance(holder, torch.nn.Module) and takes_plainly(holder):
        for name, live in holder.state_dict().items():
            local = local_of(live)
            if _alike(saved.get(name), local):
                yield saved[name], local
    params = {one.data_ptr() for one in _params(holder)}
    for old, live, _ in _of_optimizer(holder, saved):
        local = local_of(live)
        if _alike(old, local) and old.stride() == local.stride() and local.data_ptr() not in params:
            yield old, local


def _of_optimizer(holder: object, saved: Any) -> Iterator[tuple[torch.Tensor, Any, torch.device]]:
    """Yield an optimizer's saved tensors, each with the live one and the device on which it keeps it."""
    if isinstance(holder, torch.optim.Optimizer) and takes_as_torch_does(holder):
        params = [one for group in holder.param_groups for one in group["params"]]
        for place, old, live in entries_of(holder, saved):
            for name, value in old.items():
                if isinstance(value, torch.Tensor):
                    device = torch.device("cpu") if name == "step" else params[place].device
                    yield value, live.get(name), device


def _written(holder: object) -> Iterator[torch.Tensor]:
    """Yield the live tensors to which an object copies what it takes."""
    if isinstance(holder, (torch.nn.Module, torch.Tensor, dict, list)):
        yield from _plain(one for _, one in tensors_in(content_of(holder)))


def _params(holder: object) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer steps."""
    if isinstance(holder, torch.optim.Optimizer):
        yield from _plain(chain.from_iterable(group["params"] for group in holder.param_groups))


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parts in this process of those tensors that have addresses."""
    for one in map(local_of, tensors):
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided:
            yield one


def _alike(saved: Any, live: Any) -> bool:
    """Return whether the bytes of a saved tensor can be put where a live one has its own."""
    return (
        isinstance(saved, torch.Tensor)
        and type(live) is torch.Tensor
        and live.device.type in _DEVICES
        and live.layout is torch.strided
        and (
            (live.is_contiguous() and saved.is_contiguous())
            or (live.stride() == saved.stride() and is_dense(live.shape, live.stride()))
        )
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


def land(state: Mapping[str, object], saved: dict[str, Any], threads: int, views: bool) -> None:
    """Copy what was verified to live tensors, or to memory of its own, once all ranks have agreed.

    What the live objects copy themselves stays as it is.

    Args:
        state: the live objects.
        saved: the content of each, by name; its tensors are replaced.
        threads: that copy, the caller's included.
        views: the tensors of ``saved`` are views of files, so all are replaced; False: they have own
            memory.
    """
    replaced, shared = places_for(state, saved), _shared(saved)
    sources = {id(one): one for _, one in tensors_in(saved)}
    for name, holder in state.items():
        content = saved[name]
        kept = {id(one) for _, one in tensors_in(content)} - replaced.keys()
        kept -= set(map(id, _copied(holder, content)))
        devices = {id(one): device for one, _, device in _of_optimizer(holder, content)}
        for place in (each for each in kept & devices.keys() - shared if devices[each].type != "cpu"):
            one = sources[place]
            replaced[place] = torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device=devices[place]
            )
            kept.remove(place)
        if views:
            wanted = {place: sources[place] for place in kept}
            memory = reserve(
                {at: (Part.whole(one.shape), one.dtype, one.stride()) for at, one in wanted.items()}
            )
            replaced |= {place: target.tensor for place, target in memory.items()}
    _exchange(saved, replaced)
    moves = [(to, sources[place]) for place, to in replaced.items()]
    copy_to_devices([move for move in moves if not move[0].is_cpu], threads)
    addresses = [(to.data_ptr(), one.data_ptr(), one.nbytes) for to, one in moves if to.is_cpu]
    copy_slices(addresses, threads)


def _copied(holder: object, saved: Any) -> Iterator[Any]:
    """Yield the values of a saved state that an object copies when it takes them.

    Not so a module's extra state: what is anywhere in there may be kept.
    """
    if isinstance(holder, torch.nn.Module) and takes_plainly(holder) and isinstance(saved, Mapping):
        extra = {name: one for name, one in saved.items() if name.rpartition(".")[2] == _EXTRA_STATE}
        kept = {id(one) for _, one in tensors_in(extra)}
        yield from (one for name, one in saved.items() if name not in extra and id(one) not in kept)


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
