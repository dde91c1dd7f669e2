"""Training state to tensors and typed JSON.

A state is a mapping from names to objects: anything with ``state_dict()`` and ``load_state_dict()``, a
tensor, or a dict or list of values and tensors. What an object gives is kept exactly as it gives it.

The tensors are given keys once, and again only where their form has changed: naming and checking 40,000
tensors takes three times as long as comparing paths and each property (type, address, shape, strides, element
type) in one call for all. No tensor is kept from one capture to the next, so nothing holds memory that the
script has released.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar

import torch
from torch.nn.parameter import is_lazy

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import (
    Coded,
    Piece,
    distributed,
    local_of,
    piece_of,
    unsupported,
)
from outlast.checkpoint.content.flags import Flags, flags_of
from outlast.checkpoint.content.memory import uncollected
from outlast.checkpoint.content.random_states import capture_random
from outlast.checkpoint.content.rank_file import Parameter
from outlast.checkpoint.content.typed_forms import DEPTH, Json
from outlast.checkpoint.content.typed_json import Encoder, Path, form_of
from outlast.checkpoint.policy.table import in_order
from outlast.errors import UsageError
from outlast.ports import Stateful

T = TypeVar("T")
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_LAZY = "has no shape yet; pass a batch through a lazy module before session.restore"
_RESERVED = "__metadata__"  # safetensors' own key


@dataclass(frozen=True)
class Captured:
    """A state taken apart; the tensors are still the live ones.

    Args:
        values: the typed JSON of each object, by name; tensors are referred to by key.
        kinds: the type of each optimizer and scheduler, by name.
        tensors: by key, "model.blocks.0.weight"; of a distributed tensor the part that this rank has.
        aliases: keys of tied tensors, each with the key that stands for it.
        random: the random states.
        pieces: where a part of a distributed tensor is in the whole, by key.
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
    parameters: dict[str, list[Parameter]] = field(default_factory=dict)
    flags: Flags = field(default_factory=dict)
    form: object = field(default_factory=object, compare=False)


_Place = tuple[Path, dict[str, str]]  # path of a tensor, and what stands for it in typed JSON


