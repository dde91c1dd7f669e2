"""Each field that an agent sends is bounded where the message is read; what is beyond is refused by name."""

from __future__ import annotations

import contextlib
import json
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outlast.agreement.policy.nodes import proposal_received, proposal_sent, report_sent, status_received
from outlast.agreement.policy.steps import Proposal, Stage, Status, Want
from outlast.cluster.policy.codec import AtMost, Codec, MessageError, Misfit, Tree, Within
from outlast.cluster.policy.events import Start
from outlast.cluster.policy.messages import (
    MESSAGES,
    AppendEntries,
    AppendReply,
    Message,
    MessageReader,
    NodeStatus,
    Record,
    StepOrder,
    StepReport,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.cluster.policy.plan import PLANS, JobPlan, LatestPlan
from outlast.config import FaultToleranceOptions
from tests.cluster.builders import member, spec

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KINDS: tuple[type, ...] = get_args(Message)
DEFAULTS: dict[Any, Any] = {
    str: AtMost(1 << 16),
    tuple: AtMost(1024),
    frozenset: AtMost(1024),
    int: Within(-(1 << 53), 1 << 53),
    float: Within(-1e15, 1e15),
}


def parts(kind: Any) -> tuple[Any, Any]:
    """Return a type without its annotation, and its bound."""
    bare, bound = get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, None)
    return bare, bound or DEFAULTS.get(get_origin(bare) or bare)


def is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def is_row(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1] is not Ellipsis


def tagged(kind: Any) -> bool:
    """Say whether an object of a union says which class it is of."""
    return is_union(kind) and sum(one is not type(None) for one in get_args(kind)) > 1


def hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return what draws JSON values of a type, small ones."""
    bare, bound = parts(kind)
    if is_union(bare):
        return st.one_of([_case(one, tagged(bare)) for one in get_args(bare)])
    if is_row(bare):
        return st.tuples(*map(values, get_args(bare))).map(list)
    if get_origin(bare) in (tuple, frozenset):
        return st.lists(values(get_args(bare)[0]), max_size=min(bound.most, 2))
    if isinstance(bare, type) and is_dataclass(bare):
        return _objects(bare)
    if isinstance(bare, type) and issubclass(bare, Enum):
        return st.sampled_from([one.value for one in bare])
    return _LEAVES[bare](bound)


_LEAVES: dict[Any, Callable[[Any], st.SearchStrategy[Any]]] = {
    str: lambda bound: st.text(max_size=min(bound.most, 5)),
    int: lambda bound: st.sampled_from([bound.least, bound.most]) | st.integers(bound.least, bound.most),
    float: lambda bound: st.floats(bound.least, min(bound.most, 1e15)) | st.integers(0, 10),
    bool: lambda _: st.booleans(),
    Any: lambda _: st.just({"some": [1, "x", None]}),
}


def _case(kind: Any, named: bool) -> st.SearchStrategy[Any]:
    if kind is type(None):
        return st.none()
    return values(kind).map(lambda value: {"type": kind.__name__, **value} if named else value)


def _objects(kind: Any) -> st.SearchStrategy[Any]:
    drawn = {name: values(one) for name, one in hints_of(kind).items()}
    optional = {one.name for one in fields(kind) if (one.default, one.default_factory) != (MISSING, MISSING)}
    needed = {name: one for name, one in drawn.items() if name not in optional}
    return st.fixed_dictionaries(needed, optional={name: drawn[name] for name in optional})


Wrong = Iterator[tuple[str, Any]]


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def beyond(kind: Any, value: Any, place: str) -> Wrong:
    """Yield the place of each bound of a type, and the value with one thing too much there."""
    bare, bound = parts(kind)
    if is_union(bare):
        yield from _beyond_union(bare, value, place)
    elif is_row(bare):
        yield place, [*value, 0]
        yield from _beyond_entries(get_args(bare), value, place)
    elif get_origin(bare) in (tuple, frozenset):
        yield place, [0] * (bound.most + 1)
        yield place, {}
        yield from _beyond_entries([get_args(bare)[0]] * len(value), value, place)
    elif isinstance(bare, type) and is_dataclass(bare):
        for name, one in hints_of(bare).items():
            for where, wrong in beyond(one, value[name], _inside(place, name)) if name in value else ():
                yield where, {**value, name: wrong}
    else:
        yield from ((place, wrong) for wrong in _wrong(bare, bound))


def _beyond_union(bare: Any, value: Any, place: str) -> Wrong:
    if value is None:
        return
    rest = [one for one in get_args(bare) if one is not type(None)]
    if not tagged(bare):
        yield from ((where, wrong) for where, wrong in beyond(rest[0], value, place) if wrong is not None)
        return
    yield _inside(place, "type"), {**value, "type": "Nothing"}
    (one,) = (one for one in rest if one.__name__ == value["type"])
    yield from beyond(one, value, _inside(place, value["type"]))


def _beyond_entries(kinds: Any, value: list[Any], place: str) -> Wrong:
    for at, (kind, one) in enumerate(zip(kinds, value, strict=True)):
        for where, wrong in beyond(kind, one, f"{place}[{at}]"):
            yield where, [*value[:at], wrong, *value[at + 1 :]]


def _wrong(bare: Any, bound: Any) -> tuple[Any, ...]:
    if bare is str:
        return "x" * (bound.most + 1), 7, None
    if bare is int:
        return bound.least - 1, bound.most + 1, 10**4000, float(bound.least), True, None
    if bare is float:
        above = () if bound.most == math.inf else (2 * bound.most + 1, math.inf)
        return *above, 2 * bound.least - 1, math.nan, -math.inf, "1", True, None
    if bare is bool:
        return 1, "true", None
    if isinstance(bare, type) and issubclass(bare, Enum):
        return "nothing", 7, None
    assert isinstance(bound, Tree)
    deep = json.loads("[" * (bound.depth + 1) + "]" * (bound.depth + 1))
    return [0] * (bound.values + 1), "x" * (bound.text + 1), deep


def few(examples: int) -> settings:
    """Return settings for so many examples, which are told as they are: to shrink them takes minutes."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(
        max_examples=examples, deadline=None, phases=phases, suppress_health_check=[HealthCheck.too_slow]
    )


