"""Values that go through JSON come back with their types, exactly."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.content.typed_json import Decoder, Encoder
from outlast.fields import DamagedCopy

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3])]),
)
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)), st.booleans()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(0, 5), max_size=3).map(Counter),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=12,
)


def through_json(value: object) -> Any:
    text = json.dumps(Encoder().encode(value, ("x",)), allow_nan=False).encode()
    return Decoder("x.json", {}).decode(json.loads(text))


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            same(a, b) for a, b in zip([*left, *left.values()], [*right, *right.values()], strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) and (
        type(left) is not float or math.copysign(1, left) == math.copysign(1, right)
    )


@given(values)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000000, 0xFFF0000000000000]
)
def test_numbers_that_json_does_not_know_keep_their_bits(bits: int) -> None:
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert struct.unpack(">Q", struct.pack(">d", through_json(value)))[0] == bits


@pytest.mark.parametrize(
    "value",
    [
        {"nonsense": 1},
        {},
        {"tuple": 3},
        {"bytes": "%"},
        {"torch.dtype": "float99"},
        {"tensor": "gone"},
        {"int": "x"},
    ],
)
def test_json_that_is_not_typed_is_damage(value: object) -> None:
    with pytest.raises(DamagedCopy):
        Decoder("x.json", {}).decode(value)
