"""What agents write to each other, as JSON objects, and back; each has a ``kind``.

====================  ==========================================================================
ping                  the leader: who runs what. The record is left out once the receiver has it;
                      who does not vote gets it without the plan, and its own assignment instead
report                an agent's answer, with the port of the store that it has ready
vote, vote-request    of an election
join                  an agent asks to be taken in
refused               it is not, and why
elsewhere             who asks to be taken in should ask there
here-is               a leader tells whoever founds a job anew that there is one already
anew                  whoever founds a job anew tells agents of the one before that its node has begun anew
halt                  a generation is over: end it, and answer
here                  the answer
said                  something happened on a node
seen                  what an agent saw of its ranks, of which some are silent for too long
blamed                whom a leader names for that, from what several agents saw
farewell              the job is over and every agent knows it: whoever could succeed the leader may end
lacking               a ping left out a record that its receiver does not have
====================  ==========================================================================

What happened on a node and has to reach the leader, each event once and in order, whatever
gets lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from outlast.cluster.policy.ballots import AppendEntries, AppendReply, Message, Record, Vote, VoteRequest
from outlast.cluster.policy.members import Member
from outlast.cluster.policy.message_shapes import PLAN
from outlast.errors import OutlastError
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    CopySetAside,
    Event,
    LoadSeen,
    OwnCheckpoint,
    StepsDone,
    StopRequested,
    WorkerFinished,
)

WireMessage = Mapping[str, Any]

_EVENTS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        AllStarted,
        CommitSeen,
        CopyGone,
        CopySetAside,
        Fault,
        LoadSeen,
        OwnCheckpoint,
        StepsDone,
        StopRequested,
        WorkerFinished,
    )
}


class MessageError(OutlastError):
    """A message is not what its kind says; it is not believed."""


def agent_id(name: str, incarnation: str) -> str:
    """Return what tells an agent from an earlier one of its node: who begins anew never voted before."""
    return f"{name}#{incarnation}"


def node_of(agent: str) -> str:
    """Return the name of an agent's node."""
    return agent.rpartition("#")[0]


def incarnation_of(agent: str) -> str:
    """Return an agent's life."""
    return agent.rpartition("#")[2]


@dataclass(frozen=True)
class Assignment:
    """What a generation means for one node.

    Args:
        generation: its number.
        seated: the node has ranks in it; else it is a spare, and the numbers of its ranks mean nothing.
        first_rank: of its ranks.
        node_rank: place among the nodes that have ranks.
        nodes: how many have.
        world_size: ranks of all of them.
        host, port: of the store where ranks meet.
        master: the node's own agent has that store ready.
        avoid: what ranks are told of single copies.
        state: which state they load.
        reason: of the generation.
        reenter: workers that can enter their function again are kept.
        hung_again: a hang that came back ended the generation before: the timeout that found it is doubled.
    """

    generation: int
    seated: bool = False
    first_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    world_size: int = 0
    host: str = ""
    port: int = 0
    master: bool = False
    avoid: tuple[str, ...] = ()
    state: str = "newest"
    reason: str = ""
    reenter: bool = False
    hung_again: bool = False


@dataclass(frozen=True)
class Ending:
    """The job is over."""

    exit_code: int
    reason: str


