"""The node ledger: faults, repairs and quarantine of nodes over all jobs of a site, and what follows.

Of the nodes of InfiniteHBD-Trace that came back from a fault, 22 % failed again within a day, and 10 % of the
nodes had 41 % of the faults. So a node that came back is in burn-in for a day, and one that fails often is in
quarantine until a person releases it. Neither takes a node out of a job: such a node gets ranks last, while
no other one is there.

Entries of several writers are merged: the same fault of a node within :data:`BURST` counts once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outlast.health.policy.fitting import Outage, SignSeen, history_at, merged
from outlast.health.policy.hazard import DAY, NodeHistory
from outlast.recovery.policy.events import FaultKind

BURST = 180.0  # seconds
BURN_IN = DAY
WEEK, WEEKLY = 7 * DAY, 2  # faults within a week that mean quarantine, whatever quarantine_after says
MONTH = 30 * DAY
_TEXT = 500


class BadEntry(ValueError):
    """A line is no entry; says what was expected."""


class What(str, Enum):
    """What an entry says."""

    FAULT = "fault"
    REPAIR = "repair"  # the node is in service again
    LIVED = "lived"  # it was lost, and is back with the same agent: the last loss counts no more
    SIGN = "sign"  # a sign of a device, for the calibration
    QUARANTINE = "quarantine"  # by a person
    RELEASE = "release"  # by a person; faults before it count no more


@dataclass(frozen=True)
class Entry:
    """One line.

    Args:
        time: wall seconds.
        node: its name.
        what: happened.
        kind: class of a fault, name of a sign.
        device: uuid; empty: the node, or not known.
        reason: in words.
    """

    time: float
    node: str
    what: What
    kind: str = ""
    device: str = ""
    reason: str = ""

    def to_line(self) -> str:
        """Return it as a line of JSON."""
        values = {**self.__dict__, "what": self.what.value, "reason": self.reason[:_TEXT]}
        return json.dumps({name: value for name, value in values.items() if value != ""})


def entry_of(line: str | bytes) -> Entry:
    """Return the entry that a line describes.

    Raises:
        BadEntry: it describes none.
    """
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"JSON expected: {error!s:.100}") from error
    if not isinstance(found, Mapping):
        raise BadEntry("an object expected")
    time, node = found.get("time"), found.get("node")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 1e15:
        raise BadEntry(f"time: seconds expected, {time!r:.60} found")
    if not isinstance(node, str) or not node:
        raise BadEntry(f"node: a name expected, {node!r:.60} found")
    texts = [found.get(name, "") for name in ("kind", "device", "reason")]
    if not all(isinstance(text, str) for text in texts):
        raise BadEntry("kind, device and reason: texts expected")
    what = next((one for one in What if one.value == found.get("what")), None)
    if what is None:
        known = ", ".join(one.value for one in What)
        raise BadEntry(f"what: one of {known} expected, {found.get('what')!r:.60} found")
    kind, device, reason = (text[:_TEXT] for text in texts)
    return Entry(float(time), node[:_TEXT], what, kind, device, reason)


class State(Enum):
    """How a node stands."""

    GOOD = "good"
    BURN_IN = "burn-in"
    QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Standing:
    """How a node stands, and why, in words."""

    state: State
    reason: str = ""

    @property
    def last_choice(self) -> str:
        """Why the node gets ranks last; empty: it does not."""
        return "" if self.state is State.GOOD else f"{self.state.value}: {self.reason}"


def in_quarantine(last_choice: str) -> bool:
    """Return whether :attr:`Standing.last_choice` speaks of quarantine."""
    return last_choice.startswith(f"{State.QUARANTINE.value}:")


def is_loss(entry: Entry) -> bool:
    """Return whether a node was lost."""
    return entry.what is What.FAULT and entry.kind == FaultKind.LOST.value


class Ledger:
    """What is known of all nodes.

    Args:
        entries: in any order.
        quarantine_after: faults within 30 days; 0: only a person puts a node into quarantine.
    """

    def __init__(self, entries: Iterable[Entry], quarantine_after: int) -> None:
        self._after = quarantine_after
        self._by_node: dict[str, list[Entry]] = {}
        latest: dict[str, float] = {}  # fault of each node that counts
        for one in sorted(entries, key=lambda entry: (entry.time, entry.what.value, entry.kind)):
            if one.what is What.FAULT:
                if one.time - latest.get(one.node, -math.inf) < BURST:
                    continue
                latest[one.node] = one.time
            mine = self._by_node.setdefault(one.node, [])
            mine.append(one)
            if one.what is What.LIVED:
                at = max((at for at, each in enumerate(mine) if is_loss(each)), default=-1)
                if at >= 0:
                    del mine[at]
                    latest.pop(one.node)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes, sorted."""
        return tuple(sorted(self._by_node))

    def entries(self, node: str) -> Sequence[Entry]:
        """Return the entries of a node by time."""
        return self._by_node.get(node, ())

    def needs_repair_entry(self, node: str) -> bool:
        """Say whether the last that is known of a node is a fault: it comes back now."""
        told = [one.what for one in self.entries(node) if one.what in (What.FAULT, What.REPAIR)]
        return told[-1:] == [What.FAULT]

    def standing(self, node: str, now: float) -> Standing:
        """Return how a node stands."""
        mine = [one for one in self.entries(node) if one.time <= now + BURST]
        by_hand = [one for one in mine if one.what in (What.QUARANTINE, What.RELEASE)]
        if by_hand and by_hand[-1].what is What.QUARANTINE:
            return Standing(State.QUARANTINE, by_hand[-1].reason or "by a person")
        released = by_hand[-1].time if by_hand else -math.inf
        faults = [one for one in mine if one.what is What.FAULT and one.time > released]
        for span, most, words in ((WEEK, WEEKLY, "7 days"), (MONTH, self._after, "30 days")):
            count = sum(now - one.time < span for one in faults)
            if self._after and count >= most:
                kinds = ", ".join(sorted({one.kind or "unknown" for one in faults}))
                return Standing(State.QUARANTINE, f"{count} faults in {words} ({kinds[:200]})")
        back = [one for one in mine if one.what in (What.FAULT, What.REPAIR) and one.time > released]
        if back and now - back[-1].time < BURN_IN:
            hours = max(0.0, now - back[-1].time) / 3600
            fault = next((one.kind for one in reversed(back) if one.what is What.FAULT), "") or "unknown"
            return Standing(State.BURN_IN, f"it came back {hours:.1f} h ago from a fault ({fault})")
        return Standing(State.GOOD)

    def history(self, node: str, now: float) -> NodeHistory:
        """Return the history of a node that is in service now."""
        outages = [one for one in merged(self.outages(node)).get(node, []) if one.start <= now]
        return history_at(outages, now) or NodeHistory(0.0, outages[-1].kind, len(outages))

    def outages(self, node: str) -> list[Outage]:
        """Return the faults of a node, each until the repair after it; without one, until itself."""
        found: list[Outage] = []
        for one in self.entries(node):
            if one.what is What.FAULT:
                found.append(Outage(node, one.time, one.time, one.kind))
            elif one.what is What.REPAIR and found:
                found[-1] = Outage(node, found[-1].start, one.time, found[-1].kind)
        return found

    def signs(self) -> list[SignSeen]:
        """Return the signs of all nodes."""
        return [
            SignSeen(node, one.time, one.kind)
            for node in self.nodes
            for one in self.entries(node)
            if one.what is What.SIGN
        ]
