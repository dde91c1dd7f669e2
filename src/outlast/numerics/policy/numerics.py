"""Checks of losses and gradients after a backward pass, and the actions on a bad step.

One :class:`Observation` a step goes in, equal on every rank, since it is the result of the vote; a
:class:`Finding` with an action and a reason comes out, equal as well. The check is made before the optimizer
runs: an infinite gradient with a finite loss would make the weights, and every later loss, NaN.

A rollback chooses its checkpoint and the newer copies that are put away here, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.checkpoint.policy.manifest import parse_copy_name, some
from outlast.numerics.policy.options import SPIKES, Action, Check, NumericsOptions
from outlast.numerics.policy.tally import Limit, Observation, Spacing, Tally, Window

CLEAN_STEPS = 20  # past the furthest bad step; as checkpoint/policy/copies: so many show that a fault is over
_STEPS_KEPT = 64
_LADDER = (Action.WARN, Action.SKIP, Action.ROLLBACK)
_GRAVITY = tuple(Action)


@dataclass(frozen=True)
class Finding:
    """A bad value in a step.

    Args:
        check: which check found it.
        action: what all ranks do about it.
        step: the index of the step.
        ranks: whose numbers they are.
        what: which number, as in "the loss of rank 1".
        value: that number; of several ranks the first one's.
        reason: one sentence, for the action.
        since: the index of the first bad step in a row.
    """

    check: Check
    action: Action
    step: int
    ranks: tuple[int, ...]
    what: str
    value: float
    reason: str
    since: int


@dataclass(frozen=True)
class _Bad:
    check: Check
    ranks: tuple[int, ...]
    what: str
    value: float
    measure: str = ""


class Monitor:
    """Decides about the numbers of each step; equal on every rank.

    A check that fires at every step ends: after ``max_consecutive`` bad steps in a row the next action of
    warn, skip, rollback is taken, and after ``max_rollbacks`` without progress all ranks raise. A step
    that is bad again after a rollback from it is skipped, and bad steps right after it: the data is bad.

    Args:
        options: of the user.
    """

    def __init__(self, options: NumericsOptions) -> None:
        self._options = options
        limit = Limit(options.spike_window, options.spike_warmup, options.spike_factor, options.spike_floor)
        self._windows = {check: Window(limit) for check in SPIKES if options.checks(check)}
        self._in_a_row = 0
        self._rollbacks = 0
        self._met: list[int] = []  # steps that were rolled back from
        self._furthest = -1  # of the bad steps
        self._going_back = False
        self._centre: float | None = None  # the latest mean loss
        self._spacing: Spacing | None = None
        self.compares = options.check_for_rank_outlier

    def terms(self, loss: float | None) -> tuple[float, float]:
        """Return what a rank's loss adds to the tally so that ranks can be compared; zeros: not yet."""
        if loss is None or self._spacing is None or not math.isfinite(loss):
            return 0.0, 0.0
        return self._spacing.terms(loss)

    def calm(self, seen: Observation) -> bool:
        """Say whether a tally is good; otherwise each rank's own numbers must be checked."""
        tally = seen.tally
        if tally is None or not tally.sound:
            return False
        for check, window in self._windows.items():
            value = self._measured(check, seen)
            if value is None and check is Check.RANK_OUTLIER and tally.losses > 1:
                return False
            if value is not None and window.spikes(value):
                return False
        return True

    def passes(self, step: int, tally: Tally) -> bool:
        """Record a step whose tally is good, and return True; otherwise change nothing."""
        if not tally.sound:
            return False
        if self._windows:
            seen = Observation(step, tally=tally)
            if not self.calm(seen):
                return False
            self.settle(seen, None)
            return True
        self._in_a_row = 0
        if self._met and step > self._furthest + CLEAN_STEPS:
            self._rollbacks, self._met = 0, []
        return True

    def judge(self, seen: Observation) -> Finding | None:
        """Return the most severe finding by each rank's numbers; changes nothing."""
        bad = list(self._look(seen))
        if not bad:
            return None
        gravest = max(bad, key=lambda one: _GRAVITY.index(self._options.action(one.check)))
        action, why = self._act(self._options.action(gravest.check), seen.step)
        reason = f"{gravest.what} is {gravest.value:g} in step {seen.step}{gravest.measure}; {why}"
        since = seen.step - self._in_a_row
        return Finding(
            gravest.check, action, seen.step, gravest.ranks, gravest.what, gravest.value, reason, since
        )

    def _look(self, seen: Observation) -> Iterator[_Bad]:
        options = self._options
        if options.check_for_nan_in_loss:
            yield from _not_finite(Check.NAN_IN_LOSS, "the loss", seen.losses)
        if options.check_for_nan_in_grad:
            yield from _not_finite(Check.NAN_IN_GRAD, "the norm of the gradients", seen.norms)
        for check, window in self._windows.items():
            value = self._measured(check, seen)
            if value is None or not window.spikes(value):
                continue
            measure = f" (median {window.median:g}, spread {window.spread:g})"
            if check is Check.RANK_OUTLIER:
                rank = _furthest_off(seen.losses)
                loss = seen.losses[rank]
                assert loss is not None
                what = f"the loss of rank {rank}"
                yield _Bad(check, (rank,), what, loss, f"; ranks are {value:g} apart{measure}")
            else:
                what = "the loss" if check is Check.SPIKY_LOSS else "the norm of the gradients"
                yield _Bad(check, tuple(range(len(seen.losses))), what, value, measure)

    def _act(self, first: Action, step: int) -> tuple[Action, str]:
        """Return the action, and the reason."""
        options, raised = self._options, self._in_a_row // self._options.max_consecutive
        count = f"consecutive bad steps: {self._in_a_row + 1}, escalating after {options.max_consecutive}"
        if first is Action.RERUN and not raised:
            return first, "rerunning the step"
        if first is Action.RAISE:
            return first, "the configured action"
        kind = _LADDER.index(Action.SKIP if first is Action.RERUN else first) + raised
        action = _LADDER[min(kind, len(_LADDER) - 1)]
        if action is Action.ROLLBACK:
            if not raised and step in self._met:
                return Action.SKIP, "update skipped: the step was bad again after a rollback"
            if self._rollbacks >= options.max_rollbacks:
                used = f"{self._rollbacks} of {options.max_rollbacks} rollbacks without progress used"
                return Action.RAISE, f"{used} (max_rollbacks)"
            nth = f"rollback {self._rollbacks + 1} of {options.max_rollbacks} without progress"
            return action, f"loading an older checkpoint, {nth}"
        return action, f"update {'skipped' if action is Action.SKIP else 'kept'}, {count}"

    def settle(self, seen: Observation, finding: Finding | None) -> None:
        """Record a step and its action; once a step."""
        if finding is None or finding.action is Action.WARN:
            for check, window in self._windows.items():
                value = self._measured(check, seen)
                if value is not None:
                    window.add(value)
            if self.compares and (loss := seen.loss) is not None and math.isfinite(loss):
                self._centre_on(loss)
        if finding is None:
            self._in_a_row = 0
            if seen.step > self._furthest + CLEAN_STEPS:
                self._rollbacks, self._met = 0, []
            return
        self._in_a_row += 1
        self._furthest = max(self._furthest, seen.step)
        if finding.action is Action.SKIP and seen.step in self._met:
            self._met = [*self._met, seen.step + 1][-_STEPS_KEPT:]
        if finding.action is Action.ROLLBACK:
            self._rollbacks += 1
            self._met = [*self._met, seen.step][-_STEPS_KEPT:]
            self._in_a_row = 0
            self._going_back = True

    def _measured(self, check: Check, seen: Observation) -> float | None:
        """Return the number that a check for spikes uses; None: the step has none."""
        if check is Check.SPIKY_LOSS:
            value = seen.loss
        elif check is Check.SPIKY_GRAD_NORM:
            value = seen.grad_norm
        elif seen.tally is None:
            known = [one for one in seen.losses if one is not None]
            value = max(known) - min(known) if len(known) > 1 else None
        elif self._spacing is None:
            return None
        else:
            tally = seen.tally
            value = self._spacing.apart(tally.losses, tally.above, tally.below)
        return value if value is not None and math.isfinite(value) else None

    def _centre_on(self, centre: float | None) -> None:
        """Have ranks compared around this loss from the next step on."""
        self._centre = centre
        window = self._windows.get(Check.RANK_OUTLIER)
        if window is not None and centre is not None and len(window):
            self._spacing = Spacing(centre, window)

    @property
    def rollbacks(self) -> int:
        """The number of rollbacks since the last progress."""
        return self._rollbacks

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as plain values."""
        return {
            "in_a_row": self._in_a_row,
            "rollbacks": self._rollbacks,
            "met": list(self._met),
            "furthest": self._furthest,
            "centre": self._centre,
            "windows": {check.value: window.values for check, window in self._windows.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from a checkpoint; a rollback keeps the current budgets, else it could repeat for ever."""
        for check, window in self._windows.items():
            window.replace(state["windows"].get(check.value, ()))
        self._centre_on(state.get("centre"))
        if not self._going_back:
            self._in_a_row, self._rollbacks = int(state["in_a_row"]), int(state["rollbacks"])
            self._met, self._furthest = list(map(int, state["met"])), int(state["furthest"])
        self._going_back = False


