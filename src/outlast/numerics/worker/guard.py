"""The guard of a training loop: bad numbers are found before the optimizer runs, by all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from outlast import settings
from outlast.agreement.policy.votes import Flag, Reading
from outlast.checkpoint.policy.manifest import some
from outlast.config import NumericsOptions
from outlast.errors import NonFinite, UsageError
from outlast.numerics.policy.numerics import Finding, Monitor
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Observation, Tally
from outlast.numerics.worker.numerics import Gauge
from outlast.ports import Exchange

_LOG = logging.getLogger("outlast")
MOST_ATTEMPTS = 4  # at one step, whatever is plugged in


class Reruns(Protocol):
    """The port for reruns of a step. All but ``mismatch`` is equal on every rank."""

    @property
    def always(self) -> bool:
        """Whether every step is repeated, whether it was rejected or not."""
        ...

    def begin(self, folder: Path, exchange: Exchange, names: Callable[[], Sequence[str]]) -> None:
        """Join a job, after :meth:`loaded`.

        Args:
            folder: for incident files.
            exchange: between all ranks.
            names: returns the available copies.
        """
        ...

    def loaded(self, step: int, place: str) -> None:
        """Record where training continues: completed steps; tier and name of a copy, if any."""
        ...

    def before(self, step: int, attempt: int, data: object) -> None:
        """Prepare an attempt at a step.

        Args:
            step: its index.
            attempt: 0 the first time: keep the random states; later: put them back, and rewind the data.
            data: what ``should_run_forward_backward`` was given.
        """
        ...

    def mismatch(self, reading: Reading) -> bool:
        """Say whether this rank's attempt differs from its first; before all ranks vote."""
        ...

    def again(self, seen: Observation, finding: Finding | None) -> bool:
        """Say whether another attempt is made, from the results of all ranks.

        Args:
            seen: of all ranks; ``seen.mismatch``: a rank's attempts differ.
            finding: what is bad about this attempt; its action is ``RERUN`` where a rerun is called for.
        """
        ...

    def verdict(self, seen: Observation, finding: Finding | None) -> Finding | None:
        """Return the final finding of the step after its last attempt; None: it is accepted."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore them."""
        ...


class Voting(Protocol):
    """The port through which a guard uses its session."""

    def hear(self, index: int, reading: Reading, mismatch: bool) -> Tally:
        """Vote with the numbers of a step, and wait for the result of all ranks."""
        ...

    def each(self, reading: Reading) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """Return losses and norms of all ranks, in their order; every rank asks at the same time."""
        ...

    def found(self, finding: Finding | None) -> None:
        """Record the finding of the step."""
        ...


