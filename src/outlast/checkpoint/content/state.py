"""Training state to tensors and typed JSON, and back into the live objects; the random states with it.

A state is a mapping from names to objects: anything with ``state_dict()`` and ``load_state_dict()``, a
tensor, or a dict or list of values and tensors. What an object gives is kept exactly as it gives it. Random
states are those of python, numpy, torch on the CPU and on the current CUDA device.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import random
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import (
    Coded,
    Piece,
    adopt,
    codec_of,
    distributed,
    local_of,
    piece_of,
    possible,
    revived,
    unknown,
    unsupported,
)
from outlast.checkpoint.content.flags import Flags, flags_of
from outlast.checkpoint.content.memory import uncollected
from outlast.checkpoint.content.typed_forms import DEPTH, Json
from outlast.checkpoint.content.typed_json import Encoder, Path, form_of
from outlast.checkpoint.policy.manifest import first_few
from outlast.checkpoint.policy.table import in_order, is_dense
from outlast.errors import CheckpointMismatch, UsageError
from outlast.fields import Damage, DamagedCopy
from outlast.ports import Stateful

_NUMPY_WORDS = 624  # of the state of MT19937
_WORD = "I"  # of 32 bits, the smallest first, as everywhere that torch runs


def capture_random() -> dict[str, Any]:
    """Return the states of the generators in use, as values that typed JSON knows."""
    states: dict[str, Any] = {"python": packed(random.getstate()), "torch": _octets(torch.get_rng_state())}
    if "numpy.random" in sys.modules:
        import numpy.random

        states["numpy"] = packed_numpy(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        every, here = torch.cuda.get_rng_state_all(), torch.cuda.current_device()
        every.insert(0, every.pop(here))
        states["cuda"] = [_octets(one) for one in every]  # that of the device in use is the first
    return states


def packed(state: tuple[Any, ...]) -> tuple[int, bytes, float | None]:
    """Return a state of python's generator with its words as bytes."""
    version, words, gauss = state
    return version, array(_WORD, words).tobytes(), gauss


def packed_numpy(state: Any) -> dict[str, Any]:
    """Return a state of numpy's generator with its words as bytes, which torch.load takes as they are."""
    inner = {name: one.tobytes() if name == "key" else one for name, one in state["state"].items()}
    return {**state, "state": inner}


def restore_random(states: dict[str, Any]) -> str:
    """Set the generators to captured states; return what could not be set, empty when all was."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(array(_WORD, words)), gauss))
    torch.set_rng_state(_tensor(states["torch"]))
    if "numpy" in states:
        import numpy.random

        found = states["numpy"]
        inner = {name: _words(one) if name == "key" else one for name, one in found["state"].items()}
        numpy.random.set_state({**found, "state": inner})
    if "cuda" in states:
        if not torch.cuda.is_available():
            return "the CUDA generator's state was not restored: torch sees no CUDA device here"
        here = torch.cuda.current_device()  # it may be another one than before
        others = [device for device in range(torch.cuda.device_count()) if device != here]
        for device, content in zip((here, *others), states["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(content), device)
    return ""


def require_random(states: Any, source: str) -> dict[str, Any]:
    """Return random states that were read from a file, once generators of their own have taken them.

    Args:
        states: decoded.
        source: the file, for errors.

    Raises:
        DamagedCopy: they are not what :func:`capture_random` returns.
    """
    try:
        version, words, gauss = states["python"]
        random.Random().setstate((version, tuple(array(_WORD, words)), gauss))
        torch.Generator().set_state(_tensor(states["torch"]))
        if "numpy" in states:
            _require_numpy(states["numpy"])
        if not all(type(one) is bytes for one in states.get("cuda", [])):
            raise TypeError("a state of CUDA that is no bytes")
    except Exception as error:  # whatever fails here fails because of the file's bytes
        found = f"{type(error).__name__}: {error}"
        raise DamagedCopy(Damage(source, "states of random generators", found[:200])) from error
    return dict(states)


def _require_numpy(state: dict[str, Any]) -> None:
    """Have a generator take a state of numpy's; numpy itself would read from any position."""
    import numpy.random

    inner = state["state"]
    if len(inner["key"]) != 4 * _NUMPY_WORDS or not 0 <= inner["pos"] <= _NUMPY_WORDS:
        raise ValueError(f"position {inner['pos']} in {len(inner['key'])} bytes")
    words = {name: _words(one) if name == "key" else one for name, one in inner.items()}
    numpy.random.RandomState().set_state({**state, "state": words})


def _words(content: bytes) -> Any:
    import numpy

    return numpy.frombuffer(content, numpy.uint32)