class _Walk:
    """What the objects of a state hold, as typed JSON.

    Args:
        contents: of the objects, by name.
        known: the places of the tensors at an earlier walk; this one has the same where paths are equal.

    Raises:
        UsageError: something in it has no form; names it.
    """

    def __init__(self, contents: Mapping[str, object], known: Sequence[_Place] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.places: list[_Place] = []
        earlier = iter(known)

        def add(tensor: torch.Tensor, path: Path) -> Json:
            place = next(earlier, None)
            if place is None or place[0] != path:
                place = (path, {"tensor": ""})
            self.tensors.append(tensor)  # kept alive, so that no later one gets its address
            self.places.append(place)
            return place[1]

        encoder = Encoder(add)
        self.values = {name: encoder.encode(content, (name,)) for name, content in contents.items()}
        self.parts, self.placements = _parts_of(self.tensors)


@dataclass(frozen=True)
class _Form:
    """What keys, aliases and pieces follow from, and whether the objects can take their tensors.

    Args:
        types: of the objects.
        places: of their tensors.
        placements: of those that are distributed.
        geometry: of this rank's parts of them.
    """

    types: list[type]
    places: list[_Place]
    placements: list[object]
    geometry: _Geometry

    @classmethod
    def of(cls, walk: _Walk, state: Mapping[str, object]) -> _Form | None:
        """Return that of a state; None: it has none that can be compared."""
        geometry = _geometry(walk.parts)
        if geometry is None:
            return None
        return cls(list(map(type, state.values())), walk.places, walk.placements, geometry)


@dataclass(frozen=True, eq=False)  # compared by identity
class _Keys:
    """The keys of the tensors of a state.

    Args:
        of_each: in the order of the walk; of a tied tensor the key that stands for it.
        aliases: keys of tied tensors, each with the key that stands for it.
        pieces: where a part of a distributed tensor is in the whole, by key.
    """

    of_each: list[str]
    aliases: dict[str, str]
    pieces: dict[str, Piece]

    @classmethod
    def of(cls, walk: _Walk) -> _Keys:
        """Check the tensors of a state, and give each a key.

        Raises:
            UsageError: one cannot be saved exactly; names it.
        """
        found = cls([], {}, {})
        known: dict[str, torch.Tensor] = {}
        places: dict[int, list[str]] = {}  # keys by address
        for whole, tensor, (path, reference) in zip(walk.tensors, walk.parts, walk.places, strict=True):
            piece = None
            if distributed(whole):
                why = unsupported(whole)
                if why:
                    _refuse(path, why)
                piece = piece_of(whole)
            _require_plain(tensor, path)
            key, number = ".".join(path), 2
            while key in known or key in found.aliases or key == _RESERVED:  # a path may read alike
                key, number = f"{'.'.join(path)}~{number}", number + 1
            at_place = places.setdefault(tensor.data_ptr(), []) if tensor.numel() else []
            for other in at_place:
                if _same(tensor, known[other]) and piece == found.pieces.get(other):
                    found.aliases[key] = key = other
                    break
            else:
                at_place.append(key)
                known[key] = tensor
                if piece is not None:
                    found.pieces[key] = piece
            reference["tensor"] = key
            found.of_each.append(key)
        return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors at one address are the same elements, tied."""
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
    elif type(tensor) not in _PLAIN:
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


def holds_state(value: object) -> TypeGuard[Stateful]:
    """Return whether an object gives and takes its state itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def require_holder(name: str, value: object) -> None:
    """Refuse what could be saved but not put back.

    Raises:
        UsageError: names the entry and the type.
    """
    if not (holds_state(value) or isinstance(value, torch.Tensor) or type(value) in (dict, list)):
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


class Capturer:
    """Captures a state again and again.

    Captures of one form share one ``form`` object: a caller may reuse what it derived from the keys,
    addresses, shapes, strides and types of their tensors.
    """

    def __init__(self) -> None:
        self._form: _Form | None = None
        self._settled = True  # the two captures before were of one form, as far as there were two
        self._keys = _Keys([], {}, {})
        self._stepped: tuple[object, dict[str, list[Parameter]]] = (None, {})  # names and form, parameters

    @uncollected()
    def capture(self, state: Mapping[str, object]) -> Captured:
        """Take a state apart, with the random states of this process.

        Raises:
            UsageError: something in it cannot be saved exactly; names it.
        """
        for name, holder in state.items():
            require_holder(name, holder)
        live = LiveState.of(state)
        contents = {name: live.content(name) for name in live}
        known, self._form = self._form, None
        same = known is not None and self._settled  # else codecs would be called twice at each capture
        walk = _Walk(contents, known.places if known is not None and same else ())
        form = _Form.of(walk, live)
        if form is None or form != known:
            if same:
                del walk, form  # codecs may have made tensors for it
                walk = _Walk(contents)  # earlier captures still use the entries of the known places
                form = _Form.of(walk, live)
            self._keys = _Keys.of(walk)
            self._settled = known is None or form == known
            for name, holder in live.items():
                _require_writable(name, holder, contents[name])
        self._form = form
        keys, tensors = self._keys, dict(zip(self._keys.of_each, walk.parts, strict=True))
        parameters, flags = self._parameters_of(live), flags_of(live)
        return Captured(
            *(walk.values, kinds_of(live), tensors, keys.aliases, capture_random(), keys.pieces),
            *(parameters, flags, keys),
        )

    def _parameters_of(self, state: Mapping[str, object]) -> dict[str, list[Parameter]]:
        """Return what each optimizer steps; as the last time, if names and form are equal."""
        stepped = _stepped_in(state)
        parts, placements = _parts_of(chain.from_iterable(stepped.values()))
        geometry = _geometry(parts)
        described = _names_of(stepped, state), placements, geometry
        if geometry is None or described != self._stepped[0]:
            self._stepped = described, parameters_of(state)
        return self._stepped[1]


class Derived(Generic[T]):
    """Keeps what was derived last, as long as its basis stays the same.

    If the basis is the same object as before, it is not compared.
    """

    def __init__(self) -> None:
        self._known: tuple[object, T] | None = None

    def of(self, basis: object, derive: Callable[[], T]) -> T:
        """Return what a basis leads to.

        Args:
            basis: compared with the one before.
            derive: called if it is another one.
        """
        known = self._known
        if known is None or known[0] is not basis:
            known = self._known = basis, derive() if known is None or known[0] != basis else known[1]
        return known[1]


def capture(state: Mapping[str, object]) -> Captured:
    """Take a state apart once; see :meth:`Capturer.capture`."""
    return Capturer().capture(state)


_Geometry = tuple[list[Any], ...]
_ADDRESS, _STRIDE, _CONJ, _NEG = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_SHAPE, _DTYPE, _DEVICE = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


def _geometry(tensors: list[torch.Tensor]) -> _Geometry | None:
    """Return address, shape, strides, element type, flags and device of tensors, a list of each.

    None: some have more than that, or no strides or addresses.
    """
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    columns = (_ADDRESS, _SHAPE, _STRIDE, _DTYPE, _CONJ, _NEG, _DEVICE)
    try:
        return tuple(list(map(column, tensors)) for column in columns)
    except RuntimeError:
        return None


def _parts_of(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[object]]:
    """Return this process's parts of tensors, and the placements of those that are distributed."""
    found = list(tensors)
    if set(map(type, found)) <= _PLAIN:
        return found, []
    placements = [_torch_compat.local_and_placement(one)[1] if distributed(one) else None for one in found]
    return list(map(local_of, found)), placements


def _require_writable(name: str, holder: object, content: Any) -> None:
    """Refuse tensors to which a load would have to write and cannot.

    An object of the user's may make what it likes of the tensors that it gets, and an optimizer keeps them.

    Raises:
        UsageError: names the entry.
    """
    module = isinstance(holder, torch.nn.Module)
    if not module and holds_state(holder):
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
    """Return whether a module's own load copies an entry of its state into a parameter or buffer."""
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
    return holder.state_dict() if holds_state(holder) else holder


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


@uncollected()
def take_apart(contents: Mapping[str, object], kinds: dict[str, str], random: dict[str, Any]) -> Captured:
    """Take apart what the objects of a state hold.

    Args:
        contents: by name.
        kinds: the type of each optimizer and scheduler, by name.
        random: random states.

    Raises:
        UsageError: something in it cannot be saved exactly; names it.
    """
    walk = _Walk(contents)
    keys = _Keys.of(walk)
    tensors = dict(zip(keys.of_each, walk.parts, strict=True))
    return Captured(walk.values, kinds, tensors, keys.aliases, random, keys.pieces)


def kinds_of(state: Mapping[str, object]) -> dict[str, str]:
    """Return the type of each optimizer and scheduler: one's state loads into another without a word."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return {name: type(holder).__qualname__ for name, holder in state.items() if isinstance(holder, kinds)}


def parameters_of(state: Mapping[str, object]) -> dict[str, list[Parameter]]:
    """Return what each optimizer steps, in its order: an optimizer's state knows parameters by number alone.

    Of each parameter the name that it has in a module of the state, "model.blocks.0.weight" (empty: in none),
    its form, and its strides where its elements are not one behind the other.
    """
    stepped = _stepped_in(state)
    return {
        name: [
            (key, form_of(parameter), _order_of(parameter))
            for key, parameter in zip(keys, stepped[name], strict=True)
        ]
        for name, keys in _names_of(stepped, state).items()
    }


def _stepped_in(state: Mapping[str, object]) -> dict[str, list[torch.Tensor]]:
    """Return the parameters of each optimizer, in its order."""
    optimizers = {name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)}
    return {
        name: [parameter for group in one.param_groups for parameter in group["params"]]
        for name, one in optimizers.items()
    }


def _names_of(
    stepped: Mapping[str, Sequence[torch.Tensor]], state: Mapping[str, object]
) -> dict[str, list[str]]:
    """Return the names that parameters have in the modules of a state; empty: none."""
    names: dict[int, str] = {}
    for name, holder in state.items():
        if isinstance(holder, torch.nn.Module):
            for key, parameter in holder.named_parameters():
                names.setdefault(id(parameter), f"{name}.{key}")
    return {name: [names.get(id(one), "") for one in parameters] for name, parameters in stepped.items()}


def _order_of(parameter: torch.Tensor) -> list[int] | None:
    local = local_of(parameter)
    if local.layout is not torch.strided or local.stride() == in_order(local.shape):
        return None
    return list(local.stride())


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
