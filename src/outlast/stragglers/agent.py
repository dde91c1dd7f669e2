"""The agent's part: reads what its ranks measured from their heartbeat pages, and reports it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport, thinned
from outlast.stragglers.policy.measuring import FIRST_PART, PARTS, Times

_EACH_NODE = 0.05  # seconds between two reports, for each node: the leader reads all of them
_LONGEST = 1e9
_MOST_COUNT = 1 << 46  # sums of counts still fit into a message
_MOST_TOLD = 8  # windows of a rank in one report; well below what the leader lets wait


class TimesOfRanks:
    """The windows of the ranks of one generation after another that were not reported yet.

    Args:
        nodes: of the job.
    """

    def __init__(self, nodes: int) -> None:
        self._every = _EACH_NODE * nodes if nodes > 1 else 0.0
        self._generation = 0
        self._pages: Mapping[int, HeartbeatReader] = {}
        self._found: dict[int, list[RankWindow]] = {}
        self._due = 0.0

    def begin(self, generation: int, pages: Mapping[int, HeartbeatReader]) -> None:
        """Read the pages of a generation."""
        self._generation, self._pages = generation, pages
        self._found.clear()

    def over(self) -> None:
        """Let go of a generation: its pages are about to be closed."""
        self._pages = {}

    def look(self, now: float) -> TimingReport | None:
        """Read every page; return what is to be reported now."""
        for rank, page in self._pages.items():
            for one in page.times.new():
                if not 0 <= one.end < 1 << 53:
                    continue
                windows = self._found.setdefault(rank, [])
                windows.append(RankWindow(rank, one.end, _named(page, one.rows)))
                if len(windows) > _MOST_TOLD:
                    windows[:] = thinned(windows, _MOST_TOLD)
        if not self._found or now < self._due:
            return None
        self._due = now + self._every
        found = tuple(one for windows in self._found.values() for one in windows)
        self._found.clear()
        return TimingReport(self._generation, found)


def _named(page: HeartbeatReader, rows: tuple[Times, ...]) -> tuple[SectionTimes, ...]:
    """Return the rows with the names of their sections; a page may hold anything."""
    found = []
    for one in rows:
        part = one.place - FIRST_PART
        name = PARTS[part] if 0 <= part < len(PARTS) else page.name(one.place)
        figures = [one.median, one.p90, one.longest, one.total, one.waiting]
        if (
            name
            and 0 <= one.count < _MOST_COUNT
            and all(math.isfinite(each) and 0 <= each < _LONGEST for each in figures)
        ):
            found.append(SectionTimes(name, one.kind, one.count, *figures))
    return tuple(found)