class Guard:
    """Checks every step's losses and gradients before the optimizer runs; part of the training state.

    Give it to ``session.restore(..., guard=guard)``. It works with DDP, FSDP2 and plain models on any device:
    each rank measures what it has, and one reduction a step, of 88 bytes, tells all ranks what it comes to;
    whose number is bad is told in another one, in such steps alone.

    Args:
        model: whose gradients are looked at.
        optimizer: that is kept from running.
        options: what is looked for and done; a launcher's table ``[numerics]`` wins.
        reruns: what can do a step again; needed where an action is "rerun".

    Raises:
        UsageError: an option makes no sense or can have no effect.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: NumericsOptions | None = None,
        reruns: Reruns | None = None,
    ) -> None:
        self.options = settings.in_force(options or NumericsOptions(), "numerics", settings.worker_context())
        problems = self.options.problems() or tuple(_at_odds(self.options, reruns))
        if problems:
            raise UsageError(f"outlast.Guard: {'; '.join(problems)}")
        norms = self.options.check_for_nan_in_grad or self.options.check_for_spiky_grad_norm
        self._gauge = Gauge(model, optimizer, norms)
        self._monitor = Monitor(self.options)
        self._reruns = reruns
        self._voting: Voting | None = None
        self._step: Callable[[], int] = int
        self._rank = 0
        self._running = -1  # the index of the step that is being tried
        self._attempt = 0
        self._seen: Observation | Tally | None = None
        self.finding: Finding | None = None
        self.accepted = False

    def bind(self, voting: Voting, step: Callable[[], int], rank: int, world_size: int) -> None:
        """Join a session, which calls this.

        Args:
            voting: lets all ranks vote.
            step: returns the index of the step.
            rank: this rank.
            world_size: how many there are.

        Raises:
            UsageError: ranks are compared, and there is one only.
        """
        if self.options.check_for_rank_outlier and world_size == 1:
            raise UsageError("outlast.Guard: check_for_rank_outlier: has no effect with one rank")
        self._voting, self._step, self._rank = voting, step, rank
        self._gauge.equip(world_size)

    @property
    def reruns(self) -> Reruns | None:
        """The reruns, if any."""
        return self._reruns

    @property
    def loss(self) -> float | None:
        """The mean loss of all ranks in the latest step; None where none was validated."""
        return None if self._seen is None else self._seen.loss

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of all ranks in the latest step, before they are clipped."""
        return None if self._seen is None else self._seen.grad_norm

    @property
    def rollbacks(self) -> int:
        """The number of rollbacks since the last progress."""
        return self._monitor.rollbacks

    def should_run_forward_backward(self, data: object = None) -> bool:
        """Say whether forward and backward must run (again); the condition of the loop.

        Args:
            data: the iterator of the micro-batches, for what does a step again.

        Returns:
            True before each attempt; False when all ranks have agreed on what becomes of the step.

        Raises:
            NonFinite: numbers are bad, and the action is to raise; on every rank.
            UsageError: no session has the guard.
            ExchangeFailed: a rank has gone.
        """
        step = self._step()
        if self._running != step or self._voting is None:
            self._begin(step)
        elif not self._ends(step, self._voting):
            self._attempt += 1
        else:
            self._running = -1
            return False
        if self._reruns is not None:
            self._reruns.before(step, self._attempt, data)
        return True

    def _begin(self, step: int) -> None:
        if self._voting is None:
            raise UsageError(
                "guard.should_run_forward_backward: no session has this guard; call"
                " session.restore(..., guard=guard) first"
            )
        self._running, self._attempt = step, 0
        self.accepted, self.finding = False, None

    def validate(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; does not wait for the device.

        Raises:
            UsageError: it is no tensor of one number, or comes from outside of the loop.
        """
        if self._running < 0:
            raise UsageError(
                "guard.validate: found outside of `while guard.should_run_forward_backward():`, expected"
                " within; a loss of anything but a step is not the guard's"
            )
        self._gauge.add(loss)

    def _ends(self, step: int, voting: Voting) -> bool:
        """Close an attempt; say whether it was the last."""
        monitor, reruns = self._monitor, self._reruns
        reading = self._gauge.read()
        if monitor.compares:
            reading = Reading(reading.loss, reading.norm, *monitor.terms(reading.loss))
        differs = reruns is not None and self._attempt > 0 and reruns.mismatch(reading)
        tally = self._seen = voting.hear(step, reading, differs)
        if reruns is None and monitor.passes(step, tally):
            self.accepted = True
            return True
        seen, finding = Observation(step, (), (), Flag.MISMATCH in tally.flags, tally), None
        if self._attempt > 0 or (reruns is not None and reruns.always) or not monitor.calm(seen):
            seen = Observation(step, *voting.each(reading), seen.mismatch)
            finding = monitor.judge(seen)
        self._seen = seen
        if reruns is not None:
            if self._attempt + 1 < MOST_ATTEMPTS and reruns.again(seen, finding):
                return False
            finding = reruns.verdict(seen, finding)
        if finding is not None and finding.action is Action.RERUN:
            finding = replace(finding, action=Action.SKIP, reason=f"{finding.reason}; skipped")
        self._settle(seen, finding, voting)
        return True

    def _settle(self, seen: Observation, finding: Finding | None, voting: Voting) -> None:
        self._monitor.settle(seen, finding)
        voting.found(finding)
        self.finding = finding
        self.accepted = finding is None or finding.action is Action.WARN
        if finding is None:
            return
        if self._rank == 0:
            _LOG.warning("%s", finding.reason)
        if self._gauge.bad:
            _LOG.warning("rank %d: gradients that are not finite: %s", self._rank, some(self._gauge.bad))
        if finding.action is Action.RAISE:
            error = NonFinite(finding.what, finding.value, finding.step)
            error.args = (finding.reason,)
            raise error

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of the numbers, and the budgets, as plain values."""
        reruns = {} if self._reruns is None else self._reruns.state_dict()
        return {"monitor": self._monitor.state(), "reruns": reruns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from a checkpoint; a rollback keeps the current budgets."""
        self._monitor.restore(state["monitor"])
        if self._reruns is not None and state["reruns"]:
            self._reruns.load_state_dict(state["reruns"])


def _at_odds(options: NumericsOptions, reruns: Reruns | None) -> Iterator[str]:
    """Yield actions and reruns that have no effect without each other."""
    wanting = [check for check in Check if options.checks(check) and options.action(check) is Action.RERUN]
    if reruns is None:
        for check in wanting:
            yield f"{check.value}_action: rerun needs what can do a step again (reruns=...)"
    elif not wanting and not reruns.always:
        yield (
            "reruns: has no effect, since no check calls for a rerun; set the action of one to rerun"
            ' (nan_in_loss_action="rerun"), or leave reruns out'
        )


def guard_of(state: Mapping[str, object], context: settings.WorkerContext) -> Guard | None:
    """Return the guard in a training state; None: there is none.

    Raises:
        UsageError: there are several, or none though the launcher was told what one does.
    """
    found = [one for one in state.values() if isinstance(one, Guard)]
    if len(found) > 1:
        raise UsageError(f"session.restore: found {len(found)} guards, expected one at most")
    if context.numerics and not found:
        raise UsageError(
            f"session.restore: the launcher's table [numerics] ({some(context.numerics)}) has no effect"
            " without a guard; pass guard=outlast.Guard(model, optimizer), or leave the table out"
        )
    if context.rerun and not (found and found[0].reruns is not None):
        raise UsageError(
            f"session.restore: the launcher's table [rerun] ({some(context.rerun)}) has no effect without"
            " what does steps again; pass guard=outlast.Guard(..., reruns=outlast.RerunStateMachine(...)), or"
            " leave the table out"
        )
    return found[0] if found else None
