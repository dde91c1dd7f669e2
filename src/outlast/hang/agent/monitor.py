"""The agent's side of liveness: read the heartbeat pages, ask the core, keep what was learned."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import replace

from outlast.config import FaultToleranceOptions
from outlast.errors import RunFolderUnusable
from outlast.hang.agent.evidence import count_of
from outlast.hang.policy.monitor import Excused, HeartbeatSeen, Liveness, RankEnded, RankStarted, Silent
from outlast.hang.policy.timeouts import FINISHING, INITIAL, SETUP, Durations, Timeouts
from outlast.ipc.heartbeat_page import HeartbeatReader, RankHeartbeat, RankState
from outlast.ipc.processes import state_of
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.workers.generation import Generation
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import Fault, StepSource

_LEARN_EVERY = 2.0


class Watch:
    """Monitors the ranks of one generation at a time; learned timeouts outlive generations.

    Args:
        config: timeouts, fixed or to be learned.
        folder: where ``ft_state.json`` is kept.
        files: writes it.
    """

    def __init__(self, config: FaultToleranceOptions, folder: RunFolder, files: FileThread) -> None:
        self._config = config
        self._folder = folder
        self._files = files
        self.timeouts = Timeouts(config)
        self.problems = self._recall()
        self._liveness = Liveness(self.timeouts, config.workload_check_interval)
        self._generation: Generation | None = None
        self.silents: tuple[Silent, ...] = ()  # at the last look
        self._learned_at = 0.0
        self._convicted: str | None = None  # the limit that found a hang
        self.heartbeats: dict[int, RankHeartbeat] = {}
        self._stepped: dict[int, float] = {}  # when each rank completed its latest step
        self._sections = {SETUP, FINISHING}  # that ranks had so far

    def _recall(self) -> tuple[str, ...]:
        try:
            state = self._folder.read(self._folder.ft_state)
        except RunFolderUnusable as error:
            return (f"{error}; learning timeouts again".replace("nothing was started; ", ""),)
        return () if state is None else tuple(self.timeouts.restore(state))

    def begin(self, generation: Generation, now: float) -> None:
        """Monitor the workers that have just been started."""
        self._generation = generation
        self._liveness = Liveness(self.timeouts, self._config.workload_check_interval)
        self._convicted = None
        self.heartbeats, self._stepped = {}, {}
        for worker in generation.workers:
            self._liveness.handle(RankStarted(worker.rank, generation.number, generation.spawned), now)

    def over(self) -> None:
        """Stop monitoring a generation whose pages are closed; the last values are kept."""
        self._generation = None
        self.silents = ()

    def replaced(self, rank: int, now: float) -> None:
        """Monitor the worker that replaces one that has ended."""
        if self._generation is not None:
            self._liveness.handle(RankStarted(rank, self._generation.number, now), now)

    def ended(self, rank: int, now: float) -> None:
        """Stop monitoring a rank whose process has ended, and read the steps of all ranks."""
        self.read()
        self._liveness.handle(RankEnded(rank), now)

    def read(self) -> None:
        """Read the step of every rank, for the report of a fault."""
        if self._generation is not None:
            for rank, page in self._generation.pages.items():
                self._read(rank, page)
            self._sections.update(*(page.names() for page in self._generation.pages.values()))

    def _read(self, rank: int, page: HeartbeatReader) -> RankHeartbeat:
        found = page.read()
        before = self.heartbeats.get(rank)
        if found.step >= 0 and (before is None or found.step != before.step):
            self._stepped[rank] = found.beat
        self.heartbeats[rank] = found
        return found

    def look(self, now: float) -> tuple[Silent, ...]:
        """Read every page and return the ranks that have been silent for too long."""
        generation = self._generation
        if generation is None:
            return ()
        for worker in generation.living():
            heartbeat = self._read(worker.rank, generation.pages[worker.rank])
            stopped = state_of(worker.pid) == "T"
            self._liveness.handle(
                HeartbeatSeen(
                    rank=heartbeat.rank,
                    generation=heartbeat.generation,
                    beats=heartbeat.beats,
                    beat=heartbeat.beat,
                    step=heartbeat.step,
                    sections=heartbeat.sections,
                    closed=heartbeat.closed,
                    done=heartbeat.state is RankState.DONE,
                    stopped=stopped,
                    ran=count_of(worker.pid).ran if stopped else 0.0,
                ),
                now,
            )
        self.silents = self._liveness.tick(now)
        return self.silents

    @property
    def generation(self) -> Generation | None:
        """The monitored generation; None: there is none."""
        return self._generation

    def excuse(self, silents: Iterable[Silent], now: float, look_in: float) -> None:
        """Examine ranks that get more time again after this many seconds."""
        for silent in silents:
            self._liveness.handle(Excused(silent.rank, silent.step, now + look_in), now)

    def convicted(self, silent: Silent) -> None:
        """Record which timeout found a hang."""
        self._convicted = silent.place

    def came_back(self) -> None:
        """Double the timeout that found the latest hang: a repeated hang may be a false alarm."""
        place, self._convicted = self._convicted, None
        if place is not None and self.timeouts.double(place) is not None:
            self.keep()

    def deadline(self, now: float) -> float:
        """Return when to look again at the latest."""
        expiry = self._liveness.deadline()
        latest = now + self._config.workload_check_interval
        return latest if expiry is None else min(latest, max(expiry, now + 0.01))

    def learn(self, now: float) -> dict[str, float] | None:
        """Compute the timeouts again from what the ranks measured; return what changed."""
        generation = self._generation
        if generation is None or not self._config.calc_ft_timeouts or now - self._learned_at < _LEARN_EVERY:
            return None
        self._learned_at = now
        observed: dict[str, Durations] = {}
        for page in generation.pages.values():
            for name, one in page.durations().items():
                known = observed.get(name, one)
                observed[name] = Durations(
                    max(known.count, one.count), max(known.p99, one.p99), max(known.longest, one.longest)
                )
        changed = self.timeouts.learn(observed)
        if changed:
            self.keep()
        return changed

    def learn_start(self, loaded: str | None) -> dict[str, float]:
        """Learn from the time that every rank took to its first step; return what changed."""
        starts = [one.marks["first_step"] - one.marks["spawned"] for one in self.heartbeats.values()]
        lived = max(time.monotonic() - one.marks["spawned"] for one in self.heartbeats.values())
        limit = self.timeouts.learn_initial(min(max(starts), lived), loaded)
        if limit is None:
            return {}
        self.keep()
        return {INITIAL: limit}

    def keep(self) -> None:
        """Write ``ft_state.json``; an error does not stop monitoring."""
        state = copy.deepcopy(self.timeouts.state())
        path = self._folder.ft_state
        self._files.hand(lambda: self._folder.write(path, state), path)

    def is_fixed(self, silent: Silent) -> bool:
        """Say whether the user has set the timeout that a rank exceeded."""
        return self.timeouts.is_fixed(INITIAL if silent.initial else silent.section)

    @property
    def source(self) -> StepSource:
        """The source of the steps; one rank that reports them is enough."""
        found = {_source(heartbeat) for heartbeat in self.heartbeats.values()}
        best = (one for one in (StepSource.SESSION, StepSource.ANNOUNCED) if one in found)
        return next(best, StepSource.COUNTED)

    def without_effect(self) -> list[str]:
        """Return a line for each timeout of a section that no rank has opened."""
        had = ", ".join(sorted(self._sections))
        return [
            f"fault_tolerance.rank_section_timeouts.{name}: no rank of this node has opened this section, so"
            f" the timeout had no effect; sections were: {had}"
            for name in self._config.rank_section_timeouts
            if name not in self._sections
        ]

    def slowest_step(self) -> int:
        """Return the completed steps of the rank that is furthest behind, -1 before the first.

        If only some ranks report steps, those count.
        """
        source = self.source
        return min((one.step for one in self.heartbeats.values() if _source(one) is source), default=-1)

    def stepped(self) -> float:
        """Return when the slowest ranks completed :meth:`slowest_step`; 0: they have completed none."""
        source, step = self.source, self.slowest_step()
        slowest = (
            rank for rank, one in self.heartbeats.items() if one.step == step and _source(one) is source
        )
        return max((self._stepped.get(rank, 0.0) for rank in slowest), default=0.0)

    def announced_from(self) -> tuple[int, bool]:
        """Return the step after those with which the script began this generation; -1: it announced none.

        Returns:
            The step, and whether a framework reported it; otherwise it is the first step announced.
        """
        began = ((one.began, one.resumed) for one in self.heartbeats.values() if one.began >= 0)
        return min(began, default=(-1, False))

    def placed(self, fault: Fault) -> Fault:
        """Return a fault with the step and its source."""
        source, heartbeat = self.source, self.heartbeats.get(fault.rank)
        told = heartbeat is None or _source(heartbeat) is source
        began = [one.marks["first_step"] for one in self.heartbeats.values() if "first_step" in one.marks]
        spawned = self._generation.spawned if self._generation is not None else fault.since
        return replace(
            fault,
            step=fault.step if told else self.slowest_step(),
            counted=source is StepSource.COUNTED,
            trained=max(0.0, fault.since - max(began, default=spawned)),
        )


def _source(heartbeat: RankHeartbeat) -> StepSource:
    """Return the source of a rank's step; a session that restored nothing counts from 0, too."""
    if "announced" in heartbeat.marks:
        return StepSource.ANNOUNCED
    restored = "loaded" in heartbeat.marks or ("session" in heartbeat.marks and heartbeat.step < 0)
    return StepSource.SESSION if restored else StepSource.COUNTED
