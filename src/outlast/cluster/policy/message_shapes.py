"""How large each field of a message may be; see :mod:`outlast.cluster.policy.messages` for what messages say.

A peer that proved to know the token is believed in what it says, not in how much of it. A message that is
not of its shape is refused as a whole, before anything of it is read.

What a JSON value from another process may be: its type and how large it is, as data.

A shape says what a value is and bounds it; :func:`misfit` finds the first place where a value is something
else. A table of shapes is the whole of what a reader accepts, so no reader checks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 60  # characters of a value that a message quotes


@dataclass(frozen=True)
class Misfit:
    """Where a value is not of its shape.

    Args:
        place: the field, as a path.
        found: what it is, shortened.
        limit: what it may be.
    """

    place: str
    found: str
    limit: str

    def __str__(self) -> str:
        return f"field {self.place} is {self.found}, expected {self.limit}"


@dataclass(frozen=True)
class Text:
    """A text of so many characters at most."""

    most: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, str):
            return _wrong(value, place, f"a text of at most {self.most} characters")
        if len(value) <= self.most:
            return None
        return Misfit(place, f"a text of {len(value)} characters", f"at most {self.most}")


@dataclass(frozen=True)
class Whole:
    """A whole number within two others."""

    least: int
    most: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        fits = type(value) is int and self.least <= value <= self.most
        return None if fits else _wrong(value, place, f"a whole number from {self.least} to {self.most}")


@dataclass(frozen=True)
class Real:
    """A number whose absolute value is not above another one; ``endless``: or infinity."""

    most: float
    endless: bool = False

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        most = math.inf if self.endless and value == math.inf else self.most
        fits = type(value) in (int, float) and abs(value) <= most
        return None if fits else _wrong(value, place, f"a number from {-self.most:g} to {self.most:g}")


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        return None if isinstance(value, bool) else _wrong(value, place, "true or false")


@dataclass(frozen=True)
class OrNull:
    """A value of a shape, or null."""

    shape: Shape

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        return None if value is None else self.shape.misfit(value, place)


@dataclass(frozen=True)
class Several:
    """A list of values of one shape, so many at most."""

    shape: Shape
    most: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, (list, tuple)):
            return _wrong(value, place, f"a list of at most {self.most} entries")
        if len(value) > self.most:
            return Misfit(place, f"a list of {len(value)} entries", f"at most {self.most}")
        found = (self.shape.misfit(one, f"{place}[{at}]") for at, one in enumerate(value))
        return next((one for one in found if one is not None), None)


@dataclass(frozen=True)
class Row:
    """A list with a shape for each of its values."""

    shapes: tuple[Shape, ...]

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, (list, tuple)) or len(value) != len(self.shapes):
            return _wrong(value, place, f"a list of {len(self.shapes)} values")
        found = (one.misfit(value[at], f"{place}[{at}]") for at, one in enumerate(self.shapes))
        return next((one for one in found if one is not None), None)


@dataclass(frozen=True)
class Table:
    """An object with a shape for each field that is read; of others there may be a few, which are not read.

    Args:
        fields: by name.
        optional: names of those that may be missing.
        others: how many more there may be: a newer version may say more.
    """

    fields: Mapping[str, Shape]
    optional: frozenset[str] = frozenset()
    others: int = 32

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, dict):
            return _wrong(value, place, "an object")
        if len(value) > len(self.fields) + self.others:
            return Misfit(place, f"an object of {len(value)} fields", f"at most {len(self.fields)}")
        for name, shape in self.fields.items():
            inside = f"{place}.{name}" if place else name
            if name not in value:
                if name not in self.optional:
                    return Misfit(inside, "missing", "a value")
                continue
            found = shape.misfit(value[name], inside)
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class Cases:
    """An object of which one field says what another one holds."""

    by: str
    inside: str
    cases: Mapping[str, Table] = field(repr=False)

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        if not isinstance(value, dict):
            return _wrong(value, place, "an object")
        case = value.get(self.by)
        if not isinstance(case, str) or case not in self.cases:
            return _wrong(case, f"{place}.{self.by}", f"one of {', '.join(self.cases)}")
        return self.cases[case].misfit(value.get(self.inside), f"{place}.{self.inside}")


@dataclass(frozen=True)
class Tree:
    """Any JSON value of so many values in all, none of which is deeper or longer than allowed."""

    values: int
    depth: int
    text: int

    def misfit(self, value: Any, place: str) -> Misfit | None:
        """Return where the value does not fit."""
        level: list[Any] = [value]
        seen = 0
        for _ in range(self.depth):
            seen += len(level)
            if seen > self.values:
                return Misfit(place, f"of more than {self.values} values", f"at most {self.values}")
            for one in level:
                if isinstance(one, str) and len(one) > self.text:
                    return Text(self.text).misfit(one, place)
            level = [inner for one in level for inner in _inside(one)]
            if not level:
                return None
        return Misfit(place, f"nested deeper than {self.depth}", f"at most {self.depth}")


Shape = Text | Whole | Real | Flag | OrNull | Several | Row | Table | Cases | Tree


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, tuple)) else []


def _wrong(value: Any, place: str, limit: str) -> Misfit:
    if isinstance(value, (str, list, tuple, dict)):
        return Misfit(place, f"a {type(value).__name__} of {len(value)}", limit)
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 80 else "a number of many digits"
    return Misfit(place, text[:_SHOWN], limit)


MOST_NODES = 20_000
MOST_RANKS = 1 << 20
_AGENT = Text(320)  # a node's name and its life
_NAME = Text(256)
_ADDRESS = Text(512)
_ID = Text(512)
_SENTENCE = Text(1 << 16)
_COUNT = Whole(0, 1 << 53)
_GENERATION = Whole(0, 1 << 31)
_STEP = Whole(-1, 1 << 53)
_RANK = Whole(-1, MOST_RANKS)
_PORT = Whole(-65535, 65535)  # negative: rank 0 serves the store there
_SECONDS = Real(1e15)
_KEY = Row((_COUNT, _COUNT))
_AGENTS = Several(_AGENT, MOST_NODES)
_VOTERS = Several(_AGENT, 64)
_MARKS = Several(Text(1024), 1024)

_OFFER: dict[str, Shape] = {
    "store": _PORT,
    "able": OrNull(Flag()),
    "patience": Real(1e15, endless=True),
    "serial": _COUNT,
}
_MEMBER = Table(
    {
        "name": _NAME,
        "address": _ADDRESS,
        "slots": Whole(0, MOST_RANKS),
        "run_id": _ID,
        "version": Text(128),
        "options": Text(8192),
        "incarnation": Text(64),
        "group": _NAME,
        "domains": Several(Row((_NAME, _NAME)), 32),
        "order": Whole(-1, 1 << 31),
        "node_rank": Whole(-1, 1 << 31),
        "endpoint": _ADDRESS,
        "unfit": _SENTENCE,
    },
    optional=frozenset({"incarnation", "group", "order", "node_rank", "endpoint", "unfit"}),
)
_RECORD = Table(
    {
        "term": _COUNT,
        "version": _COUNT,
        "generation": _GENERATION,
        "active": _AGENTS,
        "agents": _AGENTS,
        "plan": Text(4 << 20),
        "quorums": Several(_VOTERS, 2),
    }
)
_ENDING: dict[str, Shape] = {"exit_code": Whole(-(1 << 31), 1 << 31), "reason": _SENTENCE}
_ASSIGNMENT: dict[str, Shape] = {
    **_ENDING,
    "generation": _GENERATION,
    "seated": Flag(),
    "first_rank": _RANK,
    "node_rank": Whole(-1, MOST_NODES),
    "nodes": Whole(0, MOST_NODES),
    "world_size": Whole(0, MOST_RANKS),
    "host": _ADDRESS,
    "port": _PORT,
    "master": Flag(),
    "avoid": _MARKS,
    "state": Text(64),
    "reenter": Flag(),
    "hung_again": Flag(),
}
PLAN = Table(
    {
        "membership": Table(
            {
                "generation": _GENERATION,
                "order": Several(_NAME, MOST_NODES),
                "nodes": Several(Table({"member": _MEMBER, "role": Text(64), "why": _SENTENCE}), MOST_NODES),
                "forming": OrNull(Row((_GENERATION, _SENTENCE))),
            }
        ),
        "job": Tree(values=200_000, depth=24, text=1 << 16),
        "seats": Several(Row((_NAME, _ADDRESS, _RANK, Whole(0, MOST_RANKS))), MOST_NODES),
        "reason": _SENTENCE,
        "why": _SENTENCE,
        "hung_again": Flag(),
        "state": Text(64),
        "avoid": _MARKS,
        "port": _PORT,
        "reenter": Flag(),
        "end": OrNull(Table(_ENDING)),
    }
)

_COMMITTED = Table({"step": _STEP, "name": _NAME})
_EVENT = Cases(
    "what",
    "values",
    {
        "AllStarted": Table({"generation": _GENERATION}),
        "CommitSeen": _COMMITTED,
        "CopyGone": Table({"name": _NAME}),
        "CopySetAside": Table({"name": _NAME, "reason": _SENTENCE}),
        "Fault": Table(
            {
                "kind": Text(64),
                "node": _NAME,
                "rank": _RANK,
                "generation": _GENERATION,
                "step": _STEP,
                "reason": _SENTENCE,
                "signature": _SENTENCE,
                "exit_code": OrNull(Whole(-(1 << 31), 1 << 31)),
                "evidence": Several(Row((_SENTENCE, _SENTENCE)), 64),
                "since": _SECONDS,
                "reenters": OrNull(Flag()),
                "agreed": OrNull(_STEP),
                "counted": Flag(),
                "trained": _SECONDS,
            },
            optional=frozenset({"exit_code", "since", "reenters", "agreed", "counted", "trained"}),
        ),
        "LoadSeen": Table({"step": _STEP, "name": _NAME, "places": _MARKS, "digest": Text(256)}),
        "OwnCheckpoint": Table({"step": _STEP}),
        "StepsDone": Table(
            {"step": _STEP, "counted": Flag(), "began": _STEP}, frozenset({"counted", "began"})
        ),
        "StopRequested": Table({"signum": Whole(0, 128)}),
        "WorkerFinished": Table({"rank": _RANK, "generation": _GENERATION}),
    },
)
_GROUP = Table(
    {
        "group": Text(1024),
        "ranks": Several(Row((_RANK, Whole(1, MOST_RANKS), Whole(1, MOST_RANKS))), 4096),
        "entered": _COUNT,
        "pending": _COUNT,
        "operations": Several(Row((_COUNT, Text(1024))), 64),
    }
)
_SEEN = Table(
    {
        "rank": Whole(0, MOST_RANKS),
        "state": Text(8),
        "stack": Several(Text(4096), 16),
        "step": _STEP,
        "section": Text(1024),
        "silent": _SECONDS,
        "gpu": Flag(),
        "groups": OrNull(Several(_GROUP, 64)),
    }
)

LETTERS: Mapping[str, Table] = {
    "ping": Table(
        {
            "term": _COUNT,
            "sent": _SECONDS,
            "key": _KEY,
            "committed": Flag(),
            "granted": _SECONDS,
            "incarnation": Text(64),
            "echo": _SECONDS,
            "taken": _COUNT,
            "session": _AGENT,
            "record": _RECORD,
            "yours": OrNull(Table(_ASSIGNMENT, frozenset(_ASSIGNMENT))),
        },
        optional=frozenset({"record", "yours"}),
    ),
    "report": Table(
        {
            "term": _COUNT,
            "key": _KEY,
            "generation": _GENERATION,
            "incarnation": Text(64),
            "sent": _SECONDS,
            "echo": _SECONDS,
            "session": _AGENT,
            **_OFFER,
        }
    ),
    "vote": Table(
        {"term": _COUNT, "asked": _COUNT, "pre_vote": Flag(), "granted": Flag(), "session": _AGENT}
    ),
    "vote-request": Table({"term": _COUNT, "key": _KEY, "pre_vote": Flag(), "session": _AGENT}),
    "join": Table(
        {
            "member": _MEMBER,
            "generation": _GENERATION,
            "after": _GENERATION,
            "session": _AGENT,
            "asked": Whole(0, 128),
            **_OFFER,
        },
        optional=frozenset({"asked", "session", *_OFFER}),  # another version is told which one it is
    ),
    "refused": Table({"reason": _SENTENCE, "excluded": Flag()}),
    "elsewhere": Table({"address": _ADDRESS}),
    "taken-in": Table({}),
    "here-is": Table({"run_id": _ID, "generation": _GENERATION, "session": _AGENT, "address": _ADDRESS}),
    "anew": Table({"address": _ADDRESS, "fresh": _AGENTS}),
    "halt": Table({"generation": _GENERATION, "reason": _SENTENCE, "reenter": Flag()}),
    "here": Table({"generation": _GENERATION, **_OFFER}),
    "said": Table({"after": _COUNT, "events": Several(Row((_COUNT, _GENERATION, _EVENT)), 64)}),
    "seen": Table({"generation": _GENERATION, "look_in": Real(3600.0), "ranks": Several(_SEEN, 4096)}),
    "blamed": Table(
        {
            "generation": _GENERATION,
            "node": _NAME,
            "rank": _RANK,
            "reason": _SENTENCE,
            "waiting": Several(_RANK, 64),
            "basis": Text(256),
            "session": _AGENT,
        }
    ),
    "farewell": Table({"session": _AGENT}),
    "lacking": Table({}),
}


def misfit(message: Mapping[str, Any]) -> Misfit | None:
    """Return where a message is not of the shape of its kind; None: it is."""
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in LETTERS:
        found = repr(kind)[:60] if isinstance(kind, (str, int, float)) else type(kind).__name__
        return Misfit("kind", found, "a kind of message that this version knows")
    return LETTERS[kind].misfit(message, "")
