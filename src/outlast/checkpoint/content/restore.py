"""Saved values are put back into the live objects, after a check that they fit."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import (
    Coded,
    adopt,
    codec_of,
    distributed,
    local_of,
    possible,
    revived,
    unknown,
)
from outlast.checkpoint.content.random_states import restore_random
from outlast.checkpoint.content.rank_file import Parameter
from outlast.checkpoint.content.state import (
    LiveState,
    holds_state,
    kinds_of,
    parameters_of,
    require_holder,
    tensors_in,
)
from outlast.checkpoint.content.typed_json import form_of
from outlast.checkpoint.policy.manifest import first_few
from outlast.checkpoint.policy.table import in_order, is_dense
from outlast.errors import CheckpointMismatch
from outlast.fields import Damage, DamagedCopy
from outlast.ports import Stateful

_EXTRA = "_extra_state"  # last part of the key under which torch keeps a module's get_extra_state


def require_fit(
    state: Mapping[str, object],
    saved: Mapping[str, Any],
    kinds: Mapping[str, str],
    parameters: Mapping[str, Sequence[Parameter]],
) -> None:
    """Compare a saved state with the live objects, before anything is changed.

    Args:
        state: the live objects.
        saved: what they gave when they were saved.
        kinds: what :func:`kinds_of` returned then.
        parameters: what :func:`parameters_of` returned then, as far as it is known.

    Raises:
        UsageError: a live object cannot be restored in place.
        CheckpointMismatch: names the first few differences.
        DamagedCopy: what was saved of an optimizer has not the form of its state.
    """
    for name, holder in state.items():
        require_holder(name, holder)
        if isinstance(holder, torch.optim.Optimizer) and takes_as_torch_does(holder) and name in saved:
            _require_optimizer(name, holder, saved[name])
    found = [f"{name!r} is in the checkpoint only" for name in saved if name not in state]
    found += [f"{name!r} is in this job only" for name in state if name not in saved]
    found += [
        f"{name!r} was saved through the codec {codec}, which this process has not registered"
        for name in saved
        for codec in sorted(unknown(saved[name]))
    ]
    live_kinds = kinds_of(state)
    for name, holder in state.items():
        then, now = kinds.get(name, "no optimizer or scheduler"), live_kinds.get(name, "none")
        if name in kinds.keys() | live_kinds.keys() and name in saved and then != now:
            found.append(f"{name}: {then} in the checkpoint, {now} here")
        elif name in saved:
            stepped = parameters.get(name, ())
            found += [f"{name}: {line}" for line in _differences(holder, saved[name], stepped)]
    for name, live in parameters_of(state).items():
        pairs = enumerate(zip(parameters.get(name, ()), live, strict=False))  # how many was compared above
        found += [
            f"{name}: its parameter {number} is {' '.join(was[:2]).strip()} in the checkpoint,"
            f" {' '.join(one[:2]).strip()} here"
            for number, (was, one) in pairs
            if was[1] != one[1] or (was[0] and one[0] and was[0] != one[0])
        ]
    if found:
        raise CheckpointMismatch(f"{len(found)} difference(s): {first_few(found)}")


def _differences(holder: object, saved: Any, parameters: Sequence[Parameter]) -> Iterator[str]:
    if isinstance(holder, torch.nn.Module):
        yield from _module_differences(holder, saved)
    elif isinstance(holder, torch.optim.Optimizer):
        live = [len(group["params"]) for group in holder.param_groups]
        then = [len(group["params"]) for group in saved["param_groups"]] if is_optimizers(saved) else live
        if live != then:
            line = f"parameters in its groups: {then} in the checkpoint, {live} here"
            more = [one[0] or one[1] for one in parameters[sum(live) :]]
            yield (
                line
                if not more
                else (
                    f"{line}; the checkpoint's optimizer has {first_few(more)} besides: register the module"
                    " that has them, or add them with add_param_group before session.restore"
                )
            )
    elif isinstance(holder, torch.Tensor):
        if _form(holder) != _form(saved):
            yield f"{_form(saved)} in the checkpoint, {_form(holder)} here"
    elif type(holder) in (dict, list) and type(holder) is not type(saved):
        yield f"a {type(saved).__name__} in the checkpoint, a {type(holder).__name__} here"


def _require_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Refuse a saved state that no optimizer of torch returns.

    Raises:
        DamagedCopy: names the entry.
    """
    found = is_optimizers(saved)
    if found and type(optimizer).__module__.startswith("torch.optim."):  # other optimizers may have any state
        found = all(isinstance(one, dict) for key, one in saved["state"].items() if type(key) is int)
    if not found:
        raise DamagedCopy(Damage(f"state[{name!r}]", "an optimizer's state and param_groups", _form(saved)))


