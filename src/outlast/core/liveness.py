"""Who has been silent for too long: the decider about one node's pulse pages.

Theory of operation. A rank is watched from its spawn. Until its first pulse the silence counts
against the initial timeout. After that each open section, outer ones too, counts against its own
timeout, and when none is open the time since the last sign of life counts against the
out-of-section timeout. A pulse of an older generation proves nothing. Time that the watcher
itself slept through (a suspended machine, stolen processor time) is held against nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.core.timeouts import FINISHING, Timeouts

OVERSLEPT = 3.0  # times the expected interval between two looks


@dataclass(frozen=True)
class RankStarted:
    """A rank's process was started."""

    rank: int
    generation: int
    spawned: float


@dataclass(frozen=True)
class PulseSeen:
    """What a rank's page says now; ``sections`` from outer to inner with their opening times.

    Args:
        closed: when the last section closed.
        done: the script says that no more pulses come.
        stopped: the kernel holds the process stopped (state T of /proc/PID/stat).
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


@dataclass(frozen=True)
class RankEnded:
    """A rank's process has ended."""

    rank: int


Event = RankStarted | PulseSeen | RankEnded


@dataclass(frozen=True)
class Silent:
    """A rank that gave no sign of life for longer than it may.

    Args:
        section: the section that is open for too long; None: before the first pulse, or outside of all.
        since: when the silence began, in monotonic seconds.
        limit: the timeout that it exceeds.
    """

    rank: int
    step: int
    section: str | None
    since: float
    waited: float
    limit: float
    reason: str
    initial: bool = False


@dataclass
class _Watched:
    generation: int
    spawned: float
    seen: PulseSeen | None = None
    excused: float = 0.0
    stopped_since: float | None = None


class Liveness:
    """Watches the ranks of one node.

    Args:
        timeouts: the limits; they may change between two calls.
        interval: the expected time between two looks, in seconds.
    """

    def __init__(self, timeouts: Timeouts, interval: float) -> None:
        self._timeouts = timeouts
        self._interval = interval
        self._ranks: dict[int, _Watched] = {}
        self._looked: float | None = None

    def handle(self, event: Event, now: float) -> tuple[Silent, ...]:
        """Take note of an event; silence is reported by :meth:`tick` alone."""
        if isinstance(event, RankStarted):
            self._ranks[event.rank] = _Watched(event.generation, event.spawned)
        elif isinstance(event, RankEnded):
            self._ranks.pop(event.rank, None)
        else:
            watched = self._ranks.get(event.rank)
            if watched is not None and event.generation == watched.generation:
                moved = watched.seen is None or (watched.seen.beats, watched.seen.sections) != (
                    event.beats,
                    event.sections,
                )
                watched.seen = event
                if moved:
                    watched.excused = 0.0
                if not event.stopped:
                    watched.stopped_since = None
                elif watched.stopped_since is None:
                    watched.stopped_since = now
        return ()

    def tick(self, now: float) -> tuple[Silent, ...]:
        """Return every rank whose silence exceeds a limit."""
        if self._looked is not None:
            overslept = now - self._looked - OVERSLEPT * self._interval
            if overslept > 0:
                for watched in self._ranks.values():
                    watched.excused += overslept
        self._looked = now
        found = []
        for rank, watched in sorted(self._ranks.items()):
            silent = self._judge(rank, watched, now)
            if silent is not None:
                found.append(silent)
        return tuple(found)

    def deadline(self) -> float | None:
        """Return when the first limit is reached if nothing moves, None when nothing is watched."""
        expiries = [
            since + watched.excused + limit
            for watched in self._ranks.values()
            for _, since, limit, _ in self._spans(watched)
        ]
        return min(expiries, default=None)

    def _spans(self, watched: _Watched) -> list[tuple[str | None, float, float, bool]]:
        """Return what runs against which limit: section, since when, limit, whether it is the start."""
        spans = self._open_spans(watched)
        since = watched.stopped_since
        if since is None:
            return spans
        section, _, limit, initial = spans[-1]
        return [(section, since, self._timeouts.stopped(section, limit), initial), *spans]

    def _open_spans(self, watched: _Watched) -> list[tuple[str | None, float, float, bool]]:
        seen = watched.seen
        if seen is not None and seen.done:
            return [(FINISHING, max(seen.beat, seen.closed), self._timeouts.finishing(), False)]
        if seen is None or seen.beats == 0:
            return [(None, watched.spawned, self._timeouts.initial(), True)]
        if not seen.sections:
            return [(None, max(seen.beat, seen.closed), self._timeouts.limit(None), False)]
        return [(name, opened, self._timeouts.limit(name), False) for name, opened in seen.sections]

    def _judge(self, rank: int, watched: _Watched, now: float) -> Silent | None:
        step = -1 if watched.seen is None or watched.seen.beats == 0 else watched.seen.step
        for section, since, limit, initial in self._spans(watched):
            waited = now - since - watched.excused
            if waited >= limit:
                reason = self._sentence(section, waited, limit, initial)
                return Silent(rank, step, section, since, waited, limit, f"rank {rank}: {reason}", initial)
        return None

    def _sentence(self, section: str | None, waited: float, limit: float, initial: bool) -> str:
        """Say it as users of NVRx know it."""
        if initial:
            return (
                f"Did not get initial heartbeat. Waited {waited:.2f} seconds (timeout {limit:.2f}; a script "
                "that never pulses is started with --ft-initial-rank-heartbeat-timeout=off)."
            )
        bound = f"timeout {limit:.2f}, {self._timeouts.origin(section)}"
        if section is None:
            return f"Did not get subsequent heartbeat. Waited {waited:.2f} seconds ({bound})."
        return f"Section '{section}' has been open for {waited:.2f} seconds ({bound})."
