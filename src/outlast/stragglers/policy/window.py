"""The rows of one window, arranged by section and group of peers, with what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from outlast.stragglers.policy.rows import Group, Kind, Place, Row

ARRIVAL = ""  # where a section is named: none, but the whole time until a rank waits for the others
_KEYS = attrgetter("window", "section", "rank")
_SAMPLE = 64  # ranks of a group whose totals tell how long the window was


@dataclass
class Cell:
    """One section in one group of peers.

    Args:
        busy: mean seconds of an entry in which the rank did not wait, by rank.
        counts: entries of each rank; empty: as in ``rows``.
        unknown: ranks that cannot be compared, each with the reason.
        usual: the reference of a slow rank, once the ranks are compared.
    """

    section: str
    kind: Kind
    busy: dict[int, float]
    rows: Mapping[int, Row]
    unknown: dict[int, str] = field(default_factory=dict)
    usual: float = 0.0

    def count(self, rank: int) -> int:
        """Return how often a rank entered the section."""
        return self.rows[rank].count if rank in self.rows else 1


class Peers:
    """The ranks of one group in one window.

    Args:
        members: in ascending order.
        seconds: that the window took by the clock; 0: not known.
    """

    def __init__(self, members: Sequence[int], seconds: float) -> None:
        self.members = members
        self._seconds = seconds
        self.waiting: list[float] = [0.0] * len(members)  # nan: not known in full
        self.waits = False
        self._arrived: Cell | None = None
        self.totals = [0.0] * len(members[:: -(-len(members) // _SAMPLE)])

    @property
    def duration(self) -> float:
        """The seconds of the window: the median of what ranks spent in all sections."""
        return sorted(self.totals)[len(self.totals) // 2]

    def cell(self, section: str, rows: Mapping[int, Row]) -> Cell | None:
        """Return one section of these ranks, and add what it tells of their waiting; None: none enters it."""
        found = list(map(rows.get, self.members))
        complete = [row for row in found if row is not None]
        if not complete:
            return None
        kind = complete[0].kind
        if len(complete) < len(found) / 2:
            few = f"only {len(complete)} of {len(found)} peers enter '{section}'"
            return Cell(section, kind, {}, rows, {row.rank: few for row in complete})
        self._add_totals(found)
        if len(complete) == len(found):
            total = sum([row.waiting for row in complete])
            busy = [(row.total - row.waiting) / row.count if row.count else -1.0 for row in complete]
            if 0 <= total < math.inf and min(busy) >= 0 and sum(busy) < math.inf:
                if total:
                    self.waits = True
                    waited = self.waiting
                    self.waiting = [a + row.waiting for a, row in zip(waited, complete, strict=True)]
                return Cell(section, kind, dict(zip(self.members, busy, strict=True)), rows)
        return self._partial(section, kind, found, rows)

    def _add_totals(self, found: Sequence[Row | None]) -> None:
        sample = found[:: -(-len(found) // _SAMPLE)]
        for at, row in enumerate(sample):
            if row is not None and 0 <= row.total < math.inf:
                self.totals[at] += row.total

    def _partial(
        self, section: str, kind: Kind, found: Sequence[Row | None], rows: Mapping[int, Row]
    ) -> Cell | None:
        """Arrange a section of which something is unknown.

        If no peer's waiting is known, the total stands for it in a communication section, and counts as
        busy in any other.
        """
        usable = [row for row in found if row is not None and _usable(row)]
        tells = any(not math.isnan(row.waiting) for row in usable)
        cell = Cell(section, kind, {}, rows)
        only_waiting = kind is Kind.COMMUNICATION and not tells
        for at, (rank, row) in enumerate(zip(self.members, found, strict=True)):
            if row is None or not _usable(row):
                cell.unknown[rank] = (
                    f"its times of '{section}' are {'missing' if row is None else 'no numbers'}"
                )
            elif tells and math.isnan(row.waiting):
                cell.unknown[rank] = f"how long it waits in '{section}' is unknown"
            else:
                waited = row.total if only_waiting else row.waiting if tells else 0.0
                self.waits = self.waits or waited > 0
                self.waiting[at] += waited
                cell.busy[rank] = max(row.total - (row.waiting if tells else 0.0), 0.0) / row.count
                continue
            if kind is Kind.COMMUNICATION or tells:
                self.waiting[at] = math.nan
        if only_waiting:
            cell.busy = {}
        return cell

    def arrival(self) -> Cell | None:
        """Return how long each rank makes its peers wait: the window without the time that it waits itself.

        None: nothing is known of waiting. The rank that the others wait for waits least (TraceML, issue 252).
        """
        if not self.waits:
            return None
        duration = max(self.duration, self._seconds)  # sections may leave a part of the window out
        busy = {
            rank: max(duration - waited, 0.0)
            for rank, waited in zip(self.members, self.waiting, strict=True)
            if not math.isnan(waited)
        }
        self._arrived = Cell(ARRIVAL, Kind.OTHER, busy, {})
        return self._arrived

    def late(self, rank: int) -> float | None:
        """Return how long the peers wait for a rank in this window; None: nothing is known of waiting."""
        arrived = self._arrived
        return arrived.busy[rank] - arrived.usual if arrived and rank in arrived.busy else None


def _usable(row: Row) -> bool:
    """Say whether the times of a row are times; only the waiting may be unknown."""
    if row.count < 1 or not 0 <= row.total < math.inf:
        return False
    return math.isnan(row.waiting) or 0 <= row.waiting < math.inf


class Window:
    """The rows of one window.

    Args:
        number: rows of other windows are not looked at.
        rows: of any ranks, in any order; of two for one section of one rank the last counts.
        groups: the ranks of each group, in ascending order.
        seconds: that the window took by the clock; 0: not known.
    """

    def __init__(
        self, number: int, rows: Sequence[Row], groups: Mapping[Group, Sequence[int]], seconds: float = 0.0
    ) -> None:
        self._sections: dict[str, dict[int, Row]] = {}
        sections = self._sections
        for row, (at, section, rank) in zip(rows, map(_KEYS, rows), strict=True):
            if at == number:
                if section not in sections:
                    sections[section] = {}
                sections[section][rank] = row
        self.peers = [Peers(members, seconds) for members in groups.values() if len(members) > 1]

    def cells(self) -> Iterator[tuple[str, list[tuple[Peers, Cell]]]]:
        """Yield each section with its cells; then the arrival, which the sections tell."""
        for section in sorted(self._sections):
            rows = self._sections[section]
            found = [(peers, peers.cell(section, rows)) for peers in self.peers]
            yield section, [(peers, cell) for peers, cell in found if cell is not None]
        last = [(peers, peers.arrival()) for peers in self.peers]
        yield ARRIVAL, [(peers, cell) for peers, cell in last if cell is not None]

    def reports(self) -> set[int]:
        """Return the ranks of which there is a row."""
        return set().union(*self._sections.values())


def group_places(places: Mapping[int, Place]) -> dict[Group, list[int]]:
    """Return the ranks of each group, in ascending order."""
    groups: dict[Group, list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank].group, []).append(rank)
    return groups