def is_optimizers(saved: Any) -> bool:
    """Return whether a value has the form of what torch's optimizers give."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    return (
        isinstance(groups, list)
        and isinstance(saved.get("state"), dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(number) is int for group in groups for number in group["params"])
    )


def entries_of(optimizer: Any, saved: Any) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield the parameters of an optimizer by place, with what was saved of each and what it has of it now.

    Args:
        optimizer: one that takes its state as torch's own do.
        saved: its state, in which parameters are numbers.
    """
    then = (number for group in saved["param_groups"] for number in group["params"])
    now = (one for group in optimizer.param_groups for one in group["params"])
    for place, (number, param) in enumerate(zip(then, now, strict=True)):
        old, live = saved["state"].get(number), optimizer.state.get(param)
        if isinstance(old, dict):
            yield place, old, live if isinstance(live, dict) else {}


def _module_differences(module: torch.nn.Module, saved: Any) -> Iterator[str]:
    if not isinstance(saved, Mapping):
        yield f"a {type(saved).__name__} in the checkpoint, a module here"
        return
    taken: dict[str, bool] = {}  # by the name of the submodule that an entry belongs to
    for key, line in _entry_differences(module.state_dict(), saved):
        owner = key.rpartition(".")[0]
        if owner not in taken:
            taken[owner] = _takes(module, owner, saved)
        if not taken[owner]:
            yield line


def _takes(module: torch.nn.Module, owner: str, saved: Mapping[str, Any]) -> bool:
    """Return whether a submodule with its own load method accepts what differs; a copy of it is tried.

    The observers of quantization-aware training do: their buffers grow to as many elements as were saved.
    """
    try:
        holder = module.get_submodule(owner)
        if not _torch_compat.loads_itself(holder):
            return False
        prefix = f"{owner}." if owner else ""
        own = OrderedDict(
            (key.removeprefix(prefix), value) for key, value in saved.items() if key.startswith(prefix)
        )
        notes = getattr(saved, "_metadata", None) or {}
        own._metadata = {  # type: ignore[attr-defined]
            key.removeprefix(prefix) if key != owner else "": value
            for key, value in notes.items()
            if key == owner or key.startswith(prefix)
        }
        copy.deepcopy(holder).load_state_dict(own)
    except Exception:  # noqa: BLE001 - the module's own code may raise anything; the difference is reported
        return False
    return True


