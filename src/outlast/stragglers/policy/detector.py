"""The decider: which ranks slow the job, which no longer do, and which cannot be judged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from outlast.stragglers.policy.limits import Chance, Limits
from outlast.stragglers.policy.peers import ENOUGH, PEERS_FOR_SPREAD, Moves, references, spread
from outlast.stragglers.policy.rows import Group, Kind, Place, Row, State, Verdict
from outlast.stragglers.policy.tracks import Standing, Track
from outlast.stragglers.policy.window import ARRIVAL, Cell, Peers, Window, group_places

COVERED = 0.8  # of a rank's lateness, from which its slow sections explain it (TraceML, issue 252)
_LATEST_TIMES = 5  # windows whose median time counts, so that a pause does not
_MOST_SECTIONS = 1000  # that are remembered; names may come and go
_ALL_BUT = 0.95  # of a step that a rank can cost at most


@dataclass
class _Section:
    """What is remembered of a section.

    Args:
        chances: by level, see :class:`.limits.Limits`.
        entered: the latest window that has it, counted by calls.
        distance: from the one before.
    """

    chances: tuple[Chance, ...]
    moves: Moves
    entered: int
    distance: int = 1
    tracks: dict[int, Track] = field(default_factory=dict)


@dataclass
class _Tracked:
    """A rank that is, or lately was, slow in a section of this window.

    Args:
        busy, usual: mean seconds of an entry, its own and its peers'.
        excess: seconds of the window beyond what its peers take.
    """

    rank: int
    section: str
    kind: Kind
    busy: float
    usual: float
    excess: float
    standing: Standing
    peers: Peers
    track: Track


class Straggling:
    """Tells from the windows of all ranks which ones slow the job.

    A rank is compared with the median of its peers, by the time in which it is busy; time in which it waits
    for others does not count. Where ranks have different numbers of micro-batches, they are compared as if
    they had equally many. A rank is a straggler after several windows that are far from the peers' spread,
    beyond a least effect, and more than chance brings. What is missing is told, and is never health.

    Args:
        steps: of the smallest window; a window spans the numbers since the one before it.
        limits: from which on a rank is a straggler.
    """

    def __init__(self, steps: int, limits: Limits | None = None) -> None:
        self._steps = steps
        self._limits = limits or Limits()
        self._window = -1
        self._calls = 0
        self._observed = math.nan
        self._spans = 1
        self._seconds: deque[float] = deque([0.0], maxlen=_LATEST_TIMES)
        self._sections: dict[str, _Section] = {}
        self._places: dict[int, Place] = {}
        self._groups: dict[Group, list[int]] = {}
        self._unknown: dict[tuple[int, str], Verdict] = {}
        self._slow: dict[tuple[int, str], Verdict] = {}

    @property
    def slow(self) -> list[Verdict]:
        """The stragglers as of the latest window, the most costly first."""
        return sorted(self._slow.values(), key=lambda one: (-one.job_slowdown, one.rank, one.section))

    @property
    def unknown(self) -> list[Verdict]:
        """The ranks and sections that could not be judged in the latest window."""
        return sorted(self._unknown.values(), key=lambda one: (one.rank, one.section))

    def observe(
        self, window: int, rows: Sequence[Row], places: Mapping[int, Place], now: float
    ) -> list[Verdict]:
        """Judge a window, and return what has changed: a rank turned on, off or unknown.

        Args:
            window: its number; one that is not newer than the latest is not looked at.
            rows: of all ranks; rows of other windows are not looked at.
            places: of every rank that should report.
            now: seconds of a monotonic clock. Verdicts tell how long a rank has been slow, and what sections
                leave out of a window is counted.
        """
        if window <= self._window:
            return []
        self._clock(window, now)
        self._calls += 1
        changed = self._move(places)
        arranged = Window(window, rows, self._groups, median(self._seconds))
        unknown = self._alone_or_missing(arranged.reports())
        silent = {rank for rank, _ in unknown}
        tracked: list[_Tracked] = []
        for section, cells in arranged.cells():
            tracked += self._judge(section, cells, len(rows), now)
            for _, cell in cells:
                for rank, why in cell.unknown.items():
                    if rank not in silent:
                        unknown[rank, section] = why
        changed += self._tell(tracked, now)
        changed += self._withdrawn()
        if len(self._sections) > _MOST_SECTIONS:
            self._sections = {name: one for name, one in self._sections.items() if one.tracks}
        if len(self._places) == 1 and arranged.reports() <= self._places.keys():
            unknown.clear()  # a job of one rank has nothing to compare
        return changed + self._tell_unknown(unknown)

    def presume(self, found: Verdict, now: float) -> None:
        """Take what an earlier leader has found; it holds until times of the rank say otherwise."""
        track = self._memory(found.section).tracks[found.rank] = Track(self._limits, since=now)
        track.seen = self._calls
        self._slow[found.rank, found.section] = found

    def again(self, window: int) -> None:
        """Take windows from this one on where it is not newer than the latest: the job went back."""
        if window <= self._window:
            self._window, self._observed = window - 1, math.nan

    def _clock(self, window: int, now: float) -> None:
        """Note how long a window takes, and how many of the least size it spans."""
        if not math.isnan(self._observed):
            self._seconds.append(max(now - self._observed, 0.0))
            self._spans = window - self._window
        self._window, self._observed = window, now

    def _move(self, places: Mapping[int, Place]) -> list[Verdict]:
        """Take new places; what is known of a rank holds for its node and its work only."""
        if places == self._places:
            return []
        before, self._places = self._places, dict(places)
        self._groups = group_places(places)
        moved = {rank for rank, place in before.items() if places.get(rank) != place}
        for memory in self._sections.values():
            for rank in moved & memory.tracks.keys():
                del memory.tracks[rank]
        for key in [key for key in self._unknown if key[0] in moved]:
            del self._unknown[key]
        gone = [self._slow.pop(key) for key in sorted(self._slow) if key[0] in moved]
        return [
            replace(one, state=State.OFF, reason=f"rank {one.rank} has left {one.node or 'its place'}")
            for one in gone
        ]

    def _alone_or_missing(self, reports: set[int]) -> dict[tuple[int, str], str]:
        found = {}
        for members in self._groups.values():
            if len(members) == 1:
                found[members[0], ""] = "no other rank has equal work on an equal device"
            found |= {(rank, ""): "no times of it arrived" for rank in members if rank not in reports}
        for rank in reports - self._places.keys():
            found[rank, ""] = "it is not known where it runs"
        return found

    def _judge(
        self, section: str, cells: Sequence[tuple[Peers, Cell]], tests: int, now: float
    ) -> list[_Tracked]:
        """Compare the ranks in one section."""
        memory = self._memory(section)
        if cells:
            memory.distance, memory.entered = self._calls - memory.entered, self._calls
        known = memory.moves.spread, memory.moves.settled
        memory.moves.begin()
        found = [
            (rank, cell, peers)
            for peers, cell in cells
            for rank in self._compare(memory, peers, cell, known, now)
        ]
        return [
            _Tracked(
                rank,
                section,
                cell.kind,
                cell.busy[rank],
                cell.usual,
                (cell.busy[rank] - cell.usual) * cell.count(rank),
                memory.tracks[rank].stands(memory.chances, tests),
                peers,
                memory.tracks[rank],
            )
            for rank, cell, peers in found
        ]

    def _memory(self, section: str) -> _Section:
        memory = self._sections.get(section)
        if memory is None:
            chances = tuple(map(Chance, self._limits.first))
            memory = self._sections[section] = _Section(chances, Moves(self._limits), self._calls - 1)
        return memory

    def _compare(
        self, memory: _Section, peers: Peers, cell: Cell, known: tuple[float, bool], now: float
    ) -> Sequence[int]:
        """Compare the ranks of one group, and return those that are tracked.

        Args:
            known: spread by the changes up to the window before, and whether it is settled.
        """
        busy, tracks = cell.busy, memory.tracks
        if len(busy) < 2:
            cell.unknown |= {rank: f"no peer's time of '{cell.section}' is known" for rank in busy}
            return ()
        ordered = sorted(busy.values())
        few = len(busy) < ENOUGH
        if few:
            memory.moves.add(busy, ordered)
        usual = cell.usual = references(ordered)[0]
        reached: dict[int, int] = {}
        judged = not few or known[0] < math.inf
        if ordered[-1] > usual * self._limits.ratio:  # nobody reaches a bound otherwise
            lowest = not few or (known[1] and len(busy) >= PEERS_FOR_SPREAD)
            wide = max(spread(ordered), known[0] if few else 0.0)  # infinite where nothing is judged
            reached = self._reached(cell, peers, self._bounds(ordered, usual, wide, lowest))
        for rank in reached.keys() - tracks.keys():
            tracks[rank] = Track(self._limits)
        tracked = sorted(busy.keys() & tracks.keys())
        for level, chance in enumerate(memory.chances):
            were = {rank for rank in tracked if tracks[rank].slow(level)}
            slow = {rank for rank, one in reached.items() if one >= len(memory.chances) - level}
            chance.count(len(slow - were), len(busy) - len(were) if judged else 0)
            for rank in were - slow:
                if not tracks[rank].on:
                    chance.recovered(tracks[rank].run(level))
        for rank in tracked:
            tracks[rank].add(busy[rank] / usual if usual > 0 else self._limits.on, reached.get(rank, 0), now)
            tracks[rank].seen = self._calls
        return tracked

    def _bounds(self, ordered: Sequence[float], usual: float, wide: float, lowest: bool) -> list[float]:
        """Return the time beyond which a rank is slow, by level.

        Args:
            ordered: times of the group, in ascending order.
            usual: their reference.
            wide: their spread.
            lowest: it is known well enough for the lowest level.
        """
        limits = self._limits
        bounds = [usual * max(limits.ratio, math.exp(one * wide)) for one in limits.deviations]
        least = ordered[-limits.most - 1 :][0] if lowest else bounds[0]
        bounds[-1] = min(max(bounds[-1], least), bounds[0])
        return bounds

    def _reached(self, cell: Cell, peers: Peers, bounds: Sequence[float]) -> dict[int, int]:
        """Return the ranks that are slow in this window, with how many of the levels they reach.

        Nobody is in a section for which the only peer has no time: it does not do the same there.
        """
        limits, usual, steps = self._limits, cell.usual, self._steps * self._spans
        if cell.section != ARRIVAL and not usual and len(cell.busy) == 2:
            return {}
        least = max(limits.seconds * steps, limits.share * peers.duration)
        unmeasured = max(limits.unmeasured * steps, least)
        return {
            rank: sum(busy > bound for bound in bounds)
            for rank, busy in cell.busy.items()
            if busy > bounds[-1]
            and (busy - usual) * (count := cell.count(rank))
            >= (least if usual * count >= limits.seconds * steps else unmeasured)
            and (cell.section != ARRIVAL or peers.is_shown(rank, least))
        }

    def _tell(self, tracked: Sequence[_Tracked], now: float) -> list[Verdict]:
        """Return what has changed of the tracked ranks, and drop the tracks that are over."""
        excess: dict[int, float] = {}
        for one in tracked:
            if one.section != ARRIVAL and (one.track.slow() or one.track.on):
                excess[one.rank] = excess.get(one.rank, 0.0) + one.excess
        changed = []
        for one in tracked:
            key, track, beyond = (one.rank, one.section), one.track, excess.get(one.rank, 0.0)
            explained = one.section == ARRIVAL and beyond >= COVERED * one.excess
            if track.on and not (explained and key not in self._slow):
                verdict = self._verdict(one, beyond, now)
                if key not in self._slow:
                    changed.append(verdict)
                self._slow[key] = verdict
            elif not track.on and key in self._slow:
                del self._slow[key]
                changed.append(self._verdict(one, 0.0, now))
            if track.over:
                del self._sections[one.section].tracks[one.rank]
        return changed

    def _withdrawn(self) -> list[Verdict]:
        """Drop the tracks of ranks whose times have stopped to come, and return their verdicts."""
        changed = []
        for section, memory in self._sections.items():
            patience = max(self._limits.missing, 3 * memory.distance)
            lost = [rank for rank, one in memory.tracks.items() if self._calls - one.seen >= patience]
            for rank in lost:
                del memory.tracks[rank]
                verdict = self._slow.pop((rank, section), None)
                if verdict is not None:
                    where = f"rank {rank}{f' on {verdict.node}' if verdict.node else ''}"
                    times = f"no times of it{f' in {section!r}' if section else ''}"
                    reason = (
                        f"{where} is no straggler on record any more: {times} for "
                        f"{_count(patience, 'window')}; it may still be slow"
                    )
                    changed.append(replace(verdict, state=State.OFF, reason=reason))
        return changed

    def _verdict(self, one: _Tracked, excess: float, now: float) -> Verdict:
        standing, track = one.standing, one.track
        late = one.peers.late(one.rank)
        duration = one.peers.duration
        cost = min(max(excess if late is None else late, 0.0), _ALL_BUT * duration)
        node = self._node(one.rank)
        peers = f"its {_count(len(one.peers.members) - 1, 'peer')}"
        where = f"rank {one.rank}{f' on {node}' if node else ''}"
        seen = f"{standing.slow} of the latest {_count(standing.windows, 'window')}"
        if not track.on:
            what = f"in '{one.section}' " if one.section else ""
            reason = f"{where} is {what}as fast as {peers} again, within {standing.ratio - 1:.0%}"
        elif one.section and not one.usual:
            reason = (
                f"{where} takes {one.busy:.3g} s in '{one.section}', where {peers} take no measurable time, "
                f"in {seen}, for {now - track.since:.0f} s"
            )
        elif one.section:
            reason = (
                f"{where} takes {standing.ratio:.2f} times as long as {peers} in '{one.section}' "
                f"({one.busy:.3g} s, they {one.usual:.3g} s) in {seen}, for {now - track.since:.0f} s"
            )
        else:
            reason = (
                f"{where} keeps {peers} waiting in {seen}, for {now - track.since:.0f} s: it comes after "
                f"{one.busy:.3g} s of a window, they after {one.usual:.3g} s, and no section explains it"
            )
        return Verdict(
            rank=one.rank,
            node=node,
            kind=one.kind,
            section=one.section,
            slowdown=standing.ratio,
            share_of_steps=standing.slow / standing.windows,
            confidence=1 - standing.chance,
            job_slowdown=duration / (duration - cost) if duration > 0 else math.nan,
            windows=standing.windows,
            reason=reason,
            state=State.ON if track.on else State.OFF,
        )

    def _tell_unknown(self, unknown: Mapping[tuple[int, str], str]) -> list[Verdict]:
        """Return which ranks became unknown, and the state of those that are known again."""
        before = self._unknown
        self._unknown = {key: self._unjudged(*key, why) for key, why in unknown.items()}
        changed = [verdict for key, verdict in self._unknown.items() if key not in before]
        silent = {rank for rank, section in unknown if not section}
        for (rank, section), verdict in before.items():
            if (rank, section) in unknown or rank in silent:
                continue
            still = [one for key, one in self._slow.items() if key[0] == rank and section in ("", key[1])]
            known = f"the times of rank {rank}{f' in {section!r}' if section else ''} are known again"
            changed += still or [replace(verdict, state=State.OFF, reason=known)]
        return changed

    def _unjudged(self, rank: int, section: str, why: str) -> Verdict:
        node = self._node(rank)
        return Verdict(
            rank=rank,
            node=node,
            kind=Kind.OTHER,
            section=section,
            slowdown=math.nan,
            share_of_steps=math.nan,
            confidence=0.0,
            job_slowdown=math.nan,
            windows=0,
            reason=f"rank {rank}{f' on {node}' if node else ''} cannot be judged: {why}",
            state=State.UNKNOWN,
        )

    def _node(self, rank: int) -> str:
        return self._places[rank].node if rank in self._places else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
