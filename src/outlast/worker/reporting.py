"""Where a session's records go: to the agent, or straight into the event log when there is none."""

from __future__ import annotations

import os
import sys

from outlast.core import codec
from outlast.core.events import Record, RunStarted
from outlast.core.ports import Clock
from outlast.observe.recorder import Recorder
from outlast.observe.run_folder import RunFolder
from outlast.settings import WorkerContext
from outlast.transport.control import Reporter
from outlast.transport.processes import boot_id


class Reporting:
    """Passes records on; never raises and never waits long.

    Args:
        context: what the launcher said; without one, rank 0 writes the log and the others keep quiet.
        folder: the run folder.
    """

    def __init__(self, context: WorkerContext, folder: RunFolder) -> None:
        self._rank = context.rank
        self._reporter = Reporter(context.control_path) if context.control_path else None
        self._recorder = Recorder(folder.events) if self._reporter is None and self._rank == 0 else None

    def open_log(self, run_id: str, world_size: int, clock: Clock) -> None:
        """Write the first record of a run that has no launcher."""
        self.record(
            RunStarted(
                time=clock.wall(),
                clock=clock.monotonic(),
                generation=0,
                run_id=run_id,
                node=os.uname().nodename,
                pid=os.getpid(),
                boot_id=boot_id(),
                command=tuple(sys.argv),
                world_size=world_size,
                reason="started without a launcher: saves and loads are recorded, faults are not watched",
            )
        )

    def record(self, record: Record) -> None:
        """Pass one record on."""
        if self._reporter is not None:
            self._reporter.send(codec.encode(record))
        elif self._recorder is not None:
            self._recorder.record(record)
