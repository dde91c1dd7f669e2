"""Whatever bytes a file has: a decoder returns a value or finds damage, in bounded time and memory."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.content.random_states import capture_random, require_random
from outlast.checkpoint.content.rank_file import contents_of, parse_rank_file, whose_file
from outlast.checkpoint.content.typed_forms import DECODERS, Forms, references
from outlast.checkpoint.content.typed_json import Decoder, Encoder
from outlast.checkpoint.policy.manifest import (
    Identity,
    Manifest,
    Row,
    rank_files,
)
from outlast.checkpoint.policy.table import Cut, Form, table_of
from outlast.errors import CheckpointMismatch
from outlast.fields import FORMAT_VERSION, DamagedCopy
from tests.support.bounds import bounded_memory
from tests.support.forging import SAID, text_of

SECONDS = 20.0  # for one value; a decoder that is caught in a loop takes for ever
ME = Identity("run", 0, 0, 1)
DOCUMENT = rank_files(0, 1).document
ROW = Row(150, "0" * 32, "1" * 32, 8, "2" * 32, 100, ((0, 0),))
TENSORS = {"w": torch.zeros(2)}
VALUE = {
    "a": [1, 2.5, None, True, "x", (1, (2, {"b": b"\0\xff"})), 2**80, float("inf")],
    "n": [numpy.arange(6, dtype=">i4").reshape(2, 3), numpy.float32(2), numpy.array(["ab"])],
    "t": [torch.float16, torch.device("cpu"), torch.Size([2, 3]), {1, 2}, frozenset("a"), bytearray(b"z")],
    "m": {1: {(2, "c"): TENSORS["w"]}},
}
TREE = Encoder(lambda tensor, path: {"tensor": "w"}).encode(VALUE, ("x",))

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 2**200, -(2**70), 1e308, 0.5]),
    st.sampled_from(["", "w", "O", "<f8", "|O", "<U1000000000", "i4,f8", "(2,)f4", "V8", "<M8[1e9Y]", "cpu"]),
    st.text(max_size=4),
    st.binary(max_size=16).map(lambda octets: base64.b64encode(octets).decode()),
)
anything = st.recursive(
    odd,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(sorted(DECODERS)), st.text(max_size=3)), inner, max_size=2),
        st.tuples(st.sampled_from(sorted(DECODERS)), inner).map(lambda pair: {pair[0]: pair[1]}),
    ),
    max_leaves=8,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = tree.items() if type(tree) is dict else enumerate(tree) if type(tree) is list else ()
    for key, each in pairs:
        yield from places(each, (*path, key))


def changed(tree: Any, dice: st.DataObject, times: int = 2) -> Any:
    """Return a copy of JSON in which values were exchanged for others, or left out."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.draw(st.integers(1, times))):
        path = dice.draw(st.sampled_from(list(places(tree))))
        if not path:
            return dice.draw(anything)
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        if dice.draw(st.booleans()):
            holder[path[-1]] = dice.draw(anything)
        elif type(holder) is dict:
            del holder[path[-1]]
        else:
            holder.pop(path[-1])
    return tree


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Refuse memory beyond what a value of these sizes can need, and measure the time."""
    with bounded_memory():
        yield


def fails(forms: type[Forms], tree: Any) -> bool:
    try:
        forms("x.json", TENSORS).decode(json.loads(json.dumps(tree)))
    except DamagedCopy:
        return True
    return False


def decode(tree: Any) -> Any:
    assert fails(Decoder, tree) or not fails(Forms, tree), "what can be loaded has a form"
    began = time.monotonic()
    try:
        found = Decoder("x.json", TENSORS).decode(json.loads(json.dumps(tree)))
        repr(found)  # an address in place of a value would be followed here
        return found
    except DamagedCopy:
        return None
    finally:
        assert time.monotonic() - began < SECONDS


@settings(max_examples=200, deadline=None)
@given(anything)
def test_any_json_is_a_value_or_damage(tree: Any) -> None:
    decode(tree)
    references(tree)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_value_is_a_value_or_damage(dice: st.DataObject) -> None:
    tree = changed(TREE, dice)
    decode(tree)
    references(tree)


ADDRESS = base64.b64encode(b"A" * 8).decode()


@pytest.mark.parametrize(
    "tree",
    [
        {"numpy.ndarray": ["O", [1], ADDRESS]},
        {"numpy.ndarray": ["|O", [1], ADDRESS]},
        {"numpy.generic": ["O", ADDRESS]},
        {"numpy.ndarray": ["O,i4", [1], ADDRESS]},
        {"numpy.ndarray": ["(1,)O", [1], ADDRESS]},
        {"numpy.ndarray": ["V8", [1], ADDRESS]},
        {"numpy.ndarray": ["object", [1], ADDRESS]},
        {"numpy.ndarray": ["<f8", [-1], ADDRESS]},
        {"numpy.ndarray": ["<f8", [2], ADDRESS]},
        {"numpy.ndarray": ["<f8", [0, 2**63], ""]},
        {"numpy.ndarray": ["<f8", [True], ADDRESS]},
        {"numpy.ndarray": ["<U2", [1], ADDRESS]},
        {"numpy.ndarray": [["<f8"], [1], ADDRESS]},
        {"torch.Size": [-1]},
        {"torch.Size": [2**64]},
        {"dict": [1]},
        {"codec": [1]},
        {"codec": ["a", "b", [1]]},
        {"map": [[1]]},
        {"OrderedDict": [], "metadata": 1},
        {"dict": {}, "metadata": {"dict": {}}},
        {"tensor": ["w"]},
        {"tuple": {"a": 1}},
        {"set": [[1]]},
        {"bytes": 1},
        {"float": "00"},
        {},
    ],
    ids=json.dumps,
)
def test_a_form_that_is_not_in_order_is_damage(tree: Any) -> None:
    assert fails(Decoder, tree)
    assert fails(Forms, tree)


def test_a_value_nested_without_end_is_damage() -> None:
    for leaf in ({"tuple": []}, [], {"map": [[1, 1]]}):
        tree: Any = leaf
        for _ in range(600):
            tree = {"tuple": [tree]}
        with pytest.raises(DamagedCopy):
            Decoder("x.json", TENSORS).decode(tree)


def document() -> Any:
    forms = {"w": Form("float32", 4, (4, 3), 0, (Cut(0, 0),)), "u": Form("int8", 1, (2,))}
    return json.loads(
        json.dumps(
            {
                "format": FORMAT_VERSION,
                "identity": whose_file(5, ME),
                "state": {"x": TREE},
                "kinds": {"x": "AdamW"},
                "parameters": {"x": [["model.w", "float32[2, 3]", None], ["", "int8[1]", [1]]]},
                "random": Encoder().encode(capture_random(), ("random",)),
                "flags": {"x": ["1", "1f"]},
                "borrowed": {},
                "aliases": {"v": "w"},
                "tensors": table_of(forms),
                "meshes": [[1, 1]],
                "begin": 100,
                "coordinates": [[0, 0]],
            }
        )
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_rank_file_is_one_or_damage(dice: st.DataObject) -> None:
    tree = changed(document(), dice)
    try:
        said = contents_of(DOCUMENT, tree)
        found = parse_rank_file(json.dumps(tree).encode(), 5, ME, ROW, said)
    except (DamagedCopy, CheckpointMismatch):
        return
    for entry in found.tensors.values():
        torch.empty(entry.global_shape, device="meta")
    decode(found.random)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_manifest_is_one_or_damage(dice: st.DataObject) -> None:
    whole = {
        **{"format": FORMAT_VERSION, "run_id": "a", "generation": 0, "step": 5, "world_size": 1},
        **{
            "parallelism": {"tp": 1},
            "cursor": TREE,
            "created": 1.5,
            "own": [list(ROW)],
            "contents": {name: [[1, one]] for name, one in SAID.items()},
        },
        **{"session": "", "part": [], "shared": [], "began": None},
    }
    assert Manifest.from_json(text_of(whole)).cursor == TREE
    tree = changed(whole, dice)
    try:
        decode(Manifest.from_json(text_of(tree)).cursor)
    except (DamagedCopy, CheckpointMismatch):
        return


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_random_states_are_taken_or_damage(dice: st.DataObject) -> None:
    before = torch.get_rng_state()
    numpy.random.seed(0)
    tree = changed(Encoder().encode(capture_random(), ("random",)), dice)
    found = decode(tree)
    with contextlib.suppress(DamagedCopy):
        require_random(found, "x.json")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("position", [-1, 625, 10**6, 2**40])
def test_no_generator_reads_beyond_its_words(position: int) -> None:
    numpy.random.seed(0)
    states = capture_random()
    states["numpy"]["state"]["pos"] = position
    with pytest.raises(DamagedCopy):
        require_random(states, "x.json")