def _entry_differences(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in live:
        if key not in saved:
            yield key, f"{key} {_form(live[key])} is in this model only"
        elif key.rpartition(".")[2] == _EXTRA:
            continue  # the module decides its form: Transformer Engine's grows with its history
        elif isinstance(live[key], torch.Tensor) and _form(live[key]) != _form(saved[key]):
            yield key, f"{key} is {_form(saved[key])} in the checkpoint, {_form(live[key])} in this model"
    for key in saved:
        if key not in live:
            yield key, f"{key} {_form(saved[key])} is in the checkpoint only"


def _form(value: object) -> str:
    if distributed(value):
        value = local_of(value)
    if isinstance(value, Coded):
        return f"{value.name} {value.form}"
    if isinstance(value, torch.Tensor):
        codec = codec_of(type(value))
        return form_of(value) if codec is None else f"{codec.name} {form_of(value)}"
    return f"a {type(value).__name__}"


def apply(
    state: Mapping[str, object],
    saved: Mapping[str, Any],
    random: dict[str, Any],
    parameters: Mapping[str, Sequence[Parameter]],
) -> str:
    """Put a saved state into the live objects, the random states last.

    Args:
        state: the live objects.
        saved: what they gave when they were saved.
        random: the random states.
        parameters: what :func:`parameters_of` returned then, as far as it is known.

    Returns:
        What could not be restored although all else was; usually empty.

    Raises:
        CheckpointMismatch: an object did not take its part.
    """
    live = LiveState.of(state)
    for name, holder in live.items():
        content = saved[name]
        if possible():
            content = adopt(template_of(live, name, content, lambda one: local_of(one).shape), content)
        live.forget(name)
        content = _revived(name, content)
        if holds_state(holder):
            _give(name, holder, content, parameters.get(name, ()))
        else:
            _Renewal(holder, content)
    return restore_random(random)


def _revived(name: str, content: Any) -> Any:
    try:
        return revived(content)
    except Exception as error:  # whatever the codec's code raises; it is the cause of what is raised here
        raise CheckpointMismatch(
            f"a codec did not take what was saved of {name!r}: {type(error).__name__}: {error}"
        ) from error


def _give(name: str, holder: Stateful, content: Any, parameters: Sequence[Parameter]) -> None:
    try:
        if isinstance(holder, torch.optim.Optimizer) and takes_as_torch_does(holder):
            _give_optimizer(holder, content, parameters)
        else:
            holder.load_state_dict(content)
    except Exception as error:  # whatever the user's own code raises; it is the cause of what is raised here
        found = f"{type(error).__name__}: {error}"
        raise CheckpointMismatch(
            f"{type(holder).__name__}.load_state_dict did not take what was saved of {name!r}: {found}"
        ) from error


def takes_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer takes its state as torch's own do."""
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and not optimizer._optimizer_load_state_dict_pre_hooks


def _give_optimizer(optimizer: torch.optim.Optimizer, content: Any, parameters: Sequence[Parameter]) -> None:
    """Have an optimizer load its state; its own tensors, such as a learning rate, stay the same objects.

    A CUDA graph that was captured reads exactly these tensors, and nothing moves a saved rate to its device.
    """
    _follow(optimizer, content, parameters)
    held = {place: dict(live) for place, _, live in entries_of(optimizer, content)}
    before = [_without_params(group) for group in optimizer.param_groups]
    were = [{name for name, one in group.items() if isinstance(one, torch.Tensor)} for group in before]
    optimizer.load_state_dict(content)
    _keep_types(optimizer, content)
    for place, _, live in entries_of(optimizer, content):
        _keep_tensors(held[place], live)
    renewed = _Renewal(before, [_without_params(group) for group in optimizer.param_groups]).value
    for group, values, known in zip(optimizer.param_groups, renewed, were, strict=True):
        for name, value in values.items():
            new = isinstance(value, torch.Tensor) and name not in known
            moved = new and group.get("capturable") and group["params"]
            group[name] = value.to(group["params"][0].device) if moved else value


def _keep_tensors(held: Mapping[str, Any], live: dict[str, Any]) -> None:
    """Copy what an optimizer has taken into the tensors that it had, where those are of the same form."""
    for name, old in held.items():
        new = live.get(name)
        if type(old) is not torch.Tensor or type(new) is not torch.Tensor or old is new:
            continue
        alike = _form(old) == _form(new) and old.device == new.device and old.stride() == new.stride()
        if alike and all(one is not old for one in live.values()):
            with torch.no_grad():
                old.copy_(new)
            live[name] = old


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _follow(optimizer: torch.optim.Optimizer, saved: Any, parameters: Sequence[Parameter]) -> None:
    """Give what an optimizer holds for a parameter the parameter's memory order, where it had that before.

    A fused kernel pairs the elements of both by their places in memory.
    """
    params = [one for group in optimizer.param_groups for one in group["params"]]
    for place, entries, _ in entries_of(optimizer, saved):
        local = local_of(params[place])
        if place >= len(parameters) or local.layout is not torch.strided:
            continue
        _, _, order = parameters[place]
        strides = in_order(local.shape) if order is None else tuple(order)
        if strides != local.stride() and is_dense(local.shape, local.stride()):
            for name, value in entries.items():
                alike = type(value) is torch.Tensor and value.shape == local.shape
                if alike and value.stride() == strides:
                    entries[name] = torch.empty_strided(
                        value.shape, local.stride(), dtype=value.dtype, device=value.device
                    )
                    entries[name].copy_(value)


def _keep_types(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Give an optimizer the numbers that were saved where torch has cast them to the parameter's type.

    torch's load_state_dict makes bfloat16 of float32 moments of a bfloat16 parameter.
    """
    for _, old, live in entries_of(optimizer, saved):
        for name, value in old.items():
            if name in live and name != "step":
                live[name] = _of_saved_type(live[name], value)


def _of_saved_type(live: Any, saved: Any) -> Any:
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype is saved.dtype else saved.to(live.device)
    if isinstance(live, dict) and isinstance(saved, dict):
        return {key: _of_saved_type(one, saved.get(key)) for key, one in live.items()}
    if isinstance(live, (list, tuple)) and type(live) is type(saved) and len(live) == len(saved):
        return type(live)(_of_saved_type(*pair) for pair in zip(live, saved, strict=True))
    return live


def template_of(state: LiveState, name: str, saved: Any, shape_of: Callable[[torch.Tensor], Any]) -> Any:
    """Return what is known of the tensors that a live object will hold once it has taken a saved state.

    Args:
        state: the live objects.
        name: of the one.
        saved: what it gave when it was saved, decoded.
        shape_of: what the shapes of tensors in ``saved`` compare with, given the live counterparts.

    Returns:
        The live content, or that of it which is known, in the form of ``saved``.
    """
    holder = state[name]
    if isinstance(holder, torch.optim.Optimizer):
        return _optimizer_template(holder, saved, shape_of)
    return state.content(name) if any(True for _ in tensors_in(saved)) else None


def _optimizer_template(
    optimizer: torch.optim.Optimizer, saved: Any, shape_of: Callable[[torch.Tensor], Any]
) -> Any:
    """Pair an optimizer's saved tensors with live ones, of a new optimizer with its parameters.

    A new optimizer holds nothing yet. What it will hold of a parameter has the parameter's form where
    the shapes are equal, as in torch's own load_state_dict, which makes the same exception of "step".
    """
    params = [one for group in optimizer.param_groups for one in group["params"]]
    found: dict[int, dict[str, Any]] = {}
    known = saved.get("state") if isinstance(saved, dict) else None
    for index, entries in known.items() if isinstance(known, dict) else ():
        if type(index) is int and index < len(params) and type(entries) is dict:
            param = params[index]
            live = optimizer.state.get(param)
            live = live if isinstance(live, dict) else {}
            found[index] = {
                name: param
                for name, value in entries.items()
                if isinstance(value, torch.Tensor) and name != "step" and value.shape == shape_of(param)
            } | {name: live[name] for name in entries.keys() & live.keys()}
    return {"state": found}


class _Renewal:
    """Gives a live value the content of a saved one.

    The script's own references stay valid: to tensors, arrays and containers, also to those in a tuple. A
    tensor that was saved at two places has one memory at both, also where only one of them is live; and a
    live one takes the content of one saved tensor only.

    Args:
        old: the live value.
        new: the saved one.
    """

    def __init__(self, old: Any, new: Any) -> None:
        self._stands: dict[int, torch.Tensor] = {}  # live tensors, by the identity of saved ones
        self._written: dict[int, int] = {}  # saved ones, by the identity of live ones
        self._pair(old, new)
        self.value = self._renew(old, new)

    def _pair(self, old: Any, new: Any) -> None:
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if _form(old) == _form(new) and self._written.setdefault(id(old), id(new)) == id(new):
                self._stands.setdefault(id(new), old)
        elif isinstance(old, dict) and isinstance(new, dict):
            for key, each in new.items():
                self._pair(old.get(key), each)
        elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
            for pair in zip(old, new, strict=False):
                self._pair(*pair)

    def _renew(self, old: Any, new: Any) -> Any:
        """Return which of the two holds the content of ``new`` now."""
        kind = type(new)
        if isinstance(new, torch.Tensor):
            return self._renew_tensor(old, new)
        if kind is tuple:
            found = self._renew_each(old, new)
            alike = type(old) is tuple and len(old) == len(found)
            same = alike and all(map(_is_same, old, found))
            return old if same else tuple(found)
        if kind is list:
            found = self._renew_each(old, new)
            old = old if type(old) is list else new
            old[:] = found
            return old
        if kind in (dict, OrderedDict, Counter):
            known = old if type(old) is kind else {}
            content = {key: self._renew(known.get(key), each) for key, each in new.items()}
            old = old if type(old) is kind else new
            old.clear()
            old.update(content)
            return old
        if type(old) is kind and _take(old, new):
            return old
        return new

    def _renew_each(self, old: Any, new: Sequence[Any]) -> list[Any]:
        known = old if type(old) is type(new) else ()
        return [self._renew(known[at] if at < len(known) else None, each) for at, each in enumerate(new)]

    def _renew_tensor(self, old: Any, new: torch.Tensor) -> torch.Tensor:
        if not isinstance(old, torch.Tensor):
            return self._stands.get(id(new), new)
        if self._written.get(id(old)) != id(new):
            return new.to(old.device)
        with torch.inference_mode() if old.is_inference() else torch.no_grad():
            old.copy_(new)
        return old


def _is_same(old: Any, new: Any) -> bool:
    """Return whether a tuple with the old value may stay, and need not be made anew with the new one."""
    plain = type(old) in (str, bytes, int, bool) and type(old) is type(new)
    return old is new or (plain and bool(old == new))


def _take(old: Any, new: Any) -> bool:
    """Have a set, bytes or an array of numpy's take the content of one of its type; return whether it did."""
    if type(new) is set:
        old.clear()
        old.update(new)
    elif type(new) is bytearray and len(old) == len(new):
        old[:] = new
    elif (type(new).__module__, type(new).__name__) == ("numpy", "ndarray"):
        if (old.dtype, old.shape) != (new.dtype, new.shape) or not old.flags.writeable:
            return False
        old[...] = new
    else:
        return False
    return True