def _not_finite(check: Check, what: str, values: Sequence[float | None]) -> Iterator[_Bad]:
    ranks = tuple(rank for rank, one in enumerate(values) if one is not None and not math.isfinite(one))
    if ranks:
        value = values[ranks[0]]
        assert value is not None
        yield _Bad(check, ranks, f"{what} of rank {some(ranks)}", value)


def _furthest_off(losses: Sequence[float | None]) -> int:
    """Return the rank whose loss is furthest from the median."""
    known = {rank: one for rank, one in enumerate(losses) if one is not None}
    median = statistics.median(known.values())
    return max(known, key=lambda rank: abs(known[rank] - median))


@dataclass(frozen=True)
class Plan:
    """The effect of a rollback on the copies.

    Args:
        put_away: copies of this generation newer than what is to be loaded, which would be saved again.
        avoid: copies of other generations that are to be loaded when nothing else is left.
    """

    put_away: tuple[str, ...]
    avoid: tuple[str, ...]


def plan(names: Collection[str], generation: int, below: int, tried: Collection[str]) -> Plan | None:
    """Return the rollback; None: there is no copy for it.

    Args:
        names: the copies that there are, on any tier.
        generation: the present one, whose names will be given again.
        below: the first bad step; a copy after that many completed steps was made before it.
        tried: what earlier rollbacks have loaded without the numbers getting better: something older is
            taken, if there is anything.
    """
    places = {name: place for name in names if (place := parse_copy_name(name)) is not None}
    old = [name for name, (step, _) in places.items() if step <= below]
    if not old:
        return None
    oldest_tried = min((places[name] for name in tried if name in places), default=None)
    older = [name for name in old if oldest_tried is None or places[name] < oldest_tried]
    target = max(places[name] for name in older or old)
    newer = [name for name, place in places.items() if place > target]
    return Plan(
        tuple(sorted(name for name in newer if places[name][1] == generation)),
        tuple(sorted(name for name in newer if places[name][1] != generation)),
    )
