"""Loops whose framework has checkpoints of its own: their steps, saves, sections and preemption.

Outside of ``outlast run`` nothing here has an effect.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
from collections.abc import Callable
from enum import Enum
from importlib import metadata
from typing import Any

from outlast import settings
from outlast.agreement.policy.steps import Proposal, Want
from outlast.agreement.policy.votes import StepOutcome, action_of
from outlast.agreement.worker.agent_agreement import AgentAgreement, Terms
from outlast.errors import ExitCode, UsageError
from outlast.hang.policy.timeouts import section_of_user
from outlast.hang.worker import heartbeat
from outlast.inprocess.worker.cleanup import when_left
from outlast.ipc.exchange import SystemClock
from outlast.ipc.heartbeat_page import RankState
from outlast.preemption import worker as preemption_worker
from outlast.preemption.worker import PreemptionHandler
from outlast.stragglers.worker import benchmark
from outlast.worker import reporting

_LOG = logging.getLogger("outlast")
_NO_SAVE = Want.BENCHMARK | Want.REBALANCE  # the script's loop divides its batches itself


class SaveState(Enum):
    """What has become of a checkpoint that a rank does its part of."""

    COMPLETED = "completed"
    LOST = "lost"
    UNDER_WAY = "under way"


class _Here:
    """The loop that announces the steps of this process."""

    loop: AnnouncedLoop | None = None


class AnnouncedLoop:
    """A loop that reports what it does; it is inert outside of ``outlast run``.

    Args:
        who: what messages call it, such as ``OutlastCallback``.
        implied: nobody asked for it, so it gives way to a session or another loop without a word.
    """

    def __init__(self, who: str = "the loop", implied: bool = False) -> None:
        self._who = who
        self._implied = implied
        self._context = settings.worker_context()
        self._listener: PreemptionHandler | None = None
        self._agreement: AgentAgreement | None = None
        self._open: Any = None
        self._tried = self._began = self._asked = False
        self._steps_here = 0  # what ranks agree on; a framework may count a step of each optimizer
        # A save, by its step and by the steps here, and what says whether it was completed.
        self._unannounced: tuple[int, int, Callable[[], SaveState]] | None = None
        self._clock = SystemClock()
        self.should_save = False
        self.should_stop = False

    @property
    def active(self) -> bool:
        """Whether it reports: ``outlast run`` started this process, and no other loop reports."""
        return bool(self._context.heartbeat_path) and _Here.loop in (None, self)

    def begin(self, step: int) -> None:
        """Begin to report; every rank calls it on its main thread, at the same step, or leaves it out.

        Args:
            step: completed steps, over all restarts.

        Raises:
            UsageError: this process has a session, which reports its steps itself.
        """
        if not self._context.heartbeat_path or self._tried:
            return
        self._tried = True
        if not self.active and self._implied:
            return
        if not self.active:
            _LOG.warning("%s: ignored, since another one already reports this process's steps", self._who)
            return
        try:
            reporting.resumed(step)
        except UsageError:
            if self._implied:
                return
            raise
        _Here.loop, self._began, self._steps_here = self, True, 0
        self.should_save = self.should_stop = self._asked = False
        self._listener = preemption_worker.install()
        page = heartbeat.attach(None)
        if self._listener is not None and page.agreement.served:
            self._agreement = AgentAgreement(page, self._context.control_path, self._terms)
            self._agreement.begin(0)
        when_left(self.forget)
        heartbeat.tell_of_collectives()
        _collect_what_is_due()

    def step_done(self, step: int) -> int:
        """Report so many completed steps, and take note of what all ranks have agreed to do after them.

        Afterwards :attr:`should_save` and :attr:`should_stop` are equal on every rank.
        """
        self.begin(step - 1)
        if not self._began:
            return step
        self.leave_section()
        self._announce_save()
        reporting.progress(step)
        self._steps_here += 1
        self.should_save = self.should_stop
        if self._agreement is None or self.should_stop:
            return step
        if self._listener is not None and self._listener.asked and not self._asked:
            self._asked = True
            self._agreement.ask(Want.PREEMPTED)
        said = self._agreement.decided(self._steps_here)
        if said is not None:
            self._act(said)
        return step

    def _act(self, said: Proposal) -> None:
        """Do what all ranks have agreed on; the script saves and stops."""
        assert self._agreement is not None
        if Want.BENCHMARK in said.wants:
            benchmark.compute(heartbeat.attach(None))
        do = action_of(said.vote(self._clock.monotonic())).do
        self.should_save = bool(said.wants & ~_NO_SAVE)
        self.should_stop = do in (StepOutcome.GIVE_BACK, StepOutcome.STOP)
        if self.should_stop:
            self._agreement.close()
        else:
            self._agreement.begin(self._steps_here)

    def _terms(self) -> Terms:
        listener, now = self._listener, self._clock.monotonic()
        if listener is None or not listener.asked:
            return math.inf, math.inf, {}
        return now + listener.left(now), now + listener.limit(now), {}

    def saved(self, step: int, state: Callable[[], SaveState] = lambda: SaveState.COMPLETED) -> None:
        """Take note that this rank does its part of a checkpoint at a step.

        Rank 0, which writes it, reports it when the next step is completed, or its loop has ended.

        Args:
            step: completed steps, over all restarts.
            state: says then what has become of the checkpoint; while it is being written, the question is put
                again after each step.
        """
        if self._began and self._context.rank == 0:
            self._unannounced = step, self._steps_here, state

    def cannot_save(self, step: int, reason: str) -> None:
        """Report, at a step, that the script has no place for a checkpoint, so that nothing waits for one."""
        _LOG.warning("%s: %s, so nothing is saved", self._who, reason)
        if self._began and self._context.rank == 0:
            reporting.cannot_save(step, reason)

    def _announce_save(self) -> None:
        if self._unannounced is None:
            return
        step, here, state = self._unannounced
        found = state()
        if found is SaveState.UNDER_WAY:
            return
        self._unannounced = None
        if found is SaveState.COMPLETED:
            reporting.saved(step, here)
        else:
            _LOG.warning("%s: the save at step %d was not completed; it does not count", self._who, step)

    def enter_section(self, name: str) -> None:
        """Open a section with a timeout of its own, or report that the rank is alive in the open one."""
        if not self._began:
            return
        page = heartbeat.attach(None)
        if self._open is None:
            self._open = heartbeat.timed(page.section(section_of_user(name)))
            self._open.__enter__()
        page.repeat()

    def alive(self) -> None:
        """Report that the rank is alive, between two steps."""
        if self._began:
            heartbeat.attach(None).repeat()

    def leave_section(self) -> None:
        """Close the open section, if there is one."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            heartbeat.attach(None).touch()

    def end(self) -> None:
        """End the report; this rank's part of a checkpoint is complete.

        Raises:
            SystemExit: the job is given back: exit code 75.
        """
        if not self._began:
            return
        self.leave_section()
        self._announce_save()
        page = heartbeat.attach(None)
        page.repeat()
        page.set_state(RankState.DONE)
        self.forget()
        if self._listener is None:
            return
        if self.should_stop:
            self._listener.resign(f"{self._who}: the loop has ended after the step that all ranks agreed on")
            sys.exit(int(ExitCode.PREEMPTED))
        self._listener.release()

    def forget(self) -> None:
        """End the report without a word: the loop was left by an exception."""
        if _Here.loop is self:
            _Here.loop = None
        self._tried = self._began = False
        self._unannounced = None
        if self._agreement is not None:
            self._agreement.end()
            self._agreement = None

    def __enter__(self) -> AnnouncedLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()


def _collect_what_is_due() -> None:
    """Collect garbage here if Python would do it in the next step that makes many objects, such as a save.

    An interpreter that imports all by itself has done it meanwhile; a fork of the zygote has not.
    """
    if gc.isenabled() and gc.get_count()[2] > gc.get_threshold()[2]:
        gc.collect()


def require(package: str, needed: tuple[int, int], what: str) -> None:
    """Check that a framework is installed, and new enough.

    Args:
        package: its name in the package index.
        needed: major and minor number of the oldest version that works.
        what: is used of outlast.

    Raises:
        UsageError: it is missing or too old.
    """
    wanted = f"{package} {needed[0]}.{needed[1]} or newer"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UsageError(f"{what}: found no {package}, needs {wanted}; pip install {package}") from None
    numbers = [int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[:2]]
    if tuple(numbers) < needed:
        raise UsageError(f"{what}: found {package} {found}, needs {wanted}; pip install -U {package}")
