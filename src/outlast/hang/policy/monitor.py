"""The decider about one node's heartbeat pages: which ranks have been silent for too long.

A rank is watched from its spawn. Until its first heartbeat the initial timeout counts, and that of ``setup``
if the user has set one. Then each open section, including outer ones, has its own timeout (NVRx judges the
section that was opened last), and when none is open the time since the last heartbeat is compared with the
out-of-section timeout. A rank that announced that no more heartbeats come may take its time to end. A stopped
process cannot be busy, so it has a shorter timeout. Heartbeats of older generations are ignored.

Time for which the monitor itself did not run (a suspended machine, stolen processor time) does not count: it
is kept as a span of the clock and subtracted from every silence.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.hang.policy.timeouts import FINISHING, INITIAL, OUT_OF_SECTION, SETUP

if TYPE_CHECKING:
    from outlast.hang.policy.timeouts import Timeouts

OVERSLEPT = 3.0  # times the expected interval between two looks
_SLEEPS_KEPT = 256


@dataclass(frozen=True)
class RankStarted:
    """A rank's process was started."""

    rank: int
    generation: int
    spawned: float


@dataclass(frozen=True)
class HeartbeatSeen:
    """The content of a rank's heartbeat page.

    Args:
        beats: heartbeats so far; 0 before the first.
        beat: when the last one was written, in monotonic seconds.
        step: completed steps.
        sections: name and opening time of the open ones, from outer to inner.
        closed: when the last section closed, 0 before the first.
        done: the script says that no more heartbeats come.
        stopped: the kernel holds the process stopped (state T of /proc/PID/stat).
        ran: seconds that a stopped process has been on a processor so far.
    """

    rank: int
    generation: int
    beats: int
    beat: float
    step: int
    sections: tuple[tuple[str, float], ...] = ()
    closed: float = 0.0
    done: bool = False
    stopped: bool = False
    ran: float = 0.0


@dataclass(frozen=True)
class RankEnded:
    """A rank's process has ended."""

    rank: int


@dataclass(frozen=True)
class Excused:
    """A silent rank was examined and gets more time, as long as it stays at this step."""

    rank: int
    step: int
    until: float


Event = RankStarted | HeartbeatSeen | RankEnded | Excused


@dataclass(frozen=True)
class Silent:
    """A rank that was silent for longer than its timeout.

    Args:
        section: the section that is open for too long; None: before the first heartbeat, or outside of all.
        since: when the silence began, in monotonic seconds.
        waited: seconds of it that count.
        limit: the timeout that it exceeds.
        initial: it is about the first heartbeat.
    """

    rank: int
    step: int
    section: str | None
    since: float
    waited: float
    limit: float
    reason: str
    initial: bool

    @property
    def place(self) -> str:
        """The section, or what stands for one in :meth:`Timeouts.hung`."""
        return _place(self.section, self.initial)


@dataclass(frozen=True)
class _Span:
    """What a rank is held to: silence since when, against which limit.

    ``stopped``: it is about a process that is held stopped.
    """

    section: str | None
    since: float
    limit: float
    initial: bool = False
    stopped: bool = False


def _place(section: str | None, initial: bool) -> str:
    if initial:
        return INITIAL
    return OUT_OF_SECTION if section is None else section


@dataclass
class _Watched:
    generation: int
    spawned: float
    seen: HeartbeatSeen | None = None
    excuse: Excused | None = None
    stopped_since: float | None = None
    ran: float = 0.0

    @property
    def step(self) -> int:
        return -1 if self.seen is None or self.seen.beats == 0 else self.seen.step

    @property
    def excused_until(self) -> float:
        return self.excuse.until if self.excuse is not None and self.excuse.step == self.step else -math.inf


