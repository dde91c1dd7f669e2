"""Capture of the same state again and again: keys and layout are reused while its form stays the same.

Naming and checking 40,000 tensors takes three times as long as comparing their form. Each property (type,
address, shape, strides, element type) is compared for all tensors in one call. No tensor is kept from one
capture to the next, so nothing holds memory that the script has released.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import Piece, distributed, piece_of, possible
from outlast.checkpoint.content.flags import flags_of
from outlast.checkpoint.content.memory import uncollected
from outlast.checkpoint.content.state import (
    PLAIN_TENSORS,
    Captured,
    LiveState,
    capture,
    capture_random,
    names_of,
    parameters_of,
    stepped_in,
)
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Encoder, Path

_SIMPLE = (type(None), bool, int, float, str)
_MAPPINGS = (dict, OrderedDict)


class _OtherForm(Exception):
    """A state has not the form that it had, or none that can be compared."""


def _refuse(*_: object) -> str:
    raise _OtherForm


_ENCODER = Encoder(_refuse)


class _Value:
    """Something without tensors."""

    def __init__(self, path: Path, json: Json) -> None:
        self._path, self._json = path, json

    def again(self, value: Any, _: list[torch.Tensor]) -> Json:
        found, before = _ENCODER.encode(value, self._path), self._json
        if type(found) not in _SIMPLE or type(found) is not type(before) or repr(found) != repr(before):
            self._json = found
        return self._json


class _Tensor:
    """A tensor."""

    def __init__(self, json: Json) -> None:
        self._json = json

    def again(self, value: Any, tensors: list[torch.Tensor]) -> Json:
        tensors.append(value)
        return self._json


class _Distributed:
    """A distributed tensor; what is compared of it is this rank's part, and its place in the whole."""

    def __init__(self, placement: object, json: Json) -> None:
        self._placement, self._json = placement, json

    def again(self, value: Any, tensors: list[torch.Tensor]) -> Json:
        if not distributed(value):
            raise _OtherForm
        local, placement = _torch_compat.local_and_placement(value)
        if placement != self._placement:
            raise _OtherForm
        tensors.append(local)
        return self._json


class _Tensors:
    """A mapping of tensors alone."""

    def __init__(self, shape: _Shape, json: Json) -> None:
        self._shape, self._json = shape, json

    def again(self, value: Any, tensors: list[torch.Tensor]) -> Json:
        tensors += self._shape.parts(value)
        return self._json


class _Items:
    """A mapping or sequence."""

    def __init__(self, shape: _Shape, children: list[_Node], json: Json) -> None:
        self._shape, self._children, self._json = shape, children, json
        self._jsons: list[Json] = [each for _, each in _entries(json)]

    def again(self, value: Any, tensors: list[torch.Tensor]) -> Json:
        parts = self._shape.parts(value)
        jsons = [child.again(one, tensors) for child, one in zip(self._children, parts, strict=True)]
        if any(map(is_not, jsons, self._jsons)):
            self._jsons, self._json = jsons, _with(self._json, jsons)
        return self._json


_Node = _Value | _Tensor | _Distributed | _Tensors | _Items


class _Shape:
    """The type of a mapping or sequence, its keys, and what a module's state says of its layers.

    Args:
        value: the mapping or sequence.

    Raises:
        _OtherForm: it is none whose keys and notes are compared.
    """

    def __init__(self, value: Any) -> None:
        self._kind, self._notes = type(value), _notes_of(value)
        self.keys = list(value) if self._kind in _MAPPINGS else list(range(len(value)))
        self._types = set(map(type, self.keys))
        if self._kind not in (*_MAPPINGS, list, tuple) or not self._types <= {int, str}:
            raise _OtherForm  # keys of other types can be equal and still differ, as 1 and True do

    def parts(self, value: Any) -> list[Any]:
        """Return the parts of a value of this shape.

        Raises:
            _OtherForm: it is of another one.
        """
        if type(value) is not self._kind:
            raise _OtherForm
        if self._kind in _MAPPINGS:
            items = list(value.items())
            keys, parts = [key for key, _ in items], [one for _, one in items]
            if keys != self.keys or not set(map(type, keys)) <= self._types:
                raise _OtherForm
        else:
            parts = list(value)
            if len(parts) != len(self.keys):
                raise _OtherForm
        if self._notes is not None and _notes_of(value) != self._notes:
            raise _OtherForm
        return parts


