"""The workers of one generation on this node: their pages, logs, processes and ends."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from outlast import files, settings
from outlast.cluster.policy.messages import Assignment
from outlast.errors import RunFolderUnusable, ScriptNotFound
from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.output import logs
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.output.terminals import Terminals
from outlast.launcher.workers import environment, processes
from outlast.launcher.workers.head_start import HeadStart
from outlast.launcher.workers.processes import Family, Worker
from outlast.observe.run_folder import RunFolder

_LOGS_EVERY = 1.0  # seconds between two tries to make the logs of a generation
_LOG_PATIENCE = 2.0  # seconds for what a rank left in its log: it decides who failed first


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a generation meet: the address of torch's store.

    Args:
        port: port of the TCPStore.
        host_pid: the process of this node that serves it; 0: there is none.
        host: its address.
        served: a process besides the ranks serves it, on this node or another; else rank 0 has to.
    """

    port: int
    host_pid: int = 0
    host: str = "127.0.0.1"
    served: bool = False


@dataclass(frozen=True)
class LaunchContext:
    """What every generation of a launcher has in common."""

    options: LaunchOptions
    folder: RunFolder
    runtime: Path
    run_id: str
    base: Mapping[str, str]
    head_start: HeadStart
    files: FileThread
    family: Family
    memory: Path | None = None
    lease: Path | None = None
    terminals: Terminals = field(default_factory=Terminals)
    credentials: Path | None = None
    address: str = "127.0.0.1"  # by which other nodes reach this one
    may_start: Callable[[], bool] = lambda: True  # else workers are not started yet


