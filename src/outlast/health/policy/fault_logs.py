"""Faults of nodes out of the logs of a site: fault traces, event logs and ledgers, told apart by content.

- A fault trace is a JSON list of objects with ``node_id``, ``event_time`` in days, ``event_type``
  "fault_start" or "fault_end" and ``fault_type`` with a ``Class``, as InfiniteHBD-Trace has them.
- An event log of outlast (``events.jsonl``) tells of nodes that were lost, failing or unfit. Such a node is
  back when a run starts on it again.
- A ledger has a line for each fault and repair; see :mod:`outlast.health.policy.ledger`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outlast.health.policy.fitting import Outage, SignSeen
from outlast.health.policy.hazard import DAY
from outlast.health.policy.ledger import Ledger, entry_of
from outlast.observe.policy import codec
from outlast.recovery.policy.events import FaultKind, FaultSeen, Record, RunStarted

OF_NODES = (FaultKind.LOST.value, FaultKind.REFUSED.value, FaultKind.CORRUPT.value)
"""Kinds of faults that say something about a node; errors and crashes are the program's as a rule."""


_MOST_DAYS = 1e7


def _days(found: object) -> float:
    """Return a time of a trace.

    Raises:
        ValueError: it is none.
    """
    days = float(str(found))
    if not 0 <= days < _MOST_DAYS:
        raise ValueError(f"event_time: days expected, {days} found")
    return days


class BadLog(ValueError):
    """A file is no log of faults; says what was expected."""


@dataclass
class Logs:
    """What the logs together say.

    Args:
        begin, end: wall seconds, or seconds of a trace; infinite: nothing was read.
        nodes: names that occur.
        skipped: lines that say nothing.
    """

    outages: list[Outage] = field(default_factory=list)
    signs: list[SignSeen] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    begin: float = math.inf
    end: float = -math.inf
    skipped: int = 0

    def span(self, times: Iterable[float]) -> None:
        """Extend what was observed to some times."""
        for time in times:
            self.begin, self.end = min(self.begin, time), max(self.end, time)

    def add(self, content: bytes) -> None:
        """Take the content of one file.

        Raises:
            BadLog: it is none of the known kinds.
        """
        head = content.lstrip()[:1]
        if head == b"[":
            self._add_trace(content)
        elif head == b"{":
            self._add_lines(content.splitlines())
        else:
            raise BadLog("a JSON list of faults, an event log or a ledger expected")

    def _add_trace(self, content: bytes) -> None:
        try:
            events = json.loads(content)
            rows = [
                (
                    _days(one["event_time"]) * DAY,
                    str(one["node_id"]),
                    one["event_type"],
                    str(one["fault_type"]["Class"]),
                )
                for one in events
            ]
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise BadLog(f"no list of faults ({type(error).__name__}: {error!s:.100})") from error
        begun: dict[tuple[str, str], list[float]] = {}
        for time, node, what, kind in sorted(rows, key=lambda row: row[0]):
            self.nodes.add(node)
            starts = begun.setdefault((node, kind), [])
            if what == "fault_start":
                starts.append(time)
            elif what == "fault_end" and starts:
                self.outages.append(Outage(node, starts.pop(0), time, kind))
            else:
                self.skipped += 1
        for (node, kind), starts in begun.items():
            self.outages += [Outage(node, start, math.inf, kind) for start in starts]
        self.span([0.0, *(row[0] for row in rows)])

    def _add_lines(self, lines: Sequence[bytes]) -> None:
        records: list[Record] = []
        entries = []
        for line in lines:
            if not line.strip():
                continue
            try:
                if line.lstrip().startswith(b'{"v":'):
                    record = codec.decode(line.decode())
                    records += [record] if isinstance(record, Record) else []
                else:
                    entries.append(entry_of(line))
            except (ValueError, codec.CodecError):
                self.skipped += 1
        if not records and not entries:
            raise BadLog("no line of an event log or a ledger")
        self._add_records(records)
        ledger = Ledger(entries, 0)
        for node in ledger.nodes:
            self.outages += ledger.outages(node)
        self.signs += ledger.signs()
        self.nodes |= set(ledger.nodes)
        self.span(one.time for one in entries)

    def _add_records(self, records: Sequence[Record]) -> None:
        down: dict[str, Outage] = {}
        for one in sorted(records, key=lambda record: record.time):
            if isinstance(one, RunStarted):
                self.nodes.add(one.node)
                if one.node in down:
                    fault = down.pop(one.node)
                    self.outages.append(Outage(fault.node, fault.start, one.time, fault.kind))
            elif isinstance(one, FaultSeen) and one.fault in OF_NODES and one.node:
                self.nodes.add(one.node)
                down.setdefault(one.node, Outage(one.node, one.time, math.inf, one.fault))
        self.outages += down.values()
        self.span(one.time for one in records)
