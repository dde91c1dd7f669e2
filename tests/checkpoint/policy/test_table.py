"""What is in a file follows from a table that all ranks of a mesh share, and from a rank's place."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import FileEntry, Row
from outlast.checkpoint.policy.table import Cut, Form, Shard, Table, place_in_meshes, table_of
from outlast.fields import DamagedCopy, Fields
from outlast.parallelism.policy.slices import Split, part_of
from tests.support.json_values import ANYTHING, replace_one

MESHES = ((3, 2), (5,))
FORMS = {
    "a": Form("float32", 4, (7, 4), 0, (Cut(0, 0), Cut(1, 1))),
    "b": Form("float32", 4, (7, 4), 0, (Cut(0, 1), Cut(0, 0))),
    "c": Form("float32", 4, (9, 2), 1, (Cut(0, 0),)),
    "d": Form("bfloat16", 2, (2, 3), strides=(1, 2)),
    "e": Form("bfloat16", 2, (4, 4), part=((1, 0), (2, 4))),
    "f": Form("float4_e2m1", 3, ()),
}
BEGIN = 128
PLACE = ((2, 1), (4,))


def said_of(forms: dict[str, Form] = FORMS, **changes: Any) -> Any:
    value = {
        "identity": {"world_size": 30},
        "meshes": MESHES,
        "aliases": {"z": "a"},
        "tensors": table_of(forms),
    }
    return json.loads(json.dumps({**value, "begin": BEGIN, "coordinates": PLACE, **changes}))


def size_at(place: tuple[tuple[int, ...], ...]) -> int:
    """Return the size of a rank's file."""
    parts = {
        key: part_of(
            form.shape, [Split(a, MESHES[form.mesh or 0][d], place[form.mesh or 0][d]) for a, d in form.cuts]
        )
        for key, form in FORMS.items()
        if key != "e"
    }
    return BEGIN + 16 + sum(part.numel * FORMS[key].width for key, part in parts.items())


def shard_of(value: Any, place: tuple[tuple[int, ...], ...] = PLACE, nbytes: int | None = None) -> Shard:
    nbytes = size_at(place) if nbytes is None else nbytes
    row = Row(nbytes, "0" * 32, "0" * 32, 1, "0" * 32, BEGIN, place)
    return Shard.of(Fields("x.json", value), FileEntry("x.safetensors", nbytes, "0" * 32), row, {"q": 0})


def test_a_table_comes_back_from_its_json() -> None:
    found = shard_of(said_of())
    assert found.table == Table(MESHES, FORMS, {"z": "a"})
    assert list(found.tensors) == list(FORMS)
    assert place_in_meshes(Fields("x.json", said_of())) == (BEGIN, PLACE)


def test_the_parts_of_all_ranks_make_the_whole_and_lie_one_behind_the_other() -> None:
    places = [((i, j), (k,)) for i, j, k in itertools.product(range(3), range(2), range(5))]
    elements: dict[str, set[tuple[int, ...]]] = {key: set() for key in FORMS}
    for place in places:
        found = shard_of(said_of(coordinates=place), place)
        assert found.table == shard_of(said_of()).table
        edge = BEGIN
        for key, entry in found.tensors.items():
            form = FORMS[key]
            assert (entry.begin, entry.nbytes) == (edge, math.prod(entry.shape) * form.width)
            assert (entry.dtype, entry.global_shape, entry.strides) == (form.dtype, form.shape, form.strides)
            edge = entry.end
            reach = zip(entry.offsets, entry.shape, strict=True)
            elements[key] |= set(itertools.product(*(range(at, at + size) for at, size in reach)))
        assert edge == size_at(place)
    sizes = {key: math.prod(form.shape) for key, form in FORMS.items()}
    assert {key: len(found) for key, found in elements.items()} == {**sizes, "e": 8}


def test_which_forms_are_in_parts() -> None:
    assert {key for key, form in FORMS.items() if form.in_parts(MESHES)} == {"a", "b", "c", "e"}
    assert not FORMS["c"].in_parts(((3, 2), (1,)))
    assert not Form("int8", 1, (4,), part=((0,), (4,))).in_parts(())