def cluster_node(leads: bool = True) -> ClusterNode:
    """Return an agent that has founded a job and leads it, or one that looks for the leader."""
    found = ClusterNode(member("n0"), spec(1, 2), FaultToleranceOptions(), Start(leads), (990.0, 0.0))
    for tenth in range(100):
        found.tick(990.0 + tenth / 10)
    assert (found.leader_state is not None) == leads
    return found


def refused(codec: Codec[Any], value: Any, place: str) -> None:
    with pytest.raises(Misfit) as error:
        codec.from_json(value)
    assert error.value.place == place
    assert error.value.found
    assert error.value.limit
    assert len(str(error.value)) < 600, "what is refused is not quoted at length"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few(8)
def test_what_fits_is_taken_and_one_thing_too_much_is_named_with_its_limit(
    kind: type, data: st.DataObject
) -> None:
    drawn = data.draw(values(kind))
    message = {"type": kind.__name__, **drawn}
    taken = MESSAGES.from_json(message)
    assert type(taken) is kind
    assert MESSAGES.read(MESSAGES.write(taken)) == taken
    for place, wrong in beyond(kind, drawn, kind.__name__):
        refused(MESSAGES, {"type": kind.__name__, **wrong}, place)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few(15)
def test_whatever_a_peer_writes_is_taken_or_refused_and_breaks_nothing(
    kind: type, data: st.DataObject
) -> None:
    ours = cluster_node(data.draw(st.booleans()))
    message = data.draw(values(kind))
    if message:
        for name in data.draw(st.lists(st.sampled_from(sorted(message)), max_size=2)):
            message[name] = data.draw(JUNK)
    with contextlib.suppress(MessageError):
        ours.handle("n1#1", MESSAGES.from_json({**message, "type": kind.__name__}), 1000.1)
    ours.tick(1000.5)


def _record(plan: str) -> Record:
    return Record(1, 1, 1, frozenset(), frozenset(), plan, (frozenset(),))


@pytest.mark.parametrize("text", ["", "[]", "7", "{" * 10_000, "[" * 200_000, '{"job": {}}'])
def test_a_plan_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MessageError, match="plan"):
        LatestPlan().of(_record(text))


@given(values(JobPlan))
@few(5)
def test_a_plan_is_bounded_in_every_field(plan: dict[str, Any]) -> None:
    taken = PLANS.from_json(plan)
    assert PLANS.read(PLANS.write(taken)) == taken
    for place, wrong in beyond(JobPlan, plan, ""):
        refused(PLANS, wrong, place)


def test_groups_that_are_short_to_write_and_huge_to_hold_are_refused() -> None:
    group = {"group": "0", "entered": 1, "pending": 1, "operations": []}
    many = [[at, 1 << 20, 1] for at in range(4)]
    rank = {"rank": 0, "state": "S", "stack": [], "step": 0, "section": "", "silent": 0.0, "gpu": False}
    message = {"generation": 0, "look_in": 1.0, "ranks": [{**rank, "groups": [{**group, "ranks": many}]}]}
    taken = MESSAGES.from_json({"type": "EvidenceReport", **message})
    with pytest.raises(MessageError, match="1048576"):
        cluster_node().handle("n1#1", taken, 1000.1)


def outcome(read: Callable[[], Message]) -> Message | str:
    try:
        return read()
    except MessageError as error:
        return str(error)