class Generation:
    """The workers of one generation; started once, ended once.

    Args:
        mine: what this node has to do with it.
        around: the launcher's options and folders.
        meeting: where the ranks meet.
        kept: workers of the generation before that go on in this one, by local rank.
    """

    def __init__(
        self,
        mine: Assignment,
        around: LaunchContext,
        meeting: Rendezvous,
        kept: Mapping[int, Worker] | None = None,
    ) -> None:
        self.number = mine.generation
        self.assignment = mine
        self.meeting = meeting
        self.world_size = mine.world_size
        self.ranks = range(mine.first_rank, mine.first_rank + around.options.world.nproc_per_node)
        self.spawned = time.monotonic()
        self._seated = {self.ranks.start + local: worker for local, worker in (kept or {}).items()}
        for rank, worker in self._seated.items():
            worker.rank = rank
        self.kept = frozenset(self._seated)
        self.start = ""
        self._around = around
        self.pages = self._make_pages()
        stragglers = around.options.config.stragglers
        for page in self.pages.values():
            page.agreement.serve()
            if stragglers.enabled:
                page.times.ask(stragglers.window)
        self.logs = {
            rank: replace(log, terminals=around.terminals.bits(local))
            for local, (rank, log) in enumerate(planned_logs(mine, around).items())
        }

    def _make_pages(self) -> dict[int, HeartbeatReader]:
        folder = self._around.runtime
        try:
            return {
                rank: HeartbeatReader(
                    folder / f"heartbeat-{self.number}-{rank}",
                    rank=rank,
                    generation=self.number,
                    spawned=self.spawned,
                )
                for rank in self.ranks
            }
        except OSError as error:
            raise RunFolderUnusable(
                f"runtime folder {folder}: {error.strerror}; no worker was started; make room there, then"
                " start the same command again"
            ) from error

    def stacks(self, rank: int) -> Path:
        """Return the file that a rank's stacks are written to."""
        return self._around.runtime / f"stacks-{self.number}-{rank}"

    def error_file(self, rank: int) -> Path:
        """Return the path of a rank's error file; it is in memory, because the disk may be the cause."""
        return self._around.runtime / f"error-{self.number}-{rank}.json"

    def exits(self, rank: int) -> bool:
        """Say whether a rank has called for an exit with an error code, such as ``sys.exit(7)``."""
        path = self.error_file(rank)
        return os.path.lexists(path.with_name(path.name + settings.EXITING))

    def failure(self, rank: int) -> logs.Failure | None:
        """Return the content of a rank's error file, if there is one."""
        self._around.terminals.pump()
        error_file, stderr = self.error_file(rank), self.logs[rank].stderr
        found = logs.failure_of(error_file, None)  # in memory
        return found or self._around.files.ask(
            lambda: logs.failure_of(error_file, stderr), None, _LOG_PATIENCE
        )

    def watchdog(self, rank: int) -> logs.Failure | None:
        """Return why NCCL's watchdog has ended a rank, if it has."""
        self._around.terminals.pump()
        stderr = self.logs[rank].stderr
        if stderr is None:
            return None
        return self._around.files.ask(lambda: logs.watchdog_in(stderr), None, _LOG_PATIENCE)

    def _variables(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank, in addition to the common ones."""
        around = self._around
        return {
            **environment.rank_environment(
                around.options,
                self.assignment,
                rank - self.ranks.start,
                around.run_id,
                (self.meeting.host, self.meeting.port, self.meeting.served),
            ),
            **environment.logger_variables(around.run_id, around.folder.root, rank, around.base),
            **environment.error_file(str(self.error_file(rank))),
            **settings.worker_variables(
                settings.WorkerContext(
                    generation=self.number,
                    run_dir=str(around.folder.root),
                    run_id=around.run_id,
                    heartbeat_path=str(self.pages[rank].path),
                    control_path=str(around.runtime / "control"),
                    memory_path=str(around.memory) if around.memory is not None else "",
                    node=around.options.nodes.name,
                    store_host=self.meeting.host,
                    parallelism=self.assignment.layout,
                    replaceable=int(around.options.nodes.replaceable),
                    lease_path=str(around.lease or ""),
                    gate_path=str(around.runtime / "gate"),
                    credentials_path=str(around.credentials or ""),
                    avoid=self.assignment.avoid,
                    **settings.options_of_ranks(around.options.config),
                    num_warmup_iterations=around.options.config.fault_tolerance.num_warmup_iterations,
                    warm_imports=int(around.options.warm_imports),
                )
            ),
        }

    @property
    def workers(self) -> list[Worker]:
        """The workers, in the order of their ranks."""
        return [worker for _, worker in sorted(self._seated.items())]

    @property
    def vacant(self) -> tuple[int, ...]:
        """The ranks that have no worker yet."""
        return tuple(rank for rank in self.ranks if rank not in self._seated)

    @property
    def own_variables(self) -> tuple[str, ...]:
        """The names of variables that differ from rank to rank, or from generation to generation."""
        return tuple(self._variables(self.ranks.start))

    def seat(self, rank: int) -> dict[str, object]:
        """Return what a worker gets from the zygote at its fork, or from the re-entry barrier."""
        return {
            "variables": self._variables(rank),
            "args": self._around.options.script.rank_args(rank - self.ranks.start),
            "stdout": self._stream(rank, "stdout"),
            "stderr": self._stream(rank, "stderr"),
            "stacks": str(self.stacks(rank)),
            "heartbeat": str(self.pages[rank].path),
        }

    def _stream(self, rank: int, name: str) -> str | None:
        """Return the file of a rank's stream; None: the stream is inherited."""
        log: Path | None = getattr(self.logs[rank], name)
        found = self._around.terminals.serve(rank - self.ranks.start, name, log)
        return None if found is None else str(found)

    def adopt(self, pids: Mapping[int, int]) -> None:
        """Add the workers that the zygote has forked, by rank."""
        self._begin_with("zygote")
        for rank, pid in pids.items():
            self._seat(Worker(rank, pid))

    def _seat(self, worker: Worker) -> None:
        self._around.family.hold(worker)
        self._seated[worker.rank] = worker
        self._bind(worker.rank)

    def _begin_with(self, how: str) -> None:
        kept = f", {len(self.kept)} of {len(self.ranks)} kept" if self.kept else ""
        self.start = self.start or how + kept

    def _bind(self, rank: int) -> None:
        """Keep a rank near its GPU (``--numa-binding``)."""
        cpus = self._around.options.cpus
        if cpus:
            processes.bind(self._seated[rank].pid, cpus[rank - self.ranks.start])

    def vacate(self, rank: int) -> None:
        """Remove a worker that was kept and has ended."""
        del self._seated[rank]

    def start_cold(self, why: str) -> None:
        """Start each rank that has no worker as a plain subprocess.

        Raises:
            ScriptNotFound: the kernel does not start such a program.
        """
        self._begin_with(f"cold: {why}")
        script = self._around.options.script
        for rank in self.vacant:
            command = script.command(sys.executable, rank - self.ranks.start)
            outputs = (self._stream(rank, "stdout"), self._stream(rank, "stderr"))
            try:
                worker = processes.start_cold(
                    rank, command, {**self._around.base, **self._variables(rank)}, outputs
                )
            except OSError as error:
                raise ScriptNotFound(
                    f"program {command[0]!r} cannot be started: {error.strerror}; the job ends"
                ) from error
            self._seat(worker)

    def worker(self, rank: int) -> Worker:
        """Return the worker of a rank."""
        return self._seated[rank]

    @property
    def leaves(self) -> float:
        """The latest time at which a worker exits after a notice; 0: no worker has named one."""
        return max((page.leaves() for page in self.pages.values()), default=0.0)

    def living(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.workers if worker.exit_code is None]

    def release(self, kept: Iterable[Worker]) -> None:
        """Remove workers that go on in another generation."""
        for worker in kept:
            del self._seated[worker.rank]

    def discard(self) -> None:
        """Discard a generation that was never started."""
        for page in self.pages.values():
            page.close()

    def end(self) -> None:
        """Close the pages, and keep the error files; the workers have been killed."""
        self._around.terminals.pump()
        for page in self.pages.values():
            page.close()
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                os.unlink(self.stacks(rank))
            found, kept = self.error_file(rank), self.logs[rank].error_file
            if os.path.lexists(found):
                self._around.files.hand(functools.partial(logs.keep_error, found, kept))


def planned_logs(mine: Assignment, around: LaunchContext) -> dict[int, logs.Destination]:
    """Return where the streams of each rank of this node go in a generation."""
    spec, world = around.options.logs, around.options.world
    ranks = range(mine.first_rank, mine.first_rank + world.nproc_per_node)
    return {
        rank: logs.plan(spec, around.folder.logs, (mine.generation, rank, local, mine.world_size), world.role)
        for local, rank in enumerate(ranks)
    }


class LogFiles:
    """The log files of a generation; they exist before its ranks are started.

    A rank without them would die of it, again and again. While the file system does not answer, nothing is
    started, and nothing else waits. An error of it is waited out for ``max_failed_seconds``, but at the first
    start.

    Args:
        mine: what this node has to do with the generation.
        around: the launcher's options and folders.
    """

    def __init__(self, mine: Assignment, around: LaunchContext) -> None:
        self._outcome: list[RunFolderUnusable | None] = []
        self._wanted = tuple(planned_logs(mine, around).values())
        self._folder, self._files = around.folder, around.files
        patience = around.options.config.checkpoints.max_failed_seconds if mine.generation > 1 else 0.0
        self._again_at = time.monotonic() + _LOGS_EVERY
        self._until = time.monotonic() + patience
        around.files.hand(self._make)

    def there(self) -> bool:
        """Return whether they exist.

        Raises:
            RunFolderUnusable: there is no room for them.
        """
        trouble = self._outcome[0] if self._outcome else None
        if trouble is None:
            return bool(self._outcome)
        now = time.monotonic()
        if now > self._until or not isinstance(trouble.__cause__, OSError):
            raise trouble
        if now > self._again_at:
            self._again_at = now + _LOGS_EVERY
            self._outcome.clear()
            self._files.hand(self._make)
        return False

    def _make(self) -> None:
        try:
            for one in self._wanted:
                _make_logs(one, self._folder)
        except RunFolderUnusable as error:
            self._outcome.append(error)
        else:
            self._outcome.append(None)


def _make_log(path: Path) -> None:
    """Make a log file in the place of anything else that a rank of an earlier generation has put there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        os.close(files.open_regular(path, flags))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.EMLINK):
            raise
        files.remove(path)
        os.close(files.open_regular(path, flags))


def _make_logs(destination: logs.Destination, run: RunFolder) -> None:
    """Make a rank's log files.

    Raises:
        RunFolderUnusable: there is no room for them, or the run folder was moved away.
    """
    folder = destination.folder
    if run.moved():
        raise RunFolderUnusable(
            f"run folder {run.root} was moved, renamed or removed while the job ran; no worker was started;"
            " put it back and start the same command again, or start it with --run-dir and the new path"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for log in (destination.stdout, destination.stderr):
            if log is not None and log.parent == folder:
                _make_log(log)
    except OSError as error:
        raise RunFolderUnusable(
            f"{error.filename or folder}: {error.strerror}; no worker was started; make room, then start the"
            " same command again"
        ) from error
