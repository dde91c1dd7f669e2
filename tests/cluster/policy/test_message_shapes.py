"""Each field that an agent sends is bounded where the message is read; what is beyond is refused by name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outlast.cluster.policy.events import Start
from outlast.cluster.policy.members import JobSpec, Member
from outlast.cluster.policy.message_shapes import (
    LETTERS,
    PLAN,
    Cases,
    Flag,
    OrNull,
    Real,
    Row,
    Several,
    Shape,
    Table,
    Text,
    Tree,
    Whole,
    misfit,
)
from outlast.cluster.policy.messages import _EVENTS, MessageError, plan_from_text
from outlast.cluster.policy.node import ClusterNode
from outlast.config import FaultTolerance

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _cases_of(shape: Cases) -> st.SearchStrategy[Any]:
    return st.one_of(
        values(table).map(lambda value, name=name: {shape.by: name, shape.inside: value})
        for name, table in shape.cases.items()
    )


def _table_of(shape: Table) -> st.SearchStrategy[Any]:
    drawn = {name: values(one) for name, one in shape.fields.items()}
    needed = {name: one for name, one in drawn.items() if name not in shape.optional}
    return st.fixed_dictionaries(needed, optional={name: drawn[name] for name in shape.optional})


_VALUES: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    Text: lambda shape: st.text(max_size=min(shape.most, 5)),
    Whole: lambda shape: st.sampled_from([shape.least, shape.most]) | st.integers(shape.least, shape.most),
    Real: lambda shape: st.floats(-shape.most, shape.most) | st.integers(-10, 10),
    Flag: lambda _: st.booleans(),
    OrNull: lambda shape: st.none() | values(shape.shape),
    Several: lambda shape: st.lists(values(shape.shape), max_size=min(shape.most, 2)),
    Row: lambda shape: st.tuples(*map(values, shape.shapes)).map(list),
    Table: _table_of,
    Cases: _cases_of,
    Tree: lambda _: st.just({"some": [1, "x", None]}),
}


def values(shape: Shape) -> st.SearchStrategy[Any]:
    """Return what draws values of a shape, small ones."""
    return _VALUES[type(shape)](shape)


Wrong = Iterator[tuple[str, Any]]


def _beyond_or_null(shape: OrNull, value: Any, place: str) -> Wrong:
    for where, wrong in beyond(shape.shape, value, place) if value is not None else ():
        if wrong is not None:
            yield where, wrong


def _beyond_several(shape: Several, value: Any, place: str) -> Wrong:
    yield place, [0] * (shape.most + 1)
    yield place, {}
    for at, one in enumerate(value):
        for where, wrong in beyond(shape.shape, one, f"{place}[{at}]"):
            yield where, [*value[:at], wrong, *value[at + 1 :]]


def _beyond_row(shape: Row, value: Any, place: str) -> Wrong:
    yield place, [0] * (len(shape.shapes) + 1)
    for at, one in enumerate(shape.shapes):
        for where, wrong in beyond(one, value[at], f"{place}[{at}]"):
            yield where, [*value[:at], wrong, *value[at + 1 :]]


def _beyond_table(shape: Table, value: Any, place: str) -> Wrong:
    for name in shape.fields.keys() & value.keys():
        inside = f"{place}.{name}" if place else name
        for where, wrong in beyond(shape.fields[name], value[name], inside):
            yield where, {**value, name: wrong}


def _beyond_cases(shape: Cases, value: Any, place: str) -> Wrong:
    yield f"{place}.{shape.by}", {shape.by: "Nothing", shape.inside: {}}
    table = shape.cases[value[shape.by]]
    for where, wrong in beyond(table, value[shape.inside], f"{place}.{shape.inside}"):
        yield where, {**value, shape.inside: wrong}


def _each(*wrong: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda _: wrong


_LEAVES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Text: lambda shape: ("x" * (shape.most + 1), 7),
    Whole: lambda shape: (shape.least - 1, shape.most + 1, 10**4000, float(shape.least), True),
    Real: lambda shape: (
        *(2 * shape.most, -2 * shape.most, math.nan, -math.inf, "1"),
        *(() if shape.endless else (math.inf,)),
    ),
    Flag: _each(1, "true", None),
    Tree: lambda shape: (
        [0] * (shape.values + 1),
        "x" * (shape.text + 1),
        json.loads("[" * (shape.depth + 1) + "]" * (shape.depth + 1)),
    ),
}
_INSIDE: dict[type, Callable[[Any, Any, str], Wrong]] = {
    OrNull: _beyond_or_null,
    Several: _beyond_several,
    Row: _beyond_row,
    Table: _beyond_table,
    Cases: _beyond_cases,
}


def beyond(shape: Shape, value: Any, place: str) -> Wrong:
    """Yield the place of each bound of a shape, and the value with one thing too much there."""
    if type(shape) in _INSIDE:
        return _INSIDE[type(shape)](shape, value, place)
    return ((place, wrong) for wrong in _LEAVES[type(shape)](shape))


def few(examples: int) -> settings:
    """Return settings for so many examples, which are told as they are: to shrink them takes minutes."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(
        max_examples=examples, deadline=None, phases=phases, suppress_health_check=[HealthCheck.too_slow]
    )


