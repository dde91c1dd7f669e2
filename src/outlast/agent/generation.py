"""The workers of one generation on this node: their pages, logs, processes and ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast import settings
from outlast.agent import environment, logs, processes
from outlast.agent.options import LaunchOptions
from outlast.agent.processes import Reaper, Worker
from outlast.observe.run_folder import RunFolder
from outlast.transport.pulse import PulseReader


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a generation meet: the address of torch's store.

    Args:
        port: port of the TCPStore on loopback.
        host_pid: the process that serves it; 0 when rank 0 has to.
    """

    port: int
    host_pid: int = 0


@dataclass(frozen=True)
class Surroundings:
    """What every generation of a launcher has in common."""

    options: LaunchOptions
    folder: RunFolder
    runtime: Path
    run_id: str
    base: Mapping[str, str]
    memory: Path | None = None


class Generation:
    """One membership of ranks; made for a number, started once, ended once.

    Args:
        number: the generation.
        around: the launcher's options and folders.
        meeting: where the ranks meet.
        avoid: checkpoints that must not be loaded.
    """

    def __init__(
        self, number: int, around: Surroundings, meeting: Meeting, avoid: Sequence[str] = ()
    ) -> None:
        self.number = number
        self.meeting = meeting
        self.world_size = around.options.world.nproc_per_node
        self.spawned = time.monotonic()
        self.workers: list[Worker] = []
        self.start = ""
        self._around = around
        self.avoid = tuple(avoid)
        ranks = range(self.world_size)
        self.pages = [
            PulseReader(
                around.runtime / f"pulse-{number}-{rank}", rank=rank, generation=number, spawned=self.spawned
            )
            for rank in ranks
        ]
        self.logs = [
            logs.plan(
                around.options.logs,
                around.folder.logs,
                (number, rank, self.world_size),
                around.options.world.role,
            )
            for rank in ranks
        ]
        for destination in self.logs:
            destination.folder.mkdir(parents=True, exist_ok=True)

    def stacks(self, rank: int) -> Path:
        """Return the file that a rank's stacks are written to."""
        return self._around.runtime / f"stacks-{self.number}-{rank}"

    def error_file(self, rank: int) -> Path:
        """Return where a rank leaves its exception: in memory, since the disk may be what failed it."""
        return self._around.runtime / f"error-{self.number}-{rank}.json"

    def failure(self, rank: int) -> logs.Failure | None:
        """Return the exception that a rank left, if it left one."""
        return logs.failure_of(self.error_file(rank), self.logs[rank].stderr)

    def _variables(self, rank: int) -> dict[str, str]:
        """Return what the rank's environment has on top of the common variables."""
        around = self._around
        return {
            **environment.rank_environment(
                around.options,
                rank,
                (around.run_id, self.number),
                (self.meeting.port, self.meeting.host_pid > 0),
                str(self.error_file(rank)),
            ),
            **settings.worker_variables(
                settings.WorkerContext(
                    generation=self.number,
                    run_dir=str(around.folder.root),
                    run_id=around.run_id,
                    pulse_path=str(self.pages[rank].path),
                    control_path=str(around.runtime / "control"),
                    memory_path=str(around.memory) if around.memory is not None else "",
                    avoid=self.avoid,
                    checkpoints=settings.named_checkpoints(around.options.config.checkpoints),
                    num_warmup_iterations=around.options.config.fault_tolerance.num_warmup_iterations,
                )
            ),
        }

    def seats(self) -> list[dict[str, object]]:
        """Return the zygote's order: one entry a rank."""
        return [
            {
                "variables": self._variables(rank),
                "args": self._around.options.script.rank_args(rank),
                "stdout": _text(self.logs[rank].stdout),
                "stderr": _text(self.logs[rank].stderr),
                "stacks": str(self.stacks(rank)),
                "pulse": str(self.pages[rank].path),
            }
            for rank in range(self.world_size)
        ]

    def adopt(self, pids: Sequence[int]) -> None:
        """Take hold of the workers that the zygote has forked."""
        self.start = "zygote"
        self.workers = processes.adopt(pids)

    def start_cold(self, why: str) -> None:
        """Start each rank as a plain subprocess."""
        self.start = f"cold: {why}"
        script = self._around.options.script
        for rank in range(self.world_size):
            worker = processes.start_cold(
                rank,
                script.command(sys.executable, rank),
                {**self._around.base, **self._variables(rank)},
                (_text(self.logs[rank].stdout), _text(self.logs[rank].stderr)),
            )
            self.workers.append(worker)

    def living(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.workers if worker.exit_code is None]

    def discard(self) -> None:
        """Give up a generation that was never started."""
        for page in self.pages:
            page.close()

    def end(self, reaper: Reaper) -> list[Worker]:
        """Kill what lives, close the pages; return the workers that the kernel does not let die."""
        stuck = processes.kill_all(self.workers, reaper)
        for page in self.pages:
            page.close()
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):
                os.unlink(self.stacks(rank))
            with contextlib.suppress(OSError):
                shutil.move(self.error_file(rank), self.logs[rank].error_file)
        return stuck


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