REPLIES = st.builds(
    AppendReply,
    st.integers(0, 2),
    st.just((1, 2)),
    st.integers(0, 2),
    st.sampled_from(["b", ',"sent":1', '"', "\\"]),
    st.builds(NodeStatus, st.integers(0, 1)),
    st.sampled_from(["", "n0#b"]),
    st.floats(-1e15, 1e15),
    st.floats(-1e15, 1e15),
)
TAILS = st.sampled_from(
    [
        b"",
        b"{}",
        b',"sent":',
        b',"sent":1}',
        b',"sent":1,"echo":nan}',
        b',"sent":1e99,"echo":1}',
        b',"sent":x}',
    ]
)


@given(st.lists(st.tuples(st.sampled_from("ab"), REPLIES, st.none() | TAILS), max_size=8))
@few(200)
def test_a_reader_gives_what_the_codec_gives_whatever_it_has_read_before(
    told: list[tuple[str, AppendReply, bytes | None]],
) -> None:
    reader = MessageReader()
    for sender, reply, tail in told:
        text = MESSAGES.write(reply).encode()
        if tail is not None:
            text = text.rpartition(b',"sent":')[0] + tail
        assert outcome(lambda: reader.read(sender, text)) == outcome(lambda: MESSAGES.read(text))  # noqa: B023


def test_a_reply_that_repeats_the_last_one_is_not_parsed_again() -> None:
    reader, reply = MessageReader(), AppendReply(1, (1, 2), 3, "b", sent=1.0, echo=0.5)
    first = reader.read("n1#b", MESSAGES.write(reply).encode())
    second = reader.read("n1#b", MESSAGES.write(replace(reply, sent=2.0)).encode())
    assert isinstance(first, AppendReply)
    assert second == replace(reply, sent=2.0)
    assert isinstance(second, AppendReply)
    assert second.status is first.status


def test_a_reader_takes_nothing_but_a_reply_for_a_reply_that_it_knows() -> None:
    """A message of another kind may end in the same two times."""
    written = MESSAGES.to_json(AppendEntries(1, 8.0, (1, 2), True, echo=7.0))
    times = {"sent": written.pop("sent"), "echo": written.pop("echo")}
    text = json.dumps({**written, **times}, separators=(",", ":")).encode()
    assert text.endswith(b',"sent":8.0,"echo":7.0}')
    reader = MessageReader()
    for _ in range(2):
        assert reader.read("n1#b", text) == AppendEntries(1, 8.0, (1, 2), True, echo=7.0)


def test_a_reader_begins_anew_with_more_senders_than_it_keeps() -> None:
    reader = MessageReader(most=2)

    def read(sender: str) -> NodeStatus:
        one = reader.read(sender, MESSAGES.write(AppendReply(1, (1, 2), 3, sender)).encode())
        assert isinstance(one, AppendReply)
        return one.status

    first = [read(sender) for sender in ("n1#b", "n2#b", "n3#b")]
    assert read("n1#b") is first[0]
    read("n4#b")
    assert read("n4#b") is read("n4#b")
    assert read("n1#b") is not first[0]


def test_a_report_that_says_nothing_of_saves_knows_of_none() -> None:
    written = {"type": "StepReport", "term": 1, "generation": 1, "serial": 1, "round": 1, "step": 5}
    report = MESSAGES.from_json(written)
    assert report == StepReport(1, 1, serial=1, round=1, step=5, seconds=(-1.0, -1.0, -1.0))


@pytest.mark.parametrize("late", [1e15 + 0.5, -1e15 - 0.5, math.inf, math.nan])
def test_a_reader_refuses_times_that_no_clock_has_also_in_a_reply_that_it_knows(late: float) -> None:
    reader, reply = MessageReader(), AppendReply(1, (1, 2), 3, "b", sent=1.0, echo=0.5)
    reader.read("n1#b", MESSAGES.write(reply).encode())
    for wrong in (replace(reply, sent=late), replace(reply, echo=late)):
        with pytest.raises(MessageError):
            reader.read("n1#b", MESSAGES.write(wrong).encode())


def test_slow_ranks_travel_with_a_proposal() -> None:
    said = Proposal(3, Stage.COMMITTED, 5, 17, Want.REBALANCE, slow=((2, 500), (9, 1)), before=((4, 7),))
    sent = proposal_sent(said, 7.0)
    assert sent is not None
    order = MESSAGES.read(MESSAGES.write(StepOrder(1, 2, "s", sent)))
    assert isinstance(order, StepOrder)
    assert order.said is not None
    assert proposal_received(order.said, 7.0) == said


def test_times_are_counted_from_when_a_message_is_sent() -> None:
    said = Proposal(3, Stage.COMMITTED, 1, 9, Want.STOP, 150.0, 160.0, {"local": 2.0})
    sent = proposal_sent(said, 100.0)
    assert sent is not None
    assert proposal_received(sent, 1000.0) == replace(said, ends=1050.0, limit=1060.0)
    status = Status("a", 1, 1, 8, 3, False, Want.STOP, 150.0, 160.0, {"memory": 0.0}, True)
    report = report_sent(status, said, (7, 1, "s"), 100.0)
    assert status_received("a", report, 1000.0) == replace(status, ends=1050.0, limit=1060.0)
