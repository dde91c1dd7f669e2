"""What a rank reports: a session's records, and the progress of a script without a session.

Records go to the agent, or into the event log if there is no agent.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from dataclasses import replace

from outlast import settings
from outlast.errors import UsageError
from outlast.hang.worker import heartbeat
from outlast.ipc.control import Reporter
from outlast.ipc.processes import boot_id
from outlast.observe.policy import codec
from outlast.observe.recorder import Recorder
from outlast.observe.run_folder import RunFolder
from outlast.ports import Clock
from outlast.recovery.policy.events import CannotSave, Record, RunStarted, ScriptSaved, StepsPlanned
from outlast.settings import WorkerContext


class Reporting:
    """Sends records; never raises and never blocks for long.

    Args:
        context: what the launcher said; without a launcher only rank 0 writes the log.
        folder: the run folder.
    """

    def __init__(self, context: WorkerContext, folder: RunFolder) -> None:
        self._rank = context.rank
        self.generation = context.generation  # without a launcher it is known once the folder is claimed
        self._reporter = Reporter(context.control_path) if context.control_path else None
        self._recorder = Recorder(folder.events) if self._reporter is None and self._rank == 0 else None

    def open_log(self, run_id: str, world_size: int, clock: Clock) -> None:
        """Write the first record of a run without a launcher."""
        self.record(
            RunStarted(
                time=clock.wall(),
                clock=clock.monotonic(),
                generation=self.generation,
                run_id=run_id,
                node=os.uname().nodename,
                pid=os.getpid(),
                boot_id=boot_id(),
                command=tuple(sys.argv),
                world_size=world_size,
                reason="started without a launcher: saves and loads are recorded, faults are not watched",
            )
        )

    def planned(self, total: int, clock: Clock) -> None:
        """Report after how many steps the loop ends; one rank is enough."""
        if self._rank == 0 and isinstance(total, int):
            self.record(StepsPlanned(clock.wall(), clock.monotonic(), self.generation, total))

    def record(self, record: Record) -> None:
        """Send one record."""
        if self._reporter is not None:
            self._reporter.send(codec.encode(record))
        elif self._recorder is not None:
            self._recorder.record(replace(record, generation=self.generation))


_MOST = 1 << 62


def progress(step: int, saved: bool = False) -> None:
    """Report the progress of a script without a session; has an effect only under ``outlast run``.

    Call it on the main thread of every rank, after each step or every few steps. It does not touch
    checkpoints. A step may be lower than the one before: the script went back.

    Args:
        step: completed steps, counted over all restarts.
        saved: a complete checkpoint of the script's own exists at that step, which may be an earlier one than
            the last step reported. One rank is enough.

    Raises:
        UsageError: the step is not a whole number from 0 on, or this process has a session, which reports
            its steps itself.
    """
    done = _checked(step)
    if not isinstance(saved, bool):
        raise UsageError(
            f"outlast.progress: saved is {saved!r}, expected True or False; nothing was announced"
        )
    _announce(done, saved, -1)


def resumed(step: int) -> None:
    """Report the completed steps with which a framework begins; :func:`progress` reports what follows.

    Raises:
        UsageError: as :func:`progress`.
    """
    _announce(_checked(step), False, -1, resumed=True)


def saved(step: int, agreed: int) -> None:
    """Report a complete checkpoint of a framework, as :func:`progress` reports one of the script's own.

    Args:
        step: completed steps, counted over all restarts.
        agreed: the number of that step where the ranks agree on one.
    """
    _announce(step, True, agreed)


def cannot_save(step: int, reason: str) -> None:
    """Report that a framework has no place for a checkpoint; has an effect only under ``outlast run``."""
    context = settings.worker_context()
    if context.control_path:
        record = CannotSave(time.time(), time.monotonic(), context.generation, step, reason)
        Reporter(context.control_path).send(codec.encode(record))


def _announce(step: int, saved: bool, agreed: int, resumed: bool = False) -> None:
    context = settings.worker_context() if saved or not heartbeat.announces() else None
    if context is not None and not context.heartbeat_path:
        return
    if context is not None:
        heartbeat.begin_announcing(context.heartbeat_path, context.num_warmup_iterations)
    heartbeat.announce(step, saved, resumed)
    if saved and context is not None:
        record = ScriptSaved(time.time(), time.monotonic(), context.generation, step, agreed)
        Reporter(context.control_path).send(codec.encode(record))


def _checked(step: object) -> int:
    try:
        done = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]  # anything
    except TypeError:
        done = -1
    if not 0 <= done < _MOST:
        raise UsageError(
            f"outlast.progress: step is {step!r:.80}, expected a whole number from 0 on;"
            " nothing was announced"
        )
    return done
