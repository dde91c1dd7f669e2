"""Fault injection from outside: by a signal, or in a file.

The processes and checkpoints of a live run are found from its event log. A pid in a log may belong to another
process by now, so a process is held by a pidfd first and compared with the log then; signals go to the pidfd.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.chaos.policy import FAULTS, Observation, Place, Target
from outlast.errors import UsageError
from outlast.ipc.processes import boot_id, start_ticks, state_of
from outlast.observe.policy import codec
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import (
    FirstStep,
    GenerationStarted,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    TimeoutsLearned,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


PAGE = 4096

SIGNALS: dict[str, int] = {
    "rank_killed": signal.SIGKILL,
    "rank_hung": signal.SIGSTOP,
    "OS_ABORT": signal.SIGABRT,
    "SEGFAULT": signal.SIGSEGV,
    "SIGINT": signal.SIGINT,
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGSTOP": signal.SIGSTOP,
    "agent_killed": signal.SIGKILL,
}


@dataclass(frozen=True)
class Made:
    """A fault that was made.

    Args:
        fault: its name in the table of faults.
        rank: whose worker, -1 where the target is not a worker.
        detail: one phrase: to which process, file and place.
        clock: monotonic seconds of the moment before it took effect.
    """

    fault: str
    rank: int
    detail: str
    clock: float


def inject(run: LiveRun, fault: str, rank: int, seed: int) -> Made:
    """Make a fault in a live run.

    Args:
        run: the run, as :func:`find` reads it.
        fault: a key of FAULTS.
        rank: whose worker; ignored where the target is not a worker.
        seed: chooses file, bit and the like.

    Raises:
        UsageError: it cannot be made from outside, or its target does not exist.
    """
    spec = FAULTS[fault]
    if spec.place is Place.CUDA:
        require_cuda(fault)
    if spec.place is not Place.OUTSIDE:
        raise UsageError(
            f"{fault} can only be made inside the worker: start the script through "
            f"`outlast run ... -m outlast.chaos.inprocess -- --fault {fault} --rank {max(rank, 0)} SCRIPT`"
        )
    clock = time.monotonic()
    if spec.target is Target.CHECKPOINT:
        folder = newest_checkpoint(run)
        return Made(fault, -1, _CORRUPTIONS[fault](folder, random.Random(seed)), clock)
    if spec.target is Target.AGENT:
        pid = signal_agent(run, SIGNALS[fault])
        return Made(fault, -1, f"{signal.Signals(SIGNALS[fault]).name} to agent {pid}", clock)
    pid = signal_rank(run, rank, SIGNALS[fault])
    return Made(fault, rank, f"{signal.Signals(SIGNALS[fault]).name} to process {pid}", clock)


def require_cuda(fault: str) -> None:
    """Refuse a fault that only a CUDA device can have.

    Raises:
        UsageError: torch sees no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"{fault} needs a CUDA device and torch sees none; choose one of the other faults")


def flip_bit(folder: Path, dice: random.Random) -> str:
    """Flip one bit of one shard of a checkpoint; return which."""
    path = _pick(folder, "*.safetensors", dice)
    offset, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
    _change(path, offset, lambda old: bytes([old[0] ^ (1 << bit)]), 1)
    return f"{folder.name}/{path.name}: bit {bit} of byte {offset}"


def zero_page(folder: Path, dice: random.Random) -> str:
    """Overwrite one page of a shard that is not zero already with zeros; return which."""
    path = _pick(folder, "*.safetensors", dice)
    pages = list(range(-(-path.stat().st_size // PAGE)))
    dice.shuffle(pages)
    for page in pages:
        if _change(path, page * PAGE, lambda old: bytes(len(old)), PAGE):
            return f"{folder.name}/{path.name}: page {page}"
    raise UsageError(f"{path}: every page is zero already; nothing was injected")


def truncate(folder: Path, dice: random.Random) -> str:
    """Truncate one file of a checkpoint; return which."""
    path = _pick(folder, "*", dice)
    size = path.stat().st_size
    left = dice.randrange(size)
    os.truncate(path, left)
    return f"{folder.name}/{path.name}: {left} of {size} bytes left"


_CORRUPTIONS: dict[str, Callable[[Path, random.Random], str]] = {
    "bit_flipped": flip_bit,
    "page_zeroed": zero_page,
    "file_truncated": truncate,
}


def _pick(folder: Path, pattern: str, dice: random.Random) -> Path:
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size)
    if not found:
        raise UsageError(f"{folder}: no file {pattern} with content; nothing was injected")
    return dice.choice(found)


def _change(path: Path, offset: int, change: Callable[[bytes], bytes], length: int) -> bool:
    """Rewrite bytes in place; return False when they were the same already."""
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(length)
        new = change(old)
        if new == old:
            return False
        file.seek(offset)
        file.write(new)
        file.flush()
        os.fsync(file.fileno())
    return True


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
    """Reads an event log as it grows; a line is read when it is complete."""

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
    """Read the event log of a run folder; in a job of several nodes, that of the node on this host.

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


_TAIL = 4096  # bytes; a line of a trace is shorter


class Observer:
    """Follows a run from outside; never touches it.

    Args:
        events: path of the event log; it need not exist yet.
        traces: folder with a trace a rank, from which the step is exact; None: the event log's
            own records of progress, which come now and then.
    """

    def __init__(self, events: Path, traces: Path | None = None) -> None:
        self.records: list[Record] = []
        self._follower = Follower(events)
        self._traces = traces
        self._generation = 0
        self._step = 0
        self._running = False
        self._learned = False
        self._saves = 0
        self._pids: tuple[int, ...] = ()
        self.agents: list[int] = []
        self.workers: list[int] = []

    def look(self) -> Observation:
        """Read what is new and return what is known now."""
        for record in self._follower.records():
            self.records.append(record)
            self._take(record)
        if self._traces is not None and self._running:
            self._step = self._traced_step()
        return Observation(self._generation, self._step, self._running, self._learned, self._saves)

    def newest_workers(self) -> tuple[int, ...]:
        """Return the pids of the newest generation, by rank."""
        return self._pids

    def _take(self, record: Record) -> None:
        if isinstance(record, RunStarted):
            self._running = False
            self.agents.append(record.pid)
        elif isinstance(record, GenerationStarted):
            self._generation, self._running, self._pids = record.generation, False, record.pids
            self.workers.extend(record.pids)
        elif isinstance(record, FirstStep):
            self._running = record.generation == self._generation
            self._step = record.step
        elif isinstance(record, Progress):
            self._step = record.step
        elif isinstance(record, TimeoutsLearned):
            self._learned = True
        elif isinstance(record, Saved):
            self._saves += 1

    def _traced_step(self) -> int:
        assert self._traces is not None
        steps = [_last_step(self._traces / f"rank-{rank:05d}.jsonl") for rank in range(len(self._pids))]
        return min(steps, default=-1) + 1


def _last_step(trace: Path) -> int:
    """Return the step of the last whole line of a trace, -1 when there is none."""
    try:
        with open(trace, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - _TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return -1
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else -1