def _notes_of(value: Any) -> list[Any] | None:
    """Return what a module's state says of its layers; None: it is none.

    Raises:
        _OtherForm: a part of it is neither a mapping, nor a text, nor a whole number.
    """
    notes = getattr(value, "_metadata", None) if type(value) is OrderedDict else None
    if notes is None:
        return None
    if type(notes) not in _MAPPINGS:
        raise _OtherForm
    found: list[Any] = [type(notes)]
    for key, one in list(notes.items()):
        if type(key) is not str or type(one) not in _MAPPINGS or not set(map(type, one)) <= {str}:
            raise _OtherForm
        if not set(map(type, one.values())) <= {int, str}:
            raise _OtherForm
        found.append((key, type(one), tuple(one.items())))
    return found


def _entries(json: Json) -> list[tuple[Any, Json]]:
    """Return the parts of a mapping or sequence in typed JSON, in order."""
    if type(json) is list:
        return list(enumerate(json))
    tag = next(iter(json))
    if tag == "dict":
        return list(json[tag].items())
    return [tuple(pair) for pair in json[tag]] if tag != "tuple" else list(enumerate(json[tag]))


def _with(json: Json, jsons: list[Json]) -> Json:
    """Return typed JSON of a mapping or sequence with other parts."""
    if type(json) is list:
        return jsons
    tag = next(iter(json))
    if tag == "tuple":
        return {tag: jsons}
    pairs = zip((key for key, _ in _entries(json)), jsons, strict=True)
    return {**json, tag: dict(pairs) if tag == "dict" else [[key, each] for key, each in pairs]}