def plan_from_text(text: str) -> Mapping[str, Any]:
    """Return a plan that another agent wrote.

    Raises:
        LetterError: it is no JSON, or a field of it is larger than it may be.
    """
    try:
        plan: Mapping[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a plan was refused: it is no JSON ({str(error)[:100]})") from error
    wrong = PLAN.misfit(plan, "")
    if wrong is not None:
        raise MessageError(f"a plan was refused: {wrong}")
    return plan


def assignment(
    plan: Mapping[str, Any], generation: int, name: str, places: Mapping[str, int] | None = None
) -> Assignment | Ending | None:
    """Return what a plan means for a node; None: nothing was begun yet.

    Args:
        plan: the plan.
        generation: its number.
        name: of the node.
        places: of the nodes that have ranks, for who asks about many; None: they are looked for.
    """
    if plan["end"] is not None:
        return Ending(int(plan["end"]["exit_code"]), str(plan["end"]["reason"]))
    seats = plan["seats"]
    if not seats:
        return None
    reason = str(plan["why"] or plan["reason"])
    if places is None:
        places = {seat[0]: place for place, seat in enumerate(seats)}
    at = places.get(name, -1)
    if at < 0:
        return Assignment(generation, reason=reason)
    return Assignment(
        generation=generation,
        seated=True,
        first_rank=int(seats[at][2]),
        node_rank=at,
        nodes=len(seats),
        world_size=int(seats[-1][2]) + int(seats[-1][3]),
        host=str(seats[0][1]).rpartition(":")[0],
        port=int(plan["port"]),
        master=at == 0,
        avoid=tuple(map(str, plan["avoid"])),
        state=str(plan["state"]),
        reason=reason,
        reenter=bool(plan["reenter"]),
        hung_again=bool(plan["hung_again"]),
    )


def assignment_to_json(mine: Assignment | Ending | None) -> dict[str, Any] | None:
    """Return an assignment as JSON values."""
    return (
        None
        if mine is None
        else {**asdict(mine), **({} if isinstance(mine, Ending) else {"avoid": list(mine.avoid)})}
    )


def assignment_from_json(found: Mapping[str, Any] | None) -> Assignment | Ending | None:
    """Return an assignment.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if found is None:
        return None
    if "exit_code" in found:
        return Ending(int(found["exit_code"]), str(found["reason"]))
    return Assignment(**{**found, "avoid": tuple(map(str, found["avoid"]))})


def event_to_json(event: Event) -> dict[str, Any]:
    """Return something that happened, as JSON values."""
    values = asdict(event)
    if isinstance(event, Fault):
        values["kind"] = event.kind.value
    return {"what": type(event).__name__, "values": values}


def event_from_json(found: Any) -> Event:
    """Return what happened.

    Raises:
        LetterError: it is nothing that we know.
    """
    try:
        kind = _EVENTS[found["what"]]
        known = {spec.name for spec in fields(kind)}
        values = {name: value for name, value in found["values"].items() if name in known}
        if kind is Fault:
            values["kind"] = FaultKind(values["kind"])
            values["evidence"] = tuple((str(name), str(text)) for name, text in values["evidence"])
        if kind is LoadSeen:
            values["places"] = tuple(map(str, values["places"]))
        event: Event = kind(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"an event makes no sense ({error!r}); it is passed over") from error
    return event


def member_from_json(found: Any) -> Member:
    """Return what an agent says of its node.

    Raises:
        LetterError: it makes no sense.
    """
    try:
        domains = tuple((str(kind), str(name)) for kind, name in found["domains"])
        known = {
            spec.name for spec in fields(Member)
        }  # another version, which is refused by name, may say more
        return Member(**{key: found[key] for key in found if key in known} | {"domains": domains})
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a node says of itself what makes no sense ({error!r})") from error


def record_to_json(record: Record, reader: str = "") -> dict[str, Any]:
    """Return a record as JSON values.

    Args:
        record: the record.
        reader: an agent that does not vote, and gets what concerns it only; empty: the reader gets all.
    """
    whole = not reader
    return {
        "term": record.term,
        "version": record.version,
        "generation": record.generation,
        "active": sorted(record.active) if whole else sorted(record.active & {reader}),
        "agents": sorted(record.agents) if whole else [reader],
        "plan": record.plan if whole else "",
        "quorums": [sorted(voters) for voters in record.quorums],
    }


def record_from_json(found: Mapping[str, Any]) -> Record:
    """Return a record.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    return Record(
        int(found["term"]),
        int(found["version"]),
        int(found["generation"]),
        frozenset(map(str, found["active"])),
        frozenset(map(str, found["agents"])),
        str(found["plan"]),
        tuple(frozenset(map(str, voters)) for voters in found["quorums"]),
    )


def ballot_to_json(message: Message) -> dict[str, Any]:
    """Return a message of the election as JSON values; a ping's record is left out."""
    match message:
        case AppendEntries():
            return {
                "kind": "ping",
                "term": message.term,
                "sent": message.sent,
                "key": list(message.record.key),
                "committed": message.committed,
                "granted": message.granted,
                "incarnation": message.incarnation,
                "echo": max(message.echo, -1.0),
            }
        case AppendReply():
            values = asdict(message)
            return {"kind": "report", **values, "key": list(message.key)}
        case VoteRequest():
            return {"kind": "vote-request", **asdict(message), "key": list(message.key)}
        case Vote():
            return {"kind": "vote", **asdict(message)}


def ballot_from_json(message: WireMessage, sender: str, known: Record | None) -> Message | None:
    """Return a message of the election.

    Args:
        message: its JSON values.
        sender: who wrote it.
        known: the newest record that the reader has.

    Returns:
        None: it is a ping that left out a record which the reader does not have.

    Raises:
        LetterError: it makes no sense.
    """
    try:
        if message["kind"] == "ping":
            record = known
            if "record" in message:
                record = record_from_json(message["record"])
            if record is None or list(record.key) != message["key"]:
                return None
            return AppendEntries(
                sender,
                int(message["term"]),
                float(message["sent"]),
                record,
                bool(message["committed"]),
                float(message["granted"]),
                str(message["incarnation"]),
                float(message["echo"]),
            )
        if message["kind"] == "vote":
            return Vote(
                sender,
                int(message["term"]),
                int(message["asked"]),
                bool(message["pre_vote"]),
                bool(message["granted"]),
            )
        key = (int(message["key"][0]), int(message["key"][1]))
        if message["kind"] == "vote-request":
            return VoteRequest(sender, int(message["term"]), key, bool(message["pre_vote"]))
        return AppendReply(
            sender,
            int(message["term"]),
            key,
            int(message["generation"]),
            str(message["incarnation"]),
            float(message["sent"]),
            float(message["echo"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MessageError(f"a {message.get('kind')} of {sender} makes no sense ({error!r})") from error


_KEPT = 512
_AT_ONCE = 64


class EventQueue:
    """Keeps the events of the present generation: a successor of the leader is told all of them."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, Event]] = []  # number, generation, event
        self._numbered = self._told_until = 0

    def add(self, event: Event, generation: int) -> int:
        """Take an event; return the number of the one before it."""
        if isinstance(event, StepsDone):
            self._events = [one for one in self._events if not isinstance(one[2], StepsDone)]
        self._numbered += 1
        self._events.append((self._numbered, generation, event))
        del self._events[:-_KEPT]
        return self._numbered - 1

    def own_up(self, name: str, generation: int) -> None:
        """Say that a node has ended a generation that is in force still: who ordered it was succeeded."""
        if generation > 0:
            words = f"{name} has ended generation {generation} for a leader that was succeeded"
            fault = Fault(FaultKind.LOST, name, -1, generation, -1, words, f"{name} ended it")
            self.add(fault, generation)

    def clear(self) -> None:
        """Forget the events of a job that was left; a request to stop is for whichever is joined."""
        self._events = [one for one in self._events if isinstance(one[2], StopRequested)]

    @property
    def asked(self) -> int:
        """The first signal that asked this agent to stop; 0: none has."""
        return next((event.signum for _, _, event in self._events if isinstance(event, StopRequested)), 0)

    def late(self, taken: int) -> bool:
        """Say whether an event that was told before the last call has not been taken yet."""
        late = any(taken < number <= self._told_until for number, _, _ in self._events)
        self._told_until = self._numbered
        return late

    def since(self, generation: int) -> list[tuple[int, Event]]:
        """Return what happened in a generation and after it, each with the generation."""
        return [(one, event) for _, one, event in self._of(generation)]

    def _of(self, generation: int) -> list[tuple[int, int, Event]]:
        return [one for one in self._events if one[1] >= generation or isinstance(one[2], StopRequested)]

    def messages(self, taken: int, generation: int) -> Iterator[dict[str, Any]]:
        """Yield messages with the events after the last one that was taken.

        Args:
            taken: its number.
            generation: what happened before it is not told any more, but for a request to stop.
        """
        kept = self._of(generation)
        after = max((number for number, _, _ in kept if number <= taken), default=0)
        events = [one for one in kept if one[0] > taken]
        for at in range(0, len(events), _AT_ONCE):
            some = events[at : at + _AT_ONCE]
            said = [[number, one, event_to_json(event)] for number, one, event in some]
            yield {"kind": "said", "after": after, "events": said}
            after = some[-1][0]
