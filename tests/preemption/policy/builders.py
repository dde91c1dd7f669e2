"""A rank that is told things at times, and short names for its decisions, for all tests of the policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from outlast.config import PreemptionOptions
from outlast.preemption.policy import Decision, Event, Preempted, Signal, Voted

TIERS = {"global": 40.0, "local": 8.0, "memory": 0.5}
Turn = tuple[Event | None, float]  # nothing: a tick
ASK: Turn = (Signal(15), 0.0)
SAVE: tuple[Turn, ...] = (ASK, (Voted(4, 60.0, TIERS), 0.0))  # step 4, 60 s before the expected end


def rank(tiers: Mapping[str, float] = TIERS, lead: float = 0.0, **options: Any) -> Preempted:
    return Preempted(PreemptionOptions(**options), tiers, lead)


def decided(one: Preempted, *turns: Turn) -> tuple[Decision, ...]:
    """Return the decisions of the last turn."""
    found: tuple[Decision, ...] = ()
    for event, at in turns:
        found = one.tick(at) if event is None else one.handle(event, at)
    return found


def play(one: Preempted, *turns: Turn) -> list[str]:
    """Return the decisions of each turn in short."""
    return [short(decided(one, turn)) for turn in turns]


def short(decisions: Iterable[Decision]) -> str:
    """Return order, exit code, step and tier of each decision; "-": there is none."""
    return ", ".join(map(_one, decisions)) or "-"


def _one(one: Decision) -> str:
    order = one.order.value + (f"-{one.exit_code}" if one.exit_code else "")
    return " ".join(filter(None, (order, str(one.step) if one.step >= 0 else "", one.tier)))


def numbers(text: str) -> list[float]:
    """Return the numbers that a reason names, in their order; those with a unit "s" as well."""
    return [float(one) for one in re.findall(r"\b\d+(?:\.\d+)?(?=s?\b)", text)]