def _node_of(value: Any, json: Json, path: Path, captured: Captured, keys: list[str]) -> _Node:
    """Return what finds the form of a value again.

    A thread of the script may have changed the value after its capture, so both are compared first.

    Args:
        value: the value.
        json: its typed JSON.
        path: its place.
        captured: the state.
        keys: takes the keys of its tensors.

    Raises:
        _OtherForm: it has tensors that are not compared, or is not what was captured.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not (type(json) is dict and list(json) == ["tensor"]):
            raise _OtherForm
        key = json["tensor"]
        keys.append(key)
        if kind in PLAIN_TENSORS and key not in captured.pieces:
            return _Tensor(json)
        if not distributed(value) or _place(piece_of(value)) != _place(captured.pieces[key]):
            raise _OtherForm
        return _Distributed(_torch_compat.local_and_placement(value)[1], json)
    if kind in _SIMPLE or not references(json):
        return _Value(path, json)
    shape, entries = _Shape(value), _entries(json)
    parts = shape.parts(value)
    if [key for key, _ in entries] != shape.keys:
        raise _OtherForm
    children = [
        _node_of(one, inner, (*path, str(key)), captured, keys)
        for one, (key, inner) in zip(parts, entries, strict=True)
    ]
    if kind in _MAPPINGS and all(type(one) is _Tensor for one in children):
        return _Tensors(shape, json)
    return _Items(shape, children, json)


def _place(piece: Piece) -> tuple[object, ...]:
    return piece.global_shape, piece.part, piece.cuts


_ADDRESS, _STRIDE, _CONJ, _NEG = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_SHAPE, _DTYPE, _DEVICE = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


def _geometry(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """Return address, shape, strides, element type, flags and device of tensors, a list of each.

    Raises:
        _OtherForm: a tensor is none of those that are compared.
    """
    if not set(map(type, tensors)) <= set(PLAIN_TENSORS):
        raise _OtherForm
    columns = (_ADDRESS, _SHAPE, _STRIDE, _DTYPE, _CONJ, _NEG, _DEVICE)
    try:
        return tuple(list(map(column, tensors)) for column in columns)
    except RuntimeError as error:  # a layout without strides or addresses
        raise _OtherForm from error


@dataclass(frozen=True)
class _Known:
    """The form of a state.

    Args:
        nodes: of each object's content, by name.
        types: of the objects.
        keys: of the tensors, in the order in which they are found.
        geometry: of these, and of the parameters of optimizers.
        placements: of the distributed parameters of optimizers.
        names: of all parameters of optimizers.
        captured: the state, without its tensors.
    """

    nodes: Mapping[str, _Node]
    types: list[type]
    keys: list[str]
    geometry: tuple[list[Any], ...]
    placements: list[object]
    names: dict[str, list[str]]
    captured: Captured

    @classmethod
    def of(cls, state: LiveState, captured: Captured) -> _Known:
        """Return that of a state.

        Raises:
            _OtherForm: it has none that can be compared.
        """
        keys: list[str] = []
        nodes = {
            name: _node_of(state.content(name), captured.values[name], (name,), captured, keys)
            for name in state
        }
        stepped = stepped_in(state)
        locals_, placements = _parts_of(chain.from_iterable(stepped.values()))
        geometry = _geometry([captured.tensors[key] for key in keys] + locals_)
        if parameters_of(state) != captured.parameters:
            raise _OtherForm
        types, names = list(map(type, state.values())), names_of(stepped, state)
        return cls(nodes, types, keys, geometry, placements, names, replace(captured, tensors={}))

    def again(self, state: LiveState) -> Captured:
        """Capture a state of this form.

        Raises:
            _OtherForm: it has not this form.
        """
        before = self.captured
        if list(state) != list(self.nodes) or list(map(type, state.values())) != self.types:
            raise _OtherForm
        tensors: list[torch.Tensor] = []
        values = {name: node.again(state.content(name), tensors) for name, node in self.nodes.items()}
        stepped = stepped_in(state)
        locals_, placements = _parts_of(chain.from_iterable(stepped.values()))
        if placements != self.placements or _geometry(tensors + locals_) != self.geometry:
            raise _OtherForm
        named = names_of(stepped, state) == self.names
        return replace(
            before,
            values=values,
            tensors=dict(zip(self.keys, tensors, strict=True)),
            random=capture_random(),
            parameters=before.parameters if named else parameters_of(state),
            flags=flags_of(state),
        )


def _parts_of(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[object]]:
    """Return this process's parts of tensors, and the placements of those that are distributed."""
    if not possible():
        return list(tensors), []
    parts, placements = [], []
    for one in tensors:
        part = one
        if distributed(one):
            part, placement = _torch_compat.local_and_placement(one)
            placements.append(placement)
        parts.append(part)
    return parts, placements


class Capturer:
    """Captures a state again and again.

    Captures of one form share one ``form`` object: a caller may reuse what it derived from the keys,
    addresses, shapes, strides and types of their tensors.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._others = 0  # captures in a row that were not of the form before

    @uncollected()
    def capture(self, state: Mapping[str, object]) -> Captured:
        """Take a state apart; see :func:`outlast.checkpoint.content.state.capture`."""
        live = LiveState(state)
        known, self._known = self._known, None
        if known is not None:
            with contextlib.suppress(_OtherForm):
                found = known.again(live)
                self._known, self._others = known, 0
                return found
        captured = capture(live)
        self._others += 1
        if self._others & (self._others - 1) == 0:  # some objects make their tensors anew each time
            with contextlib.suppress(_OtherForm):
                self._known = _Known.of(live, captured)
        return captured
