"""How large each field of a letter may be; see :mod:`outlast.core.letters` for what letters say.

A peer that proved to know the token is believed in what it says, not in how much of it. A letter that is
not of its shape is refused as a whole, before anything of it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.core.shapes import (
    Cases,
    Flag,
    Misfit,
    OrNull,
    Real,
    Row,
    Several,
    Shape,
    Table,
    Text,
    Tree,
    Whole,
)

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
        "life": Text(64),
        "group": _NAME,
        "domains": Several(Row((_NAME, _NAME)), 32),
        "order": Whole(-1, 1 << 31),
        "node_rank": Whole(-1, 1 << 31),
        "endpoint": _ADDRESS,
        "unfit": _SENTENCE,
    },
    optional=frozenset({"life", "group", "order", "node_rank", "endpoint", "unfit"}),
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
            "life": Text(64),
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
            "life": Text(64),
            "sent": _SECONDS,
            "echo": _SECONDS,
            "session": _AGENT,
            **_OFFER,
        }
    ),
    "vote": Table({"term": _COUNT, "asked": _COUNT, "trial": Flag(), "granted": Flag(), "session": _AGENT}),
    "vote-request": Table({"term": _COUNT, "key": _KEY, "trial": Flag(), "session": _AGENT}),
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


def misfit(letter: Mapping[str, Any]) -> Misfit | None:
    """Return where a letter is not of the shape of its kind; None: it is."""
    kind = letter.get("kind")
    if not isinstance(kind, str) or kind not in LETTERS:
        found = repr(kind)[:60] if isinstance(kind, (str, int, float)) else type(kind).__name__
        return Misfit("kind", found, "a kind of letter that this version knows")
    return LETTERS[kind].misfit(letter, "")