def _octets(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LAZY = "has no shape yet; pass a batch through a lazy module before session.restore"
_RESERVED = "__metadata__"  # safetensors' own key
_EXTRA = "_extra_state"  # torch's last word of the key of what a module's get_extra_state returns


@dataclass(frozen=True)
class Captured:
    """A state taken apart; the tensors are still the live ones.

    Args:
        values: the typed JSON of each object, by name; tensors are referred to by key.
        kinds: the type of each optimizer and scheduler, by name.
        tensors: by key, "model.blocks.0.weight"; of a distributed tensor the part that this rank has.
        aliases: keys of tied tensors, each with the key that stands for it.
        random: the random states.
        pieces: of which whole the distributed tensors are parts, by key.
        parameters: what each optimizer steps, in its order; see :func:`parameters_of`.
        flags: of each module.
        form: the same object in two captures only if the tensors have kept keys, addresses, shapes, strides
            and types.
    """

    values: dict[str, Json]
    kinds: dict[str, str]
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    random: dict[str, Any]
    pieces: dict[str, Piece] = field(default_factory=dict)
    parameters: dict[str, list[list[Any]]] = field(default_factory=dict)
    flags: Flags = field(default_factory=dict)
    form: object = field(default_factory=object, compare=False)


@dataclass
class _Collector:
    """Gathers the tensors of a state and gives each a key."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    _places: dict[int, list[str]] = field(default_factory=dict)  # keys by address

    def add(self, tensor: torch.Tensor, path: Path) -> str:
        """Keep a tensor, of a distributed one this rank's part, and return the key of its bytes."""
        piece = None
        if distributed(tensor):
            why = unsupported(tensor)
            if why:
                _refuse(path, why)
            piece, tensor = piece_of(tensor), local_of(tensor)
        _require_plain(tensor, path)
        key = self._free_key(".".join(path))
        at_place = self._places.setdefault(tensor.data_ptr(), []) if tensor.numel() else []
        for known in at_place:
            if _same(tensor, self.tensors[known]) and piece == self.pieces.get(known):
                self.aliases[key] = known
                return known
        at_place.append(key)
        self.tensors[key] = tensor  # kept alive, so that no later tensor can come to lie at its place
        if piece is not None:
            self.pieces[key] = piece
        return key

    def _free_key(self, wanted: str) -> str:
        """Return the key itself, or with a number when a path that reads alike has it already."""
        key, number = wanted, 2
        while key in self.tensors or key in self.aliases or key == _RESERVED:
            key, number = f"{wanted}~{number}", number + 1
        return key


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors at one address are the same elements, tied."""
    return (
        (one.device, one.dtype, one.shape) == (other.device, other.dtype, other.shape)
        and one.stride() == other.stride()
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def _require_plain(tensor: torch.Tensor, path: Path) -> None:
    """Refuse a tensor whose bytes are not its whole truth.

    Raises:
        UsageError: names the key and the type.
    """
    why = ""
    if is_lazy(tensor):
        why = _LAZY
    elif type(tensor) not in PLAIN_TENSORS:
        kind = type(tensor)
        why = (
            f"is a {kind.__module__}.{kind.__qualname__}; copying its bytes would lose what the type adds"
            " (outlast.register_codec says how it is saved)"
        )
    elif tensor.layout is not torch.strided or tensor.is_nested:
        why = f"has the layout {tensor.layout}, only dense tensors are saved"
    elif tensor.is_quantized:
        why = "is quantized, only plain tensors are saved"
    elif tensor.is_meta:
        why = "is on the meta device and has no content"
    if why:
        _refuse(path, why)


def _refuse(path: Path, why: str) -> NoReturn:
    raise UsageError(
        f"state[{'.'.join(path)!r}] {why}; the checkpoint was not written;"
        " let state_dict() return dense plain tensors"
    )


def _holds_state(value: object) -> TypeGuard[Stateful]:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _require_holder(name: str, value: object) -> None:
    """Refuse what could be saved but not put back.

    Raises:
        UsageError: names the entry and the type.
    """
    if not (_holds_state(value) or isinstance(value, torch.Tensor) or type(value) in (dict, list)):
        raise UsageError(
            f"state[{name!r}]: a {type(value).__qualname__} cannot be restored in place; pass an object with"
            " state_dict() and load_state_dict(), a tensor, or a dict or list that holds the value"
        )
    if _torch_compat.must_consolidate(value):
        raise UsageError(
            f"state[{name!r}]: a {type(value).__qualname__} gives its state as it was at the latest"
            " consolidate_state_dict, so it cannot be saved; fully_shard (FSDP2) divides the state of an"
            " optimizer, too, and is saved"
        )


@uncollected()
def capture(state: Mapping[str, object]) -> Captured:
    """Take a state apart, with the random states of this process.

    Raises:
        UsageError: something in it cannot be saved exactly; names it.
    """
    for name, holder in state.items():
        _require_holder(name, holder)
    live = LiveState.of(state)
    found = take_apart({name: live.content(name) for name in live}, kinds_of(state))
    for name, holder in live.items():
        _require_writable(name, holder, live.content(name))
    return replace(found, parameters=parameters_of(state), flags=flags_of(state))


def _require_writable(name: str, holder: object, content: Any) -> None:
    """Refuse tensors to which a load would have to write and cannot.

    An object of the user's may make what it likes of the tensors that it gets, and an optimizer keeps them.

    Raises:
        UsageError: names the entry.
    """
    module = isinstance(holder, torch.nn.Module)
    if not module and _holds_state(holder):
        return
    for path, tensor in tensors_in(content):
        why = _unwritable(tensor)
        if why and not (module and not _is_copied(holder, ".".join(path))):
            _refuse((name, *path), f"{why}, so that a load could not write to it")


def _unwritable(tensor: torch.Tensor) -> str:
    """Return why nothing can be copied into a tensor; empty where it can."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ""  # it is refused with a reason of its own
    if 0 in tensor.stride() and any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return "is expanded: several of its elements are one place in memory"
    return "" if _is_copyable(tensor.dtype) else f"is of {tensor.dtype}, which torch does not copy"


@functools.cache
def _is_copyable(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


def _is_copied(module: Any, key: str) -> bool:
    """Say whether a module's own load copies an entry of its state into a parameter or buffer."""
    owner, _, name = key.rpartition(".")
    try:
        holder = module.get_submodule(owner)
    except AttributeError:
        return False
    return not _torch_compat.loads_itself(holder) and (name in holder._parameters or name in holder._buffers)


def require_shapes(state: Mapping[str, object]) -> None:
    """Refuse lazy modules that have not seen a batch: nothing can be loaded into them.

    Raises:
        UsageError: names the module and its first parameter without a shape.
    """
    for name, module in state.items():
        if isinstance(module, torch.nn.Module):
            for key, one in (*module.named_parameters(), *module.named_buffers()):
                if is_lazy(one):
                    raise UsageError(f"state[{name!r}]: {key} {_LAZY}; nothing was loaded or changed")


def content_of(holder: object) -> Any:
    """Return what an object of a state holds at this moment."""
    return holder.state_dict() if _holds_state(holder) else holder


class LiveState(dict[str, object]):
    """The objects of a state; during a load each says once what it holds.

    An answer may be dear: torch's get_optimizer_state_dict does a step of an optimizer that has none.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        super().__init__(state)
        self._contents: dict[str, Any] = {}

    @classmethod
    def of(cls, state: Mapping[str, object]) -> LiveState:
        """Return a state as one of these."""
        return state if isinstance(state, cls) else cls(state)

    def content(self, name: str) -> Any:
        """Return what an object holds, or held when it was asked before."""
        if name not in self._contents:
            self._contents[name] = content_of(self[name])
        return self._contents[name]

    def forget(self, name: str) -> None:
        """Keep no longer what an object has said."""
        self._contents.pop(name, None)


def take_apart(
    contents: Mapping[str, object], kinds: dict[str, str], random: dict[str, Any] | None = None
) -> Captured:
    """Take apart what the objects of a state hold.

    Args:
        contents: by name.
        kinds: the type of each optimizer and scheduler, by name.
        random: random states; None: those of this process.

    Raises:
        UsageError: something in it cannot be saved exactly; names it.
    """
    collector = _Collector()
    encoder = Encoder(collector.add)
    values = {name: encoder.encode(content, (name,)) for name, content in contents.items()}
    random = capture_random() if random is None else random
    return Captured(values, kinds, collector.tensors, collector.aliases, random, collector.pieces)


def kinds_of(state: Mapping[str, object]) -> dict[str, str]:
    """Return the type of each optimizer and scheduler: one's state loads into another without a word."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return {name: type(holder).__qualname__ for name, holder in state.items() if isinstance(holder, kinds)}


def parameters_of(state: Mapping[str, object]) -> dict[str, list[list[Any]]]:
    """Return what each optimizer steps, in its order: an optimizer's state knows parameters by number alone.

    Of each parameter the name that it has in a module of the state, "model.blocks.0.weight" (empty: in none),
    its form, and its strides where its elements are not one behind the other.
    """
    stepped = stepped_in(state)
    return {
        name: [
            [key, form_of(parameter), *_order_of(parameter)]
            for key, parameter in zip(keys, stepped[name], strict=True)
        ]
        for name, keys in names_of(stepped, state).items()
    }


def stepped_in(state: Mapping[str, object]) -> dict[str, list[torch.Tensor]]:
    """Return the parameters of each optimizer, in its order."""
    optimizers = {name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)}
    return {
        name: [parameter for group in one.param_groups for parameter in group["params"]]
        for name, one in optimizers.items()
    }


def names_of(
    stepped: Mapping[str, Sequence[torch.Tensor]], state: Mapping[str, object]
) -> dict[str, list[str]]:
    """Return the names that parameters have in the modules of a state; empty: none."""
    names: dict[int, str] = {}
    for name, holder in state.items():
        if isinstance(holder, torch.nn.Module):
            for key, parameter in holder.named_parameters():
                names.setdefault(id(parameter), f"{name}.{key}")
    return {name: [names.get(id(one), "") for one in parameters] for name, parameters in stepped.items()}


def _order_of(parameter: torch.Tensor) -> tuple[list[int], ...]:
    local = local_of(parameter)
    if local.layout is not torch.strided or local.stride() == in_order(local.shape):
        return ()
    return (list(local.stride()),)


def require_fit(
    state: Mapping[str, object],
    saved: Mapping[str, Any],
    kinds: Mapping[str, str],
    parameters: Mapping[str, Sequence[Sequence[Any]]],
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
        DamagedCopy: the state of an optimizer is none.
    """
    for name, holder in state.items():
        _require_holder(name, holder)
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


def _differences(holder: object, saved: Any, parameters: Sequence[Sequence[Any]]) -> Iterator[str]:
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
    """Refuse what no optimizer of torch gives.

    Raises:
        DamagedCopy: names the entry.
    """
    found = is_optimizers(saved)
    if found and type(optimizer).__module__.startswith(
        "torch.optim."
    ):  # others may keep what they like there
        found = all(isinstance(one, dict) for key, one in saved["state"].items() if type(key) is int)
    if not found:
        raise DamagedCopy(Damage(f"state[{name!r}]", "an optimizer's state and param_groups", _form(saved)))


def is_optimizers(saved: Any) -> bool:
    """Say whether a value has the form of what torch's optimizers give."""
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
    """Say whether a submodule with a load of its own takes what differs; a copy of it tries.

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
    except Exception:  # noqa: BLE001 - the module's own code refuses as it likes; the difference is reported
        return False
    return True


def _entry_differences(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in live:
        if key not in saved:
            yield key, f"{key} {_form(live[key])} is in this model only"
        elif key.rpartition(".")[2] == _EXTRA:
            continue  # its form is the module's own affair: Transformer Engine's grows with its history
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
    parameters: Mapping[str, Sequence[Sequence[Any]]],
) -> str:
    """Put a saved state into the live objects, the random states last.

    Args:
        state: the live objects.
        saved: what they gave when they were saved.
        random: the random states.
        parameters: what :func:`parameters_of` returned then, as far as it is known.

    Returns:
        What could not be put back though all else was; empty as a rule.

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
        if _holds_state(holder):
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


def _give(name: str, holder: Stateful, content: Any, parameters: Sequence[Sequence[Any]]) -> None:
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
    """Say whether an optimizer takes its state as torch's own do."""
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and not optimizer._optimizer_load_state_dict_pre_hooks


def _give_optimizer(
    optimizer: torch.optim.Optimizer, content: Any, parameters: Sequence[Sequence[Any]]
) -> None:
    """Have an optimizer take its state; its tensors, such as a learning rate, stay those that they are.

    A CUDA graph that was captured reads those very tensors, and nothing moves a saved rate to its device.
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


def _follow(optimizer: torch.optim.Optimizer, saved: Any, parameters: Sequence[Sequence[Any]]) -> None:
    """Let what an optimizer has of a parameter follow the memory order of that, where it did so before.

    A fused kernel pairs the elements of both by their places in memory.
    """
    params = [one for group in optimizer.param_groups for one in group["params"]]
    for place, entries, _ in entries_of(optimizer, saved):
        local = local_of(params[place])
        if place >= len(parameters) or local.layout is not torch.strided:
            continue
        then = parameters[place]
        strides = tuple(then[2]) if len(then) > 2 else in_order(local.shape)
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


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors in a value that typed JSON knows, each with its path.

    What is nested too deep, or contains itself, cannot be saved; nothing deeper is looked at.
    """
    if len(path) > DEPTH:
        return
    if isinstance(value, Coded):
        value = value.parts
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from tensors_in(each, (*path, str(place)))


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
    """Say whether a tuple with one of them need not be made anew for the other."""
    plain = type(old) in (str, bytes, int, bool) and type(old) is type(new)
    return old is new or (plain and bool(old == new))


def _take(old: Any, new: Any) -> bool:
    """Have a set, bytes or an array of numpy's take the content of one of its type; say whether it did."""
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
