"""What another process may write, field by field, and what a refusal says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

import pytest

from outlast.cluster.policy.codec import (
    AtMost,
    Codec,
    Count,
    ExitCode,
    Generation,
    Identities,
    MessageError,
    Misfit,
    Name,
    Port,
    Rank,
    Ranks,
    Signum,
    Tree,
    Within,
)
from outlast.cluster.policy.messages import Incarnation, agent_id


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    count: Annotated[int, Within(0, 8)]
    note: Annotated[str, AtMost(3)] = ""


@dataclass(frozen=True)
class Other:
    seconds: Annotated[float, Within(0, math.inf)]


@dataclass(frozen=True)
class Whole:
    whole: int
    real: float
    text: str
    flag: bool
    color: Color
    names: tuple[str, ...]
    row: tuple[int, str]
    group: Annotated[frozenset[Annotated[str, AtMost(2)]], AtMost(2)]
    inner: Inner
    either: Inner | Other
    parts: Annotated[tuple[Inner, ...], AtMost(2)]
    unknown: Inner | None
    tree: Annotated[Any, Tree(values=6, depth=3, text=4)]
    absent: Inner | Other | None = None
    later: int = 7


WHOLE: Codec[Whole] = Codec(Whole)
PARTS: Codec[Inner | Other] = Codec(Inner | Other)
SMALL: Codec[Inner] = Codec(Inner)
VALUE = Whole(
    whole=-5,
    real=0.5,
    text="é",
    flag=True,
    color=Color.BLUE,
    names=("b", "a"),
    row=(1, "x"),
    group=frozenset({"b", "a"}),
    inner=Inner(1),
    either=Other(2.5),
    parts=(Inner(2, "n"), Inner(3)),
    unknown=None,
    tree={"a": [1, None]},
)
WRITTEN: dict[str, Any] = {
    "whole": -5,
    "real": 0.5,
    "text": "é",
    "flag": True,
    "color": "blue",
    "names": ["b", "a"],
    "row": [1, "x"],
    "group": ["a", "b"],
    "inner": {"count": 1, "note": ""},
    "either": {"type": "Other", "seconds": 2.5},
    "parts": [{"count": 2, "note": "n"}, {"count": 3, "note": ""}],
    "unknown": None,
    "tree": {"a": [1, None]},
    "later": 7,
}


def test_a_value_is_written_as_json_without_what_is_none_by_default() -> None:
    assert WHOLE.to_json(VALUE) == WRITTEN
    assert json.loads(WHOLE.write(VALUE)) == WRITTEN
    assert " " not in WHOLE.write(VALUE)


def test_what_was_written_is_read_as_the_same_value_of_the_same_types() -> None:
    found = WHOLE.read(WHOLE.write(VALUE))
    assert found == VALUE
    assert [type(found.names), type(found.row), type(found.group)] == [tuple, tuple, frozenset]
    assert WHOLE.from_json({**WRITTEN, "absent": {"type": "Inner", "count": 4}}).absent == Inner(4)
    assert WHOLE.from_json({**WRITTEN, "absent": None}) == VALUE
    known = replace(VALUE, unknown=Inner(4), absent=Inner(5))
    assert WHOLE.read(WHOLE.write(known)) == known
    assert WHOLE.to_json(known)["unknown"] == {"count": 4, "note": ""}


def test_a_whole_number_is_read_as_a_float_where_one_is_expected() -> None:
    found = WHOLE.from_json({**WRITTEN, "real": 3}).real
    assert (type(found), found) == (float, 3.0)


def test_fields_with_a_default_may_be_missing_and_a_few_unknown_ones_are_ignored() -> None:
    assert SMALL.from_json({"count": 1, **{f"new-{at}": [1, 2] for at in range(20)}}) == Inner(1)
    assert WHOLE.from_json({name: one for name, one in WRITTEN.items() if name != "later"}) == VALUE


MISFITS: dict[str, list[Any]] = {
    "whole": ["7", True, 1.0, None, 10**20, -(10**30)],
    "real": [math.nan, True],
    "text": [7, "x" * 65537],
    "flag": [1, {"a": 1}],
    "color": ["green", ["red"], "x" * 5000],
    "names": [{"a": 1}, ["a"] * 1025],
    "names[1]": [["a", 1]],
    "row": [[1], [1, "x", 2], "1x"],
    "row[1]": [[1, 2]],
    "group": [["a", "b", "c"]],
    "group[1]": [["a", "bcd"]],
    "inner": [[], None, {"count": 1, **{f"new-{at}": at for at in range(40)}}],
    "inner.count": [{}, {"count": 9}, {"count": -1}],
    "inner.note": [{"count": 1, "note": "long"}],
    "either": [[], None],
    "either.type": [{"count": 1}, {"type": "Whole"}, {"type": 7}, {"type": ["Inner"]}],
    "either.Other.seconds": [{"type": "Other", "seconds": -1}, {"type": "Other", "seconds": 10**400}],
    "parts": [[{"count": 1}] * 3],
    "parts[1].count": [[{"count": 1}, {}]],
    "unknown.count": [{"count": "x"}],
    "tree": [
        *([1, 2, 3, 4, 5, 6], {"a": 1, "b": 2, "c": 3}, [[[1]]], {"a": {"b": {}}, "c": {"d": 1}}),
        *(["abcde"], {"abcde": 1}),
    ],
}


@pytest.mark.parametrize(
    ("place", "value"), [(place, one) for place, some in MISFITS.items() for one in some]
)
def test_what_does_not_fit_is_refused_with_its_place_and_limit(place: str, value: Any) -> None:
    field = re.split(r"[.\[]", place)[0]
    with pytest.raises(Misfit) as error:
        WHOLE.from_json({**WRITTEN, field: value})
    assert error.value.place == place
    assert error.value.found
    assert error.value.limit
    assert place in str(error.value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("whole", 1 << 53),
        ("whole", -(1 << 53)),
        ("real", 1e15),
        ("real", -1e15),
        ("text", "x" * 65536),
        ("names", ["a"] * 1024),
        ("names", []),
        ("group", ["ab", "cd"]),
        ("inner", {"count": 0, "note": "abc"}),
        ("inner", {"count": 8}),
        ("either", {"type": "Other", "seconds": 0}),
        ("either", {"type": "Other", "seconds": math.inf}),
        ("parts", [{"count": 1}, {"count": 2}]),
        ("tree", [1, 2, 3, 4, 5]),
        ("tree", [[1], "abcd"]),
        ("tree", {"abcd": None}),
        ("tree", 1.5),
    ],
)
def test_what_just_fits_is_taken(field: str, value: Any) -> None:
    taken = WHOLE.from_json({**WRITTEN, field: value})
    assert taken != VALUE
    assert WHOLE.read(WHOLE.write(taken)) == taken


@pytest.mark.parametrize("found", [{"type": "Inner"}, {"type": "Inner", "count": 9}])
def test_a_message_that_does_not_fit_is_refused_by_its_class(found: Any) -> None:
    with pytest.raises(MessageError, match=r"Inner\.count"):
        PARTS.from_json(found)


@pytest.mark.parametrize("found", [b"[]", b"[" + b"x" * 5000])
def test_what_is_no_object_is_refused(found: bytes) -> None:
    with pytest.raises(MessageError) as error:
        PARTS.read(found)
    assert len(str(error.value)) < 200


def test_a_message_says_which_one_of_several_it_is_and_a_single_one_does_not() -> None:
    assert PARTS.to_json(Inner(1)) == {"type": "Inner", "count": 1, "note": ""}
    assert PARTS.read(PARTS.write(Other(1.0))) == Other(1.0)
    assert SMALL.to_json(Inner(1)) == {"count": 1, "note": ""}


@dataclass(frozen=True)
class Numbers:
    count: Count = 0
    generation: Generation = 0
    rank: Rank = -1
    ranks: Ranks = 0
    port: Port = 0
    exit_code: ExitCode = 0
    signum: Signum = 0


@pytest.mark.parametrize(
    ("field", "least", "most", "too_much"),
    [
        ("count", 0, 10**12, 1 << 60),
        ("generation", 0, 10**6, 1 << 40),
        ("rank", -1, 100_000, 10**7),
        ("ranks", 0, 100_000, 10**7),
        ("port", -65535, 65535, 65536),
        ("exit_code", -(1 << 31), (1 << 31) - 1, 1 << 40),
        ("signum", 0, 127, 129),
    ],
)
def test_numbers_are_bounded_by_what_they_stand_for(field: str, least: int, most: int, too_much: int) -> None:
    codec: Codec[Numbers] = Codec(Numbers)
    for value in (least, most):
        assert getattr(codec.from_json({field: value}), field) == value
    for value in (too_much, -too_much, min(least, 0) - 1 if field != "exit_code" else -too_much):
        with pytest.raises(MessageError, match=f"{field}.*{value}"):
            codec.from_json({field: value})


@dataclass(frozen=True)
class Agents:
    agents: Identities
    name: Name
    incarnation: Incarnation


def test_the_identity_of_an_agent_fits_whatever_its_name_and_incarnation_are() -> None:
    codec: Codec[Agents] = Codec(Agents)
    name, incarnation = "x" * 256, "y" * 64
    one = Agents(frozenset({agent_id(name, incarnation)}), name, incarnation)
    assert codec.read(codec.write(one)) == one
    longer = codec.to_json(replace(one, agents=frozenset({"z" * 322})))
    with pytest.raises(MessageError, match="agents"):
        codec.from_json(longer)
