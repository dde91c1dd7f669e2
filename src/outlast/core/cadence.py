"""After which steps a checkpoint is due, and in which tiers.

One process runs a :class:`Cadence`. What it hands out is a :class:`Schedule` in whole steps, which every rank
holds and asks, so that ranks agree on what is due without a clock in common. What the user has fixed stays
fixed; other intervals follow what copies cost and how often faults come (:mod:`outlast.core.intervals`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outlast.core.escalation import whole
from outlast.core.intervals import PRIOR_MTBF, Level, RateEstimator, multi_level, positive_in, seconds_in

HYSTERESIS = 0.25  # below that, moving an interval gains less than a fiftieth of its cost
LONGEST = 4.0  # times the best interval
EMA = 0.5  # weight of the newest measurement
FIRST_STEPS = 10  # before a step was timed
FIRST_SECONDS = 60.0  # before a copy was measured
RARER = 2.0  # faults that only the next tier survives are expected half as often as those before it
NO_COST = 1e-3  # seconds; a copy for which nobody waits still takes from the machine


class Tier(str, Enum):
    """A place for copies; the order is that of the faults that it survives, from few to many."""

    MEMORY = "memory"  # the node's own memory: survives its workers
    REPLICA = "replica"  # other nodes' memory: survives the node
    LOCAL = "local"  # a folder: survives the job
    GLOBAL = "global"  # a shared folder or an object store: survives the cluster


@dataclass(frozen=True)
class Schedule:
    """How many steps lie between two copies in each tier; equal on every rank that was given it.

    Args:
        every: steps, by tier; a tier that is not named gets no copies.
        reason: for people.
    """

    every: tuple[tuple[Tier, int], ...]
    reason: str = ""

    def due(self, step: int) -> tuple[Tier, ...]:
        """Return the tiers that get a copy of the state after a step.

        Copies in other tiers are made from the one in memory, so where that tier is used it is always
        among them.

        Args:
            step: completed steps; saves fall on multiples, as Megatron's do.
        """
        found = tuple(tier for tier, steps in self.every if step > 0 and step % steps == 0)
        used = [tier for tier, _ in self.every]
        if found and Tier.MEMORY in used and Tier.MEMORY not in found:
            return (Tier.MEMORY, *found)
        return found

    def to_json(self) -> str:
        """Return the schedule as a text for the other ranks."""
        return json.dumps(
            {"every": [[tier.value, steps] for tier, steps in self.every], "reason": self.reason}
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: the text is none of ours.
        """
        values = json.loads(text)
        every = tuple((Tier(tier), whole(steps, at_least=1)) for tier, steps in values["every"])
        return cls(every, str(values["reason"]))


@dataclass(frozen=True)
class Rule:
    """What the user wants of a tier; with neither steps nor seconds the interval is chosen."""

    tier: Tier
    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class StepTimed:
    """Rank 0's seconds for a step, without checkpoints."""

    seconds: float


@dataclass(frozen=True)
class Copied:
    """A copy is durable in a tier.

    Args:
        tier: which.
        blocking: seconds that training stood still for this tier, beyond what the tiers before it took.
        durable: seconds from the end of the step to the commit.
    """

    tier: Tier
    blocking: float
    durable: float


@dataclass(frozen=True)
class Recovered:
    """The job works again after a fault.

    Args:
        needed: the first tier that survived the fault.
        loaded: the tier that was loaded.
        seconds: from the fault to the first step.
    """

    needed: Tier
    loaded: Tier
    seconds: float


Event = StepTimed | Copied | Recovered