class Liveness:
    """Monitors the ranks of one node.

    Args:
        timeouts: the limits; they may change between two calls.
        interval: the expected time between two looks, in seconds.
    """

    def __init__(self, timeouts: Timeouts, interval: float) -> None:
        self._timeouts = timeouts
        self._interval = interval
        self._ranks: dict[int, _Watched] = {}
        self._looked: float | None = None
        self._sleeps: deque[tuple[float, float]] = deque(maxlen=_SLEEPS_KEPT)

    def handle(self, event: Event, now: float) -> None:
        """Handle an event; silence is reported by :meth:`tick` only."""
        if isinstance(event, RankStarted):
            self._ranks[event.rank] = _Watched(event.generation, event.spawned)
        elif isinstance(event, RankEnded):
            self._ranks.pop(event.rank, None)
        else:
            watched = self._ranks.get(event.rank)
            if watched is None:
                return
            if isinstance(event, Excused):
                watched.excuse = event
            elif event.generation == watched.generation:
                watched.seen = event
                if not event.stopped:
                    watched.stopped_since = None
                elif watched.stopped_since is None or event.ran != watched.ran:
                    watched.stopped_since, watched.ran = now, event.ran

    def tick(self, now: float) -> tuple[Silent, ...]:
        """Return every rank whose silence exceeds a limit."""
        if self._looked is not None and now - self._looked > OVERSLEPT * self._interval:
            self._sleeps.append((self._looked + OVERSLEPT * self._interval, now))
        self._looked = now
        judged = (self._judge(rank, watched, now) for rank, watched in sorted(self._ranks.items()))
        return tuple(silent for silent in judged if silent is not None)

    def deadline(self) -> float | None:
        """Return when the first timeout ends if nothing moves; None: nothing is monitored."""
        expiries = [
            max(span.since + span.limit + self._slept_through(span), watched.excused_until)
            for watched in self._ranks.values()
            for span in self._spans(watched)
        ]
        return min(expiries, default=None)

    def _spans(self, watched: _Watched) -> list[_Span]:
        spans = self._open_spans(watched)
        since, last = watched.stopped_since, spans[-1]
        if since is None:
            return spans
        limit = self._timeouts.stopped(_place(last.section, last.initial), last.limit)
        return [replace(last, since=since, limit=limit, stopped=True), *spans]

    def _open_spans(self, watched: _Watched) -> list[_Span]:
        seen, timeouts = watched.seen, self._timeouts
        if seen is not None and seen.done:
            since = max(seen.beat, seen.closed, watched.spawned)
            return [_Span(FINISHING, since, timeouts.finishing())]
        if seen is None or seen.beats == 0:
            setup, since = timeouts.setup(), watched.spawned
            initial = _Span(None, since, timeouts.initial(), initial=True)
            return [initial] if setup is None else [_Span(SETUP, since, setup), initial]
        if not seen.sections:
            return [_Span(None, max(seen.beat, seen.closed), timeouts.limit(None))]
        return [_Span(name, opened, timeouts.limit(name)) for name, opened in seen.sections]

    def _slept_through(self, span: _Span) -> float:
        """Return how much of a silence the monitor itself did not run."""
        return sum(max(woke - max(asleep, span.since), 0.0) for asleep, woke in self._sleeps)

    def _judge(self, rank: int, watched: _Watched, now: float) -> Silent | None:
        if now < watched.excused_until:
            return None
        for span in self._spans(watched):
            waited = now - span.since - self._slept_through(span)
            if waited >= span.limit:
                reason = f"rank {rank}: {self._sentence(span, waited)}"
                return Silent(
                    rank, watched.step, span.section, span.since, waited, span.limit, reason, span.initial
                )
        return None

    def _sentence(self, span: _Span, waited: float) -> str:
        """Return the sentence in NVRx's words, with the option that sets the timeout."""
        place = _place(span.section, span.initial)
        option = self._timeouts.option(place)
        if span.stopped:
            fixed = self._timeouts.is_fixed(place)
            origin = self._timeouts.origin(place) if fixed else "default of stopped processes"
            limit = f"(timeout {span.limit:.2f}, {origin}; {option} sets it)"
            return f"Its process has been stopped for {waited:.2f} seconds {limit}."
        limit = f"(timeout {span.limit:.2f}, {self._timeouts.origin(place)}; {option} sets it)"
        if span.initial:
            limit = f"{limit[:-1]}, off for a script that never sends a heartbeat)"
            return f"Did not get initial heartbeat. Waited {waited:.2f} seconds {limit}."
        if span.section is None:
            return f"Did not get subsequent heartbeat. Waited {waited:.2f} seconds {limit}."
        return f"Section '{span.section}' has been open for {waited:.2f} seconds {limit}."
