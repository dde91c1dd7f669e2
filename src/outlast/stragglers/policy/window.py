"""The rows of one window, arranged by section and group of peers, with what is missing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from outlast.stragglers.policy.peers import TO_DEVIATION
from outlast.stragglers.policy.rows import LAST_MICRO_STEP, MICRO_STEP, Group, Kind, Place, Row

ARRIVAL = ""  # where a section is named: none, but the whole time until a rank waits for the others
_EXPLAINED = 0.8  # of a rank's lateness, that the other groups wait for it at least
_DEVIATIONS = 3.0  # robust standard deviations by which it waits less than its peers where all ranks meet
_SAMPLE = 64  # ranks of a group whose totals tell how long the window was


@dataclass
class Cell:
    """One section in one group of peers.

    Args:
        busy: mean seconds of an entry in which the rank did not wait, by rank; of data that it loads once a
            step as if all ranks had the same number of micro-batches.
        rows: of each rank; empty: an entry is the window.
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
        shares: micro-batches of each rank in a step; empty: all have equally many, as far as is known.
    """

    def __init__(self, members: Sequence[int], seconds: float, shares: Mapping[int, int]) -> None:
        self.members = members
        self._seconds = seconds
        mine = {rank: shares[rank] for rank in members if rank in shares}
        self._shares = mine if len(set(mine.values())) > 1 else {}
        self._usual_share = median(self._shares.values()) if self._shares else 0.0
        self._each = 0.0  # seconds of the window for one micro-batch more in each step
        self.waiting: list[float] = [0.0] * len(members)  # nan: not known in full
        self.waits = False
        self._arrived: Cell | None = None
        self._waits: dict[str, list[float]] = {}  # by section; nan: not known
        self._shared: set[str] = set()  # sections that every rank of the job enters
        self._groups: Sequence[Peers] = ()  # all groups of the job
        self.totals = [0.0] * len(members[:: -(-len(members) // _SAMPLE)])

    @property
    def duration(self) -> float:
        """The seconds of the window: the median of what ranks spent in all sections."""
        return sorted(self.totals)[len(self.totals) // 2]

    def among(self, groups: Sequence[Peers]) -> None:
        """Take all groups of the job."""
        self._groups = groups

    def cell(self, section: str, rows: Mapping[int, Row], shared: bool = False) -> Cell | None:
        """Return one section of these ranks, and add what it tells of their waiting; None: none enters it.

        None, too: all but one have one micro-batch in a step, so nobody else enters MICRO_STEP.

        Args:
            section: its name.
            rows: of all ranks that enter it.
            shared: every rank of the job does.
        """
        if shared:
            self._shared.add(section)
        found = list(map(rows.get, self.members))
        complete = [row for row in found if row is not None]
        if not complete:
            return None
        kind = complete[0].kind
        single = {rank for rank, share in self._shares.items() if share == 1 and section == MICRO_STEP}
        if len(complete) < (len(found) - len(single)) / 2:
            few = f"only {len(complete)} of {len(found)} peers enter '{section}'"
            return Cell(section, kind, {}, rows, {row.rank: few for row in complete})
        self._add_totals(found)
        cell = Cell(section, kind, {}, rows)
        if len(complete) < len(found) or not self._fill(cell, complete):
            self._fill_partly(cell, found, single)
        if self._shares:
            self._even_out(cell)
        return None if single and len(cell.busy) < 2 else cell

    def _fill(self, cell: Cell, found: Sequence[Row]) -> bool:
        """Fill in a section of which everything is known, and add its waiting; return whether it is.

        :meth:`_fill_partly` would do the same, in three times the time.
        """
        waiting = [row.waiting for row in found]
        busy = [
            (row.total - waited) / row.count if row.count else math.nan
            for row, waited in zip(found, waiting, strict=True)
        ]
        if not (sum(busy) < math.inf and min(busy) >= 0 and min(waiting) >= 0):
            return False
        if sum(waiting):
            self.waits = True
            self.waiting = [a + b for a, b in zip(self.waiting, waiting, strict=True)]
            self._waits[cell.section] = waiting
        cell.busy = dict(zip(self.members, busy, strict=True))
        return True

    def _add_totals(self, found: Sequence[Row | None]) -> None:
        sample = found[:: -(-len(found) // _SAMPLE)]
        for at, row in enumerate(sample):
            if row is not None and 0 <= row.total < math.inf:
                self.totals[at] += row.total

    def _fill_partly(self, cell: Cell, found: Sequence[Row | None], single: Collection[int]) -> None:
        """Fill in a section of which something is unknown.

        If no peer's waiting is known, the total stands for it in a communication section, and counts as
        busy in any other. Nothing is missing of the ranks in ``single``, which need not enter the section.
        """
        tells = any(row is not None and _usable(row) and not math.isnan(row.waiting) for row in found)
        communicates = cell.kind is Kind.COMMUNICATION
        waits = [math.nan] * len(found)
        for at, (rank, row) in enumerate(zip(self.members, found, strict=True)):
            if row is None and rank in single:
                continue
            if row is None or not _usable(row):
                words = "missing" if row is None else "no numbers"
                cell.unknown[rank] = f"its times of '{cell.section}' are {words}"
            elif tells and math.isnan(row.waiting):
                cell.unknown[rank] = f"how long it waits in '{cell.section}' is unknown"
            else:
                waited = row.waiting if tells else row.total if communicates else 0.0
                self.waits = self.waits or waited > 0
                self.waiting[at] += waited
                waits[at] = waited
                if tells or not communicates:
                    cell.busy[rank] = (row.total - waited) / row.count
                continue
            if communicates or tells:
                self.waiting[at] = math.nan
        if any(one > 0 for one in waits):
            self._waits[cell.section] = waits

    def _even_out(self, cell: Cell) -> None:
        """Note what a micro-batch costs in a section, and compare as if all ranks had equally many of them.

        Each of :data:`.rows.MICRO_STEP` is an entry of its own. Data that every rank loads equally often,
        though their micro-batches differ, are those of a whole step.
        """
        shares, busy = self._shares, cell.busy
        known = busy.keys() & shares.keys()
        costs: list[float] = []
        if cell.section == MICRO_STEP:
            costs = [busy[rank] * cell.count(rank) / (shares[rank] - 1) for rank in known if shares[rank] > 1]
        elif cell.kind is Kind.DATA and len({cell.count(rank) for rank in known}) == 1:
            costs = [busy[rank] * cell.count(rank) / shares[rank] for rank in known]
            busy.update({rank: busy[rank] * self._usual_share / shares[rank] for rank in known})
        self._each += median(costs) if costs else 0.0

    def arrival(self) -> Cell | None:
        """Return how long each rank makes its peers wait: the window without the time that it waits itself.

        None: nothing is known of waiting. The rank that the others wait for waits least (TraceML, issue 252).
        What a rank's micro-batches beyond the usual number usually take does not count.
        """
        if not self.waits:
            return None
        duration = max(self.duration, self._seconds)  # sections may leave a part of the window out
        shares, usual = self._shares, self._usual_share
        busy = {
            rank: max(duration - waited - self._each * (shares.get(rank, usual) - usual), 0.0)
            for rank, waited in zip(self.members, self.waiting, strict=True)
            if not math.isnan(waited)
        }
        self._arrived = Cell(ARRIVAL, Kind.OTHER, busy, {})
        return self._arrived

    def is_shown(self, rank: int, least: float) -> bool:
        """Say whether the collectives that all ranks share show that a rank comes late.

        In a job of several groups of peers, a rank may wait less than its peers in a collective of few ranks:
        they wait there for ranks of another group, and nobody waits for this one. If it comes late, it waits
        less in other collectives too, or every other group waits for it.

        Args:
            rank: that waits less than its peers.
            least: seconds of the window that count.
        """
        if len(self._groups) < 2:
            return True
        at = self.members.index(rank)
        own = {section: waits[at] for section, waits in self._waits.items() if not math.isnan(waits[at])}
        early = {section: self._median_waiting([section], at) - waited for section, waited in own.items()}
        most = max(early, key=lambda section: early[section], default="")
        rest = self._shared & early.keys() - {most}
        others = self._summed(rest, at)
        if others:
            usual = median(others)
            spread = TO_DEVIATION * median(abs(one - usual) for one in others)
            if usual - sum(own[section] for section in rest) >= max(least, _DEVIATIONS * spread):
                return True
        lateness = sum(early.values())
        return all(
            peers._waits_for(own) >= _EXPLAINED * lateness
            for peers in self._groups
            if peers is not self and peers.waits
        )

    def _waits_for(self, other: Mapping[str, float]) -> float:
        """Return how much longer these ranks usually wait than a rank of another group, in what both enter.

        Where they wait less than it, their place in the pipeline may be the reason.

        Args:
            other: what that rank waits, by section.
        """
        both = self._waits.keys() & other.keys()
        return sum(max(0.0, self._median_waiting([section]) - other[section]) for section in both)

    def _median_waiting(self, sections: Collection[str], but: int = -1) -> float:
        """Return the median of what the ranks wait in some sections, without the rank at a place."""
        known = self._summed(sections, but)
        return median(known) if known else 0.0

    def _summed(self, sections: Collection[str], but: int) -> list[float]:
        columns = [self._waits[section] for section in sections if section in self._waits]
        sums = (sum(waits) for place, waits in enumerate(zip(*columns, strict=True)) if place != but)
        return [one for one in sums if not math.isnan(one)]

    def late(self, rank: int) -> float | None:
        """Return how long the peers wait for a rank in this window; None: nothing is known of waiting."""
        arrived = self._arrived
        return arrived.busy[rank] - arrived.usual if arrived and rank in arrived.busy else None


def _usable(row: Row) -> bool:
    """Say whether the times of a row are times; only the waiting may be unknown."""
    waits = math.isnan(row.waiting) or 0 <= row.waiting <= row.total
    return row.count >= 1 and 0 <= row.total < math.inf and waits


class Window:
    """The rows of one window.

    Args:
        number: rows of other windows are not looked at.
        rows: of any ranks, in any order; of two for one section of one rank the last counts.
        groups: the ranks of each group, in ascending order.
        seconds: that the window took by the clock; 0: not known.
    """

    def __init__(
        self, number: int, rows: Sequence[Row], groups: Mapping[Group, Sequence[int]], seconds: float
    ) -> None:
        sections = self._sections = defaultdict[str, dict[int, Row]](dict)
        for row in rows:
            if row.window == number:
                sections[row.section][row.rank] = row
        shares = _shares(sections.get(MICRO_STEP, {}), sections.get(LAST_MICRO_STEP, {}))
        self._groups = [Peers(members, seconds, shares) for members in groups.values()]
        self.peers = [one for one in self._groups if len(one.members) > 1]
        for one in self.peers:
            one.among(self._groups)

    def cells(self) -> Iterator[tuple[str, list[tuple[Peers, Cell]]]]:
        """Yield each section with its cells; then the arrival, which the sections tell."""
        ranks = len(self.reports())
        for section in sorted(self._sections):
            rows = self._sections[section]
            shared = len(rows) >= ranks
            found = [(peers, peers.cell(section, rows, shared)) for peers in self._groups]
            yield (
                section,
                [(peers, cell) for peers, cell in found if cell is not None and len(peers.members) > 1],
            )
        last = [(peers, peers.arrival()) for peers in self.peers]
        yield ARRIVAL, [(peers, cell) for peers, cell in last if cell is not None]

    def reports(self) -> set[int]:
        """Return the ranks of which there is a row."""
        return set().union(*self._sections.values())


def _shares(others: Mapping[int, Row], last: Mapping[int, Row]) -> dict[int, int]:
    """Return the micro-batches of each rank in a step; on a device the count of a window may lag by some."""
    return {
        rank: 1 + round(others[rank].count / row.count if rank in others else 0)
        for rank, row in last.items()
        if row.count
    }


def group_places(places: Mapping[int, Place]) -> dict[Group, list[int]]:
    """Return the ranks of each group, in ascending order."""
    groups: dict[Group, list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank].group, []).append(rank)
    return groups
