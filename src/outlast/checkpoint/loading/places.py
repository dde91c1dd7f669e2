"""Which live tensors saved content may go straight to, so that it needs no memory of its own on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from outlast._torch_compat import takes_plainly
from outlast.checkpoint.content.state import content_of, tensors_in

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
    elif isinstance(holder, torch.optim.Optimizer) and _plain(holder):
        params = {one.data_ptr() for one in _params(holder)}
        for old, live in _optimizer_pairs(holder, saved):
            if _alike(old, live) and live.data_ptr() not in params:
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


def _plain(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer takes its state as torch's own do."""
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and not optimizer._optimizer_load_state_dict_pre_hooks


def _optimizer_pairs(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[_Pair]:
    then = chain.from_iterable(group["params"] for group in saved["param_groups"])
    now = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, param in zip(then, now, strict=True):
        live = optimizer.state.get(param, {})
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and isinstance(live.get(name), torch.Tensor):
                yield value, live[name]


def _alike(saved: torch.Tensor, live: Any) -> bool:
    """Say whether the bytes of a saved tensor can be put where a live one has its own."""
    return (
        type(live) is torch.Tensor
        and live.device.type == "cpu"
        and live.layout is torch.strided
        and live.is_contiguous()
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
