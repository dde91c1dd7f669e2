"""Steps of a guarded job, and a monitor that has seen some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from outlast.agreement.policy.votes import Reading
from outlast.config import NumericsOptions
from outlast.numerics.policy.numerics import Finding, Monitor
from outlast.numerics.policy.options import Action
from outlast.numerics.policy.tally import Observation, addends, tally_of

NAN = math.nan
NUMBERS = st.one_of(st.none(), st.floats(0.5, 1.5), st.sampled_from([NAN, math.inf, -math.inf, 1e9, 0.0]))


def seen(step: int, *losses: float | None, norms: tuple[float | None, ...] = (1.0, 1.0)) -> Observation:
    """Return a step by the numbers of each rank."""
    return Observation(step, losses, norms)


def tallied(
    monitor: Monitor, step: int, losses: Sequence[float | None], norms: Sequence[float | None] = (1.0, 1.0)
) -> Observation:
    """Return a step by the sum of what all ranks add to its vote."""
    rows = []
    for loss, norm in zip(losses, norms, strict=True):
        terms = monitor.terms(loss) if monitor.compares else (0.0, 0.0)
        rows.append(addends(frozenset(), Reading(loss, norm, *terms)))
    return Observation(step, tally=tally_of([sum(column) for column in zip(*rows, strict=True)]))


def take(monitor: Monitor, observation: Observation) -> Finding | None:
    """Judge a step and settle it."""
    finding = monitor.judge(observation)
    monitor.settle(observation, finding)
    return finding


def judged(monitor: Monitor, observation: Observation) -> Finding:
    """Return what is found in a bad step."""
    finding = monitor.judge(observation)
    assert finding is not None
    return finding


def actions(monitor: Monitor, *steps: int) -> list[str]:
    """Take steps in which the loss of rank 0 is no number; return the actions."""
    return [one.action.value for step in steps if (one := take(monitor, seen(step, NAN, 1.0)))]


def calm(options: NumericsOptions, *losses: float | None, steps: int = 4) -> Monitor:
    """Return a monitor after so many good steps with these losses, and norms of 3 and 4."""
    monitor = Monitor(options)
    for step in range(steps):
        assert take(monitor, seen(step, *losses, norms=(3.0, 4.0))) is None
    return monitor


def rolled_back(options: NumericsOptions, step: int = 7) -> Monitor:
    """Return a monitor that has ordered a rollback from a step, and has loaded a copy since."""
    monitor = Monitor(options)
    saved = monitor.state()
    finding = take(monitor, seen(step, NAN, 1.0))
    assert finding is not None
    assert finding.action is Action.ROLLBACK
    monitor.restore(saved)
    return monitor