def cluster_node(leads: bool = True) -> ClusterNode:
    """Return an agent that has founded a job and coordinates it, or one that looks for whoever does."""
    me = Member("n0", "n0:1", 1, "run", "1", "-", incarnation="1")
    found = ClusterNode(me, JobSpec("run", "1", "-", 1, 1, 2), FaultTolerance(), Start(leads), (990.0, 0.0))
    for tenth in range(100):
        found.tick(990.0 + tenth / 10)
    assert (found.leader_state is not None) == leads
    return found


@pytest.mark.parametrize("kind", LETTERS)
@given(data=st.data())
@few(8)
def test_what_fits_is_taken_and_one_thing_too_much_is_named_with_its_limit(
    kind: str, data: st.DataObject
) -> None:
    message = data.draw(values(LETTERS[kind]))
    assert misfit({**message, "kind": kind}) is None
    for place, wrong in beyond(LETTERS[kind], message, ""):
        found = misfit({**wrong, "kind": kind})
        assert found is not None, place
        assert found.place == place
        assert found.found
        assert found.limit
        assert len(str(found)) < 600, "what is refused is not quoted at length"


@pytest.mark.parametrize("kind", LETTERS)
@given(data=st.data())
@few(40)
def test_whatever_a_peer_writes_is_taken_or_refused_and_breaks_nothing(
    kind: str, data: st.DataObject
) -> None:
    ours = cluster_node(data.draw(st.booleans()))
    message = data.draw(values(LETTERS[kind]))
    if message:
        for name in data.draw(st.lists(st.sampled_from(sorted(message)), max_size=2)):
            message[name] = data.draw(JUNK)
    with contextlib.suppress(MessageError):
        ours.handle("n1#1", {**message, "kind": kind}, 1000.1)
    ours.tick(1000.5)


@given(JUNK)
@few(50)
def test_junk_is_no_message(junk: Any) -> None:
    with pytest.raises(MessageError, match=r"a message .* of n1#1 was refused: field kind is"):
        cluster_node().handle("n1#1", {"kind": junk, "more": junk}, 1000.1)


def test_the_refusal_names_field_found_and_limit() -> None:
    with pytest.raises(MessageError) as error:
        cluster_node().handle("n1#1", {"kind": "elsewhere", "address": "x" * 5000}, 1000.1)
    assert str(error.value) == (
        "a message 'elsewhere' of n1#1 was refused:"
        " field address is a text of 5000 characters, expected at most 512"
    )


def test_every_event_and_every_field_of_it_has_a_bound() -> None:
    said = LETTERS["said"].fields["events"]
    assert isinstance(said, Several)
    assert isinstance(said.shape, Row)
    cases = said.shape.shapes[2]
    assert isinstance(cases, Cases)
    assert cases.cases.keys() == _EVENTS.keys()
    for name, kind in _EVENTS.items():
        assert cases.cases[name].fields.keys() == {one.name for one in fields(kind)}, name


@pytest.mark.parametrize("text", ["", "[]", "7", "{" * 10_000, "[" * 200_000, '{"job": {}}'])
def test_a_plan_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MessageError, match="a plan was refused"):
        plan_from_text(text)


@given(values(PLAN))
@few(5)
def test_a_plan_is_bounded_in_every_field(plan: dict[str, Any]) -> None:
    assert PLAN.misfit(plan, "") is None
    for place, wrong in beyond(PLAN, plan, ""):
        found = PLAN.misfit(wrong, "")
        assert found is not None, place
        assert found.place == place


def test_groups_that_are_short_to_write_and_huge_to_hold_are_refused() -> None:
    group = {"group": "0", "entered": 1, "pending": 1, "operations": []}
    many = [[at, 1 << 20, 1] for at in range(4)]
    rank = {"rank": 0, "state": "S", "stack": [], "step": 0, "section": "", "silent": 0.0, "gpu": False}
    message = {"generation": 0, "look_in": 1.0, "ranks": [{**rank, "groups": [{**group, "ranks": many}]}]}
    assert misfit({"kind": "seen", **message}) is None
    with pytest.raises(MessageError, match="more than 1048576 ranks in all"):
        cluster_node().handle("n1#1", {"kind": "seen", **message}, 1000.1)
