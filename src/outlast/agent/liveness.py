"""The agent's side of liveness: read the pulse pages, ask the core, keep what was learned."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.agent.generation import Generation
from outlast.core.config import LEARNED_SILENCE_START, FaultTolerance
from outlast.core.liveness import Excused, Liveness, PulseSeen, RankEnded, RankStarted, Silent
from outlast.core.timeouts import INITIAL, Durations, Timeouts
from outlast.observe.run_folder import RunFolder
from outlast.transport.processes import state_of
from outlast.transport.pulse import Pulse, RankState

_LEARN_EVERY = 2.0


class Watch:
    """Watches the ranks of one generation at a time; what it learns outlives the generations.

    Args:
        config: timeouts, fixed or to be learned.
        folder: where ``ft_state.json`` is kept.
    """

    def __init__(self, config: FaultTolerance, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self.timeouts = Timeouts(config)
        self.problems = self._recall()
        self._liveness = Liveness(self.timeouts, config.workload_check_interval)
        self._generation: Generation | None = None
        self._learned_at = 0.0
        self.pulses: dict[int, Pulse] = {}

    def _recall(self) -> tuple[str, ...]:
        state = self._folder.read(self._folder.ft_state)
        return () if state is None else tuple(self.timeouts.restore(state))

    def begin(self, generation: Generation, now: float) -> None:
        """Watch the workers that have just been started."""
        self._generation = generation
        self._liveness = Liveness(self.timeouts, self._config.workload_check_interval)
        self.pulses = {}
        for worker in generation.workers:
            self._liveness.handle(RankStarted(worker.rank, generation.number, generation.spawned), now)

    def replaced(self, rank: int, now: float) -> None:
        """Watch the worker that was started in the place of one that has ended."""
        if self._generation is not None:
            self._liveness.handle(RankStarted(rank, self._generation.number, now), now)

    def ended(self, rank: int, now: float) -> None:
        """Stop to watch a rank whose process has ended, and read how far every rank has come."""
        if self._generation is not None:
            self.pulses.update({at: page.read() for at, page in self._generation.pages.items()})
        self._liveness.handle(RankEnded(rank), now)

    def look(self, now: float) -> tuple[Silent, ...]:
        """Read every page and return the ranks that have been silent for too long."""
        generation = self._generation
        if generation is None:
            return ()
        for worker in generation.living():
            pulse = self.pulses[worker.rank] = generation.pages[worker.rank].read()
            self._liveness.handle(
                PulseSeen(
                    rank=pulse.rank,
                    generation=pulse.generation,
                    beats=pulse.beats,
                    beat=pulse.beat,
                    step=pulse.step,
                    sections=pulse.sections,
                    closed=pulse.closed,
                    done=pulse.state is RankState.DONE,
                    stopped=state_of(worker.pid) == "T",
                ),
                now,
            )
        return self._liveness.tick(now)

    def excuse(self, silents: Iterable[Silent], now: float) -> None:
        """Grant ranks that compute the time that was allowed before anything was learned."""
        for silent in silents:
            until = silent.since + LEARNED_SILENCE_START
            self._liveness.handle(Excused(silent.rank, silent.step, until), now)

    def convicted(self, silent: Silent) -> None:
        """Double a learned limit that convicted at the same step before: it may be a false alarm."""
        if self.timeouts.hung(silent.step, silent.place) is not None:
            self.keep()

    def deadline(self, now: float) -> float:
        """Return when to look again at the latest."""
        expiry = self._liveness.deadline()
        latest = now + self._config.workload_check_interval
        return latest if expiry is None else min(latest, max(expiry, now + 0.01))

    def learn(self, now: float) -> dict[str, float] | None:
        """Compute the timeouts anew from what the ranks measured; return what changed."""
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
        """Learn from how long every rank took to its first step; return what changed."""
        starts = [pulse.marks["first_step"] - pulse.marks["spawned"] for pulse in self.pulses.values()]
        limit = self.timeouts.learn_initial(max(starts), loaded)
        if limit is None:
            return {}
        self.keep()
        return {INITIAL: limit}

    def keep(self) -> None:
        """Write ``ft_state.json``; a full disk is no reason to stop watching."""
        try:
            self._folder.write(self._folder.ft_state, self.timeouts.state())
        except OSError:
            self.problems = (*self.problems, f"{self._folder.ft_state} could not be written")

    def is_fixed(self, silent: Silent) -> bool:
        """Say whether the user has set the limit that a rank exceeded."""
        return silent.initial or self.timeouts.is_fixed(silent.section)

    def slowest_step(self) -> int:
        """Return the completed steps of the rank that is furthest behind, -1 before the first."""
        return min((pulse.step for pulse in self.pulses.values()), default=-1)
