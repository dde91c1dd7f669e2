"""The processes and checkpoints of a live run, found from its event log.

A pid in a log is only a number: the process may have ended and the number may belong to
somebody else by now. So a process is held by a pidfd first, and compared with the log then;
a signal goes to the pidfd.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.core import codec
from outlast.core.errors import UsageError
from outlast.core.events import GenerationStarted, Record, RunEnded, RunStarted
from outlast.observe.run_folder import RunFolder
from outlast.transport.processes import boot_id, start_ticks, state_of

if TYPE_CHECKING:
    from pathlib import Path

_SLACK = 0.5  # seconds; the kernel counts start times in hundredths, a record is written a moment later


@dataclass(frozen=True)
class LiveRun:
    """What the log says about the newest launch and generation of a run, or of one node of it.

    Args:
        folder: its run folder.
        launch: the newest launch.
        generation: the newest generation of that launch, None before the workers exist.
        ended: the launcher has written that it is done.
    """

    folder: RunFolder
    launch: RunStarted
    generation: GenerationStarted | None
    ended: bool

    @property
    def node(self) -> str:
        """Return the name of the node, where the job has several."""
        return "" if self.folder.own == self.folder.root else self.folder.own.name

    @property
    def ranks(self) -> int:
        """Return how many ranks the newest generation has here."""
        return 0 if self.generation is None else len(self.generation.pids)


class Follower:
    """Reads an event log as it grows; a line is read once it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._rest = b""

    def records(self) -> list[Record]:
        """Return the records that were written since the last call; lines of newer versions are left out."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return []
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        found = [codec.decode(line.decode()) for line in lines if line.strip()]
        return [record for record in found if isinstance(record, Record)]


def find(run_dir: str | os.PathLike[str], node: str = "") -> LiveRun:
    """Read the event log of a run folder; of a job of several nodes, that of the one that runs on this host.

    Args:
        run_dir: the run folder.
        node: name of the node; empty: there is one only, or one of this host's runs.

    Raises:
        UsageError: there is no log, or no launch in it; or several nodes run on this host.
    """
    job = RunFolder(run_dir)
    names = job.node_events()
    if node and node not in names:
        known = ", ".join(names) or "none: the job has one node"
        raise UsageError(
            f"--node {node}: no node of {job.root} has this name ({known}); nothing was injected"
        )
    if node or not names:
        return _newest(RunFolder(run_dir, node))
    runs = {name: _newest(RunFolder(run_dir, name)) for name in names}
    here = {name: run for name, run in runs.items() if not run.ended and _is_here(run)}
    if len(here) > 1:
        raise UsageError(f"{job.root}: {', '.join(here)} run on this host: say which one with --node")
    if not here:
        raise UsageError(f"{job.root}: none of {', '.join(names)} runs on this host; nothing was injected")
    return next(iter(here.values()))


def _is_here(run: LiveRun) -> bool:
    try:
        os.close(_hold_agent(run))
    except UsageError:
        return False
    return True


def _newest(folder: RunFolder) -> LiveRun:
    launch: RunStarted | None = None
    generation: GenerationStarted | None = None
    ended = False
    for record in Follower(folder.events).records():
        if isinstance(record, RunStarted):
            launch, generation, ended = record, None, False
        elif isinstance(record, GenerationStarted):
            generation = record
        elif isinstance(record, RunEnded):
            ended = True
    if launch is None:
        raise UsageError(f"{folder.own}: no run was started in this folder; nothing was injected")
    return LiveRun(folder, launch, generation, ended)


def signal_agent(run: LiveRun, number: int) -> int:
    """Send a signal to the agent; return its pid.

    Raises:
        UsageError: the agent has ended.
    """
    descriptor = _hold_agent(run)
    try:
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
    return run.launch.pid


def signal_rank(run: LiveRun, rank: int, number: int) -> int:
    """Send a signal to a rank's worker; return its pid.

    Raises:
        UsageError: there is no such rank, or its process is not this run's any more.
    """
    if run.generation is None:
        raise UsageError(f"{run.folder.root}: no workers have been started yet; nothing was injected")
    pids = run.generation.pids
    if not 0 <= rank < len(pids):
        whose = f"node {run.node}" if run.node else "this run"
        raise UsageError(f"rank {rank}: {whose} has ranks 0 to {len(pids) - 1}; nothing was injected")
    os.close(_hold_agent(run))
    what = f"the worker of rank {rank} in generation {run.generation.generation}"
    descriptor = _hold(pids[rank], run.generation.clock, what)
    try:
        if _parent_of(pids[rank]) != run.launch.pid:
            raise UsageError(
                f"pid {pids[rank]} is no child of the agent, so it is not {what}; nothing was injected"
            )
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
    return pids[rank]


def _hold_agent(run: LiveRun) -> int:
    if run.launch.boot_id != boot_id():
        raise UsageError(
            f"{run.folder.root}: this run was started before this host was; nothing was injected"
        )
    return _hold(run.launch.pid, run.launch.clock, "the agent")


def _hold(pid: int, known_at: float, what: str) -> int:
    """Return a pidfd of a live process that had started when the log named it.

    Args:
        known_at: monotonic seconds of the record that names the pid.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise UsageError(f"pid {pid}, {what}, has ended; nothing was injected") from error
    if state_of(pid) in ("", "Z", "X"):
        os.close(descriptor)
        raise UsageError(f"pid {pid}, {what}, has ended; nothing was injected")
    if started_at(pid) > known_at + _SLACK:
        os.close(descriptor)
        raise UsageError(f"pid {pid} was {what} and belongs to another process now; nothing was injected")
    return descriptor


def started_at(pid: int) -> float:
    """Return when a process started, in monotonic seconds; 0 when it is gone."""
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()  # suspended time counts in ticks only
    ticks = start_ticks(pid)
    return ticks / os.sysconf("SC_CLK_TCK") - asleep if ticks else 0.0


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def newest_checkpoint(run: LiveRun) -> Path:
    """Return the committed checkpoint of the highest step.

    Raises:
        UsageError: there is none.
    """
    found = [path.parent for path in run.folder.checkpoints.glob("step-*.g*/COMMIT")]
    if not found:
        raise UsageError(f"{run.folder.checkpoints}: no committed checkpoint; nothing was injected")
    return max(found, key=_step_and_generation)


def _step_and_generation(folder: Path) -> tuple[int, int]:
    step, _, generation = folder.name.removeprefix("step-").partition(".g")
    return int(step), int(generation)
