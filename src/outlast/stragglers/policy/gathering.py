"""Puts the windows of all ranks of a generation together, so that they are about the same steps.

Each rank chooses how many steps its windows have, so those of two ranks may end at different steps. Windows
are compared up to a step at which those of every rank end; what a rank measured since the last such step is
added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from outlast.cluster.policy.codec import AtMost, Count, Generation, Rank, Within
from outlast.stragglers.policy.rows import Kind, Row

MOST_WAITING = 32  # windows of a rank that wait for those of others; then a rank that sent none is left out
MOST_SECTIONS = 36
MOST_RANKS_OF_NODE = 4096
MOST_WINDOWS = 64  # of a rank in one report
_Seconds = Annotated[float, Within(0, 1e9)]


@dataclass(frozen=True)
class SectionTimes:
    """The times of one section in one window, as an agent tells them; see :class:`.rows.Row`."""

    section: Annotated[str, AtMost(64)]
    kind: Kind
    count: Count
    median: _Seconds
    p90: _Seconds
    longest: _Seconds
    total: _Seconds
    waiting: _Seconds


@dataclass(frozen=True)
class RankWindow:
    """What a rank measured up to the part ``end`` of its steps."""

    rank: Rank
    end: Count
    sections: Annotated[tuple[SectionTimes, ...], AtMost(MOST_SECTIONS)]


@dataclass(frozen=True)
class TimingReport:
    """What the ranks of a node measured since the last report."""

    generation: Generation
    windows: Annotated[tuple[RankWindow, ...], AtMost(MOST_WINDOWS * MOST_RANKS_OF_NODE)]


def joined(windows: Sequence[RankWindow]) -> RankWindow:
    """Return consecutive windows of a rank, at least one, as one.

    Medians and p90 are means weighted by the counts.
    """
    found: dict[str, SectionTimes] = {}
    for window in windows:
        for one in window.sections:
            known = found.get(one.section)
            found[one.section] = one if known is None else _sum(known, one)
    last = windows[-1]
    return RankWindow(last.rank, last.end, tuple(found.values())[:MOST_SECTIONS])


def thinned(windows: Sequence[RankWindow], most: int) -> list[RankWindow]:
    """Join windows of a rank until there are at most so many.

    They still end at parts at which those of other nodes do: at multiples of a power of two.
    """
    kept, stride = list(windows), 2
    while len(kept) > most and stride <= max(one.end for one in kept):
        fewer: list[RankWindow] = []
        part: list[RankWindow] = []
        for one in kept:
            part.append(one)
            if one.end % stride == 0:
                fewer.append(joined(part))
                part = []
        kept = [*fewer, joined(part)] if part else fewer
        stride *= 2
    return kept if len(kept) <= most else [joined(kept)]


def _sum(one: SectionTimes, two: SectionTimes) -> SectionTimes:
    count = one.count + two.count
    share = one.count / count if count else 0.5
    return SectionTimes(
        one.section,
        two.kind,
        count,
        share * one.median + (1 - share) * two.median,
        share * one.p90 + (1 - share) * two.p90,
        max(one.longest, two.longest),
        one.total + two.total,
        one.waiting + two.waiting,
    )


class Gathering:
    """The windows of one generation that wait for those of other ranks.

    Args:
        ranks: of the generation.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._waiting: dict[int, list[RankWindow]] = {rank: [] for rank in ranks}

    def take(self, windows: Iterable[RankWindow]) -> list[tuple[int, list[Row]]]:
        """Take windows of some ranks; return the rows that can be compared, by number of the window."""
        for one in windows:
            waiting = self._waiting.get(one.rank)
            if waiting is None:
                continue
            if waiting and one.end <= waiting[-1].end:
                waiting.clear()  # the rank went back to an earlier step
            waiting.append(one)
        found: list[tuple[int, list[Row]]] = []
        if self._waiting and all(self._waiting.values()):
            found += self._up_to(self._waiting)
        if any(len(one) >= MOST_WAITING for one in self._waiting.values()):
            here = {rank: one for rank, one in self._waiting.items() if one}
            found += self._up_to(here)
            for kept in self._waiting.values():
                del kept[: max(0, len(kept) - MOST_WAITING // 2)]
        return found

    def _up_to(self, ranks: Mapping[int, Sequence[RankWindow]]) -> list[tuple[int, list[Row]]]:
        """Return the rows up to each part at which a window of every rank ends."""
        ends = [{one.end for one in windows} for windows in ranks.values()]
        found = []
        for end in sorted(set.intersection(*ends)):
            rows: list[Row] = []
            for windows in ranks.values():
                mine = [one for one in windows if one.end <= end]
                rows += _rows(joined(mine))
                self._waiting[mine[0].rank] = [one for one in windows if one.end > end]
            ranks = {rank: self._waiting[rank] for rank in ranks}
            found.append((end, rows))
        return found


def _rows(window: RankWindow) -> list[Row]:
    return [
        Row(
            *(window.rank, one.section, one.kind, window.end, one.count),
            *(one.median, one.p90, one.longest, one.total, one.waiting),
        )
        for one in window.sections
    ]
