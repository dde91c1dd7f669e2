"""What another process may write, field by field, and what a refusal says."""

from __future__ import annotations

import json
import math
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
    """What a value may be one of."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    """A part; the note is a later version's."""

    count: Annotated[int, Within(0, 8)]
    note: Annotated[str, AtMost(3)] = ""


@dataclass(frozen=True)
class Other:
    """Another part."""

    seconds: Annotated[float, Within(0, math.inf)]


@dataclass(frozen=True)
class Whole:
    """One field of each type."""

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


INT, REAL = (
    "a whole number from -9007199254740992 to 9007199254740992",
    "a number from -1000000000000000.0 to",
)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("whole", "7", f"field whole is a str of 1, expected {INT}"),
        ("whole", True, f"field whole is True, expected {INT}"),
        ("whole", 1.0, f"field whole is 1.0, expected {INT}"),
        ("whole", None, f"field whole is None, expected {INT}"),
        ("whole", 10**20, f"field whole is 100000000000000000000, expected {INT}"),
        ("whole", -(10**30), f"field whole is a number of many digits, expected {INT}"),
        ("real", math.nan, f"field real is nan, expected {REAL} 1000000000000000.0"),
        ("real", True, f"field real is True, expected {REAL} 1000000000000000.0"),
        ("text", 7, "field text is 7, expected a text of at most 65536 characters"),
        ("text", "x" * 65537, "field text is a text of 65537 characters, expected at most 65536"),
        ("flag", 1, "field flag is 1, expected true or false"),
        ("flag", {"a": 1}, "field flag is a dict of 1, expected true or false"),
        ("color", "green", "field color is 'green', expected one of red, blue"),
        ("color", ["red"], "field color is list, expected one of red, blue"),
        ("names", {"a": 1}, "field names is a dict of 1, expected a list of at most 1024 entries"),
        ("names", ["a"] * 1025, "field names is a list of 1025 entries, expected at most 1024"),
        ("names", ["a", 1], "field names[1] is 1, expected a text of at most 65536 characters"),
        ("row", [1], "field row is a list of 1, expected a list of 2 values"),
        ("row", [1, "x", 2], "field row is a list of 3, expected a list of 2 values"),
        ("row", "1x", "field row is a str of 2, expected a list of 2 values"),
        ("row", [1, 2], "field row[1] is 2, expected a text of at most 65536 characters"),
        ("group", ["a", "b", "c"], "field group is a list of 3 entries, expected at most 2"),
        ("group", ["a", "bcd"], "field group[1] is a text of 3 characters, expected at most 2"),
        ("inner", [], "field inner is a list of 0, expected an object"),
        ("inner", None, "field inner is None, expected an object"),
        ("inner", {}, "field inner.count is missing, expected a value"),
        ("inner", {"count": 9}, "field inner.count is 9, expected a whole number from 0 to 8"),
        ("inner", {"count": -1}, "field inner.count is -1, expected a whole number from 0 to 8"),
        (
            "inner",
            {"count": 1, "note": "long"},
            "field inner.note is a text of 4 characters, expected at most 3",
        ),
        (
            "inner",
            {"count": 1, **{f"new-{at}": at for at in range(40)}},
            "field inner is an object of 41 fields, expected at most 2",
        ),
        ("either", [], "field either is a list of 0, expected an object"),
        ("either", None, "field either is None, expected an object"),
        ("either", {"count": 1}, "field either.type is NoneType, expected one of Inner, Other"),
        ("either", {"type": "Whole"}, "field either.type is 'Whole', expected one of Inner, Other"),
        ("either", {"type": 7}, "field either.type is 7, expected one of Inner, Other"),
        ("either", {"type": ["Inner"]}, "field either.type is list, expected one of Inner, Other"),
        (
            "either",
            {"type": "Other", "seconds": -1},
            "field either.Other.seconds is -1, expected a number from 0 to inf",
        ),
        (
            "either",
            {"type": "Other", "seconds": 10**400},
            "field either.Other.seconds is a number of many digits, expected a number from 0 to inf",
        ),
        ("parts", [{"count": 1}, {}], "field parts[1].count is missing, expected a value"),
        ("parts", [{"count": 1}] * 3, "field parts is a list of 3 entries, expected at most 2"),
        ("unknown", {"count": "x"}, "field unknown.count is a str of 1, expected a whole number from 0 to 8"),
        ("tree", [1, 2, 3, 4, 5, 6], "field tree is of more than 6 values, expected at most 6"),
        ("tree", {"a": 1, "b": 2, "c": 3}, "field tree is of more than 6 values, expected at most 6"),
        ("tree", [[[1]]], "field tree is nested deeper than 3, expected at most 3"),
        ("tree", {"a": {"b": {}}, "c": {"d": 1}}, "field tree is of more than 6 values, expected at most 6"),
        ("tree", ["abcde"], "field tree is a text of 5 characters, expected at most 4"),
        ("tree", {"abcde": 1}, "field tree is a text of 5 characters, expected at most 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_field_what_was_found_and_the_limit(
    field: str, value: Any, words: str
) -> None:
    with pytest.raises(MessageError) as error:
        WHOLE.from_json({**WRITTEN, field: value})
    assert str(error.value) == words


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


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "a list of 0, not an object"),
        ({"type": "Inner"}, "field Inner.count is missing, expected a value"),
        ({"type": "Inner", "count": 9}, "field Inner.count is 9, expected a whole number from 0 to 8"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_its_class(found: Any, words: str) -> None:
    with pytest.raises(MessageError) as error:
        PARTS.from_json(found)
    assert str(error.value) == words


def test_a_message_says_which_one_of_several_it_is_and_a_single_one_does_not() -> None:
    assert PARTS.to_json(Inner(1)) == {"type": "Inner", "count": 1, "note": ""}
    assert PARTS.read(PARTS.write(Other(1.0))) == Other(1.0)
    assert SMALL.to_json(Inner(1)) == {"count": 1, "note": ""}


def test_a_text_that_is_no_json_is_refused_with_a_short_reason() -> None:
    with pytest.raises(MessageError, match=r"^no JSON \(.+\)$") as error:
        SMALL.read(b"[" + b"x" * 5000)
    assert len(str(error.value)) < 200


def test_a_refusal_quotes_the_begin_of_what_was_found() -> None:
    with pytest.raises(MessageError) as error:
        WHOLE.from_json({**WRITTEN, "color": "x" * 5000})
    assert str(error.value).startswith("field color is 'xxxxxxxx")
    assert len(str(error.value)) < 200


@dataclass(frozen=True)
class Numbers:
    """What numbers stand for."""

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
        with pytest.raises(MessageError, match=f"field {field} is {value}"):
            codec.from_json({field: value})


@dataclass(frozen=True)
class Agents:
    """Agents, and one by its parts."""

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