class Cadence:
    """Makes schedules; has neither ``tick`` nor ``deadline``, as only events change what it knows.

    A chosen interval is at least the time until a copy is durable, so that copies do not queue up, but not
    more than ``LONGEST`` times the best one: a single slow upload must not stop saving. A new schedule is
    made when an interval is off by more than ``HYSTERESIS``. A tier of which nothing was measured gets
    copies every ``FIRST_STEPS`` steps, or ``FIRST_SECONDS`` as soon as a step was timed. A tier that does
    not pay gets none.

    Args:
        rules: the tiers that exist, each once.
        prior_mtbf: seconds expected between faults that need the first tier, before any was seen.
    """

    def __init__(self, rules: Sequence[Rule], prior_mtbf: float = PRIOR_MTBF) -> None:
        order = list(Tier)
        self._rules = sorted(rules, key=lambda rule: order.index(rule.tier))
        self._rates = {
            rule.tier: RateEstimator(prior_mtbf * RARER**place) for place, rule in enumerate(self._rules)
        }
        self._step: float | None = None
        self._costs: dict[Tier, tuple[float, float]] = {}
        self._restarts: dict[Tier, float] = {}
        self._at: float | None = None
        self.schedule = self._wanted()

    def handle(self, event: Event, now: float) -> Schedule | None:
        """Take in what was measured; return the schedule that is in force from now on, if it is a new one.

        Args:
            event: what was measured.
            now: monotonic seconds.
        """
        down = event.seconds if isinstance(event, Recovered) else 0.0
        if self._at is not None:
            for rate in self._rates.values():
                rate.ran(max(0.0, now - self._at - down))
        self._at = now
        if isinstance(event, StepTimed):
            self._step = max(_smooth(self._step, event.seconds), 1e-6)
        elif isinstance(event, Copied):
            blocking, durable = self._costs.get(event.tier, (None, None))
            self._costs[event.tier] = _smooth(blocking, event.blocking), _smooth(durable, event.durable)
        else:
            self._serves(event.needed).fault()
            self._restarts[event.loaded] = _smooth(self._restarts.get(event.loaded), event.seconds)
        wanted = self._wanted()
        if self._is_close(wanted):
            return None
        self.schedule = wanted
        return wanted

    def _serves(self, needed: Tier) -> RateEstimator:
        """Return the rate of the first tier that there is and that survives what ``needed`` does."""
        order = list(Tier)
        at_least = [one for tier, one in self._rates.items() if order.index(tier) >= order.index(needed)]
        return at_least[0] if at_least else list(self._rates.values())[-1]

    def _is_close(self, wanted: Schedule) -> bool:
        old, new = dict(self.schedule.every), dict(wanted.every)
        chosen = {rule.tier for rule in self._rules if rule.steps is None and rule.seconds is None}
        return old.keys() == new.keys() and all(
            abs(new[tier] - steps) <= (HYSTERESIS * steps if tier in chosen else 0)
            for tier, steps in old.items()
        )

    def _wanted(self) -> Schedule:
        plan = self._plan()
        every: list[tuple[Tier, int]] = []
        base = 1
        for rule in self._rules:
            if rule.steps is not None:
                every.append((rule.tier, rule.steps))
            elif self._step is None:
                every.append((rule.tier, FIRST_STEPS))
            elif rule.seconds is not None:
                every.append((rule.tier, max(1, round(rule.seconds / self._step))))
            elif rule.tier not in self._costs:
                every.append((rule.tier, max(1, round(FIRST_SECONDS / self._step))))
            elif rule.tier in plan:
                base *= self._multiple(plan[rule.tier], self._costs[rule.tier][1], base * self._step)
                every.append((rule.tier, base))
        step = 0.0 if self._step is None else self._step
        told = [
            f"{tier.value} every {steps} steps" + f" ({steps * step:.3g} s)" * (step > 0)
            for tier, steps in every
        ]
        return Schedule(tuple(every), ", ".join(told))

    def _plan(self) -> dict[Tier, float]:
        levels = [
            Level(
                rule.tier.value,
                max(self._costs[rule.tier][0], NO_COST),
                self._rates[rule.tier].upper(),
                self._restarts.get(rule.tier, 0.0),
            )
            for rule in self._rules
            if rule.steps is None and rule.seconds is None and rule.tier in self._costs
        ]
        return {Tier(name): interval for name, interval in multi_level(levels).intervals}

    @staticmethod
    def _multiple(best: float, durable: float, unit: float) -> int:
        """Return how many units are nearest to the best interval, in the geometric sense of a flat cost."""
        seconds = min(max(best, durable), LONGEST * best)
        below = max(1, math.floor(seconds / unit))
        if durable <= seconds and below * unit < durable:
            return below + 1
        return below if seconds * seconds <= below * (below + 1) * unit * unit else below + 1

    def state(self) -> dict[str, Any]:
        """Return what must outlive the process."""
        return {
            "step": self._step,
            "costs": {tier.value: list(costs) for tier, costs in self._costs.items()},
            "restarts": {tier.value: seconds for tier, seconds in self._restarts.items()},
            "rates": {tier.value: rate.state() for tier, rate in self._rates.items()},
            "schedule": self.schedule.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned, for the tiers that exist; time in between is not counted.

        Raises:
            KeyError, TypeError, ValueError: the state is not one of ours; nothing was taken over.
        """
        step = None if state["step"] is None else positive_in(state["step"])
        costs = {}
        for tier, (blocking, durable) in state["costs"].items():
            costs[Tier(tier)] = (seconds_in(blocking), seconds_in(durable))
        restarts = {Tier(tier): seconds_in(seconds) for tier, seconds in state["restarts"].items()}
        rates = {tier: RateEstimator() for tier in self._rates}
        for tier, rate in rates.items():
            rate.restore(state["rates"].get(tier.value, self._rates[tier].state()))
        schedule = Schedule.from_json(state["schedule"])
        self._step, self._costs, self._restarts, self._rates = step, costs, restarts, rates
        self._at = None
        self.schedule = schedule
        wanted = self._wanted()
        if not self._is_close(wanted):
            self.schedule = wanted


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else EMA * new + (1 - EMA) * old