# Changes of a table, and the word that its refusal names.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no table": ({"tensors": []}, "tensors"),
    "no meshes": ({"meshes": [[3, 2]]}, "c"),
    "an empty mesh": ({"meshes": [[3, 2], [0]]}, "tensors"),
    "an alias of nothing": ({"aliases": {"z": "y"}}, "aliases"),
    "an alias of no text": ({"aliases": {"z": 1}}, "tensors"),
    "beyond its mesh": ({"coordinates": [[3, 1], [4]]}, "coordinates"),
    "in one mesh alone": ({"coordinates": [[2, 1]]}, "coordinates"),
    "in a mesh of other dimensions": ({"coordinates": [[2], [4]]}, "coordinates"),
    "negative": ({"coordinates": [[-1, 1], [4]]}, "coordinates"),
    "more ranks than there are": ({"identity": {"world_size": 5}}, "meshes"),
    "nowhere": ({"coordinates": None}, "coordinates"),
    "another place than the row's": ({"coordinates": [[0, 0], [0]]}, "coordinates"),
    "another begin than the row's": ({"begin": BEGIN + 8}, "begin"),
    "a negative begin": ({"begin": -8}, "begin"),
}
CHANGED: dict[str, dict[str, Any]] = {
    "a width of another type": {"width": 2},
    "no width": {"width": 0},
    "another type": {"dtype": "bfloat16"},
    "a type that is no text": {"dtype": 4},
    "too many elements": {"shape": [1 << 40, 1 << 40]},
    "a size beyond any": {"shape": [1 << 70, 4]},
    "too many dimensions": {"shape": [1] * 300},
    "a negative size": {"shape": [-7, 4]},
    "a fraction": {"shape": [7.0, 4]},
    "more rows": {"shape": [8, 4]},
    "a cut of no dimension": {"cuts": [[2, 0]]},
    "a cut of no dimension of a mesh": {"cuts": [[0, 2]]},
    "two cuts along one": {"cuts": [[0, 1], [1, 1]]},
    "a cut of one number": {"cuts": [[0]]},
    "a negative cut": {"cuts": [[0, -1]]},
    "no such mesh": {"mesh": 2},
    "no mesh": {"mesh": None},
    "no cut": {"cuts": []},
    "cuts and a part": {"part": [[0, 0], [7, 4]]},
    "strides with gaps": {"strides": [1, 100]},
    "strides of other dimensions": {"strides": [1]},
    "strides beyond memory": {"strides": [1 << 70, 1]},
}
PARTS = [[[3, 0], [2, 4]], [[0], [4]], [[0, 0], [4]], [[0, 0]], [[-1, 0], [2, 4]], "part"]


@pytest.mark.parametrize("how", WRONG)
def test_a_table_is_consistent(how: str) -> None:
    change, word = WRONG[how]
    with pytest.raises(DamagedCopy) as caught:
        shard_of(said_of(**change))
    assert caught.value.damage.file == "x.json"
    assert word in caught.value.damage.expected


@pytest.mark.parametrize("how", CHANGED)
def test_a_tensor_has_the_bytes_of_its_form(how: str) -> None:
    value = said_of()
    value["tensors"]["a"].update(CHANGED[how])
    with pytest.raises(DamagedCopy):
        shard_of(value)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_one_of_its_whole(part: Any) -> None:
    value = said_of()
    value["tensors"]["e"]["part"] = part
    with pytest.raises(DamagedCopy):
        shard_of(value)


@pytest.mark.parametrize("more", [-1, 1, 1 << 50])
def test_a_file_has_the_bytes_of_its_tensors(more: int) -> None:
    with pytest.raises(DamagedCopy):
        shard_of(said_of(), nbytes=size_at(PLACE) + more)


def test_a_tensor_is_in_the_own_file_or_in_a_shared_one() -> None:
    with pytest.raises(DamagedCopy):
        shard_of(said_of({**FORMS, "q": Form("int8", 1, (0,))}))


@given(st.integers(0, 10**6), ANYTHING)
def test_whatever_replaces_a_value_is_taken_or_named_as_damage(where: int, new: Any) -> None:
    value = said_of()
    replace_one(value, where, new)
    try:
        found = shard_of(value)
    except DamagedCopy:
        return
    assert found.file.nbytes == size_at(PLACE)
