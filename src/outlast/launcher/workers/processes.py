"""Worker processes as the agent holds them, and the memory and processes that control groups leave it.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outlast.errors import NodeUnfit
from outlast.ipc.processes import cannot_start, children_of, die_with_parent, kill_group

KILL_PATIENCE = 10.0  # after SIGKILL; a process that outlasts it sits in the kernel (D)


@dataclass
class Worker:
    """One rank's process; ``exit_code`` is negative for a signal, None while it lives."""

    rank: int
    pid: int
    pidfd: int
    exit_code: int | None = None


class Reaper:
    """Collects the exit codes of all children and adopted orphans, so that no zombie stays."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}

    def collect(self) -> None:
        """Collect the processes that have ended since the last call."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._codes[pid] = os.waitstatus_to_exitcode(status)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a child that has ended, once."""
        self.collect()
        return self._codes.pop(pid, None)


def adopt(pids: Mapping[int, int]) -> list[Worker]:
    """Return the workers that the zygote forked, by rank; one may have been collected by the reaper."""
    return [Worker(rank, pid, _descriptor(pid)) for rank, pid in pids.items()]


def _descriptor(pid: int) -> int:
    """Return a descriptor that can be read from once the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)


def start_cold(
    rank: int, command: Sequence[str], environment: Mapping[str, str], outputs: tuple[str | None, str | None]
) -> Worker:
    """Start a rank as a plain subprocess, the way torchrun does.

    Raises:
        NodeUnfit: the system allows no more processes.
    """
    agent = os.getpid()
    files = [None if path is None else _opened(path) for path in outputs]
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(agent),  # noqa: PLW1509 - the agent has one thread
        )
    except (BlockingIOError, MemoryError) as error:
        refused = error if isinstance(error, OSError) else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        raise NodeUnfit(f"{cannot_start(f'rank {rank}', refused)}; the job ends") from error
    finally:
        for descriptor in files:
            if descriptor is not None:
                os.close(descriptor)
    process.returncode = 0  # the reaper waits for it, not Popen
    return Worker(rank, process.pid, os.pidfd_open(process.pid))


def _opened(path: str) -> int:
    """Open what a rank writes to: a file, a terminal or a device, but never wait for the reader of a FIFO."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    os.set_blocking(descriptor, True)
    return descriptor


def bind(pid: int, cpus: Collection[int]) -> None:
    """Bind a process, its threads and their children to some processors.

    Raises:
        OSError: none of these processors may be used here.
    """
    bound: set[str] = set()
    while fresh := set(_threads(pid)) - bound:  # a thread starts others until it is bound itself
        bound |= fresh
        for thread in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cpus)


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:  # it has ended
        return []


def wait_for_end(workers: Iterable[Worker], patience: float) -> list[Worker]:
    """Wait until the processes have ended; return those that have not after ``patience`` seconds."""
    poller = select.poll()
    living = {worker.pidfd: worker for worker in workers if worker.exit_code is None}
    for descriptor in living:
        poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + patience
    while living and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left * 1000):
            poller.unregister(descriptor)
            del living[descriptor]
    return list(living.values())


def kill_all(workers: Sequence[Worker], reaper: Reaper) -> list[Worker]:
    """Kill the workers and their process groups; return those that could not be killed in time."""
    for worker in workers:
        kill_group(worker.pid, signal.SIGKILL)
    stuck = wait_for_end(workers, KILL_PATIENCE)
    for worker in workers:
        code = reaper.exit_code(worker.pid)
        if worker.exit_code is None and code is not None:
            worker.exit_code = code
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
            worker.pidfd = -1
    return stuck


def kill_strays(keep: Iterable[int], groups: Iterable[int] = ()) -> set[int]:
    """Kill adopted processes, and return them: what the workers left behind in other process groups.

    Args:
        keep: processes that live on.
        groups: process groups that live on.
    """
    kept, kept_groups, killed = set(keep), set(groups), set()
    for pid in list(children_of(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            if pid not in kept and os.getpgid(pid) not in kept_groups:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    return killed


def kill_adopted(pids: Collection[int]) -> None:
    """Kill those of some processes that were adopted."""
    for pid in set(pids).intersection(children_of(os.getpid())) if pids else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def signal_worker(worker: Worker, signum: int) -> None:
    """Send a signal to the rank's own process only: its DataLoader workers must not die first."""
    try:
        signal.pidfd_send_signal(worker.pidfd, signum)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EBADF):  # it has ended; EBADF: before it was adopted
            raise


_UNLIMITED = 1 << 60  # version 1 writes the largest number of pages for "no limit"
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_PROCESSES = (("pids.max", "pids.current"),)
_CACHE = ("inactive_file", "total_inactive_file")  # counted as used, and given back before anybody is killed


def memory_room(process: Path = Path("/proc/self")) -> int:
    """Return the bytes to the nearest memory limit, -1 where there is none.

    Args:
        process: folder of the process under /proc.
    """
    return _room("memory", _MEMORY, process)


def process_room(process: Path = Path("/proc/self")) -> int:
    """Return how many processes and threads may still be started, -1 where nothing limits them."""
    return _room("pids", _PROCESSES, process)


def processor_limit(process: Path = Path("/proc/self")) -> float:
    """Return the processors that the lowest CPU limit of the control groups allows; 0: no limit."""
    limits = []
    for folder in _folders("cpu", process):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota < 0:
            with contextlib.suppress(OSError, ValueError):  # "max 100000": no limit
                quota, period = map(int, (folder / "cpu.max").read_text().split())
        if quota > 0 and period > 0:
            limits.append(quota / period)
    return min(limits, default=0.0)


def oom_kills(process: Path = Path("/proc/self")) -> int:
    """Return how many processes of this group the kernel has killed because memory was full; 0 if unknown."""
    for folder in _folders("memory", process):
        for name in ("memory.events", "memory.oom_control"):
            kills = _fields(folder / name).get("oom_kill")
            if kills is not None:
                return int(kills)
    return 0


def _room(controller: str, files: tuple[tuple[str, str], ...], process: Path) -> int:
    rooms = [
        max(0, limit - max(0, used - _cache(folder) * (controller == "memory")))
        for folder in _folders(controller, process)
        for most, now in files
        if (limit := _number(folder / most)) >= 0 and (used := _number(folder / now)) >= 0
    ]
    return min(rooms, default=-1)


def _folders(controller: str, process: Path) -> Iterator[Path]:
    """Yield the folder of the process's group and those above it, for each hierarchy in use."""
    try:
        mounts = (process / "mountinfo").read_text().splitlines()
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for line in mounts:
        place, _, kind = line.partition(" - ")
        file_system, *_, flags = kind.split()
        version_2 = file_system == "cgroup2"
        if not version_2 and not (file_system == "cgroup" and controller in flags.split(",")):
            continue
        root, mount = (PurePosixPath(field) for field in place.split()[3:5])
        for _, controllers, path in groups:
            if controllers == "" if version_2 else controller in controllers.split(","):
                group = PurePosixPath(path)
                below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
                for one in (below, *below.parents):
                    yield Path(mount / one)


def _number(file: Path) -> int:
    try:
        found = int(file.read_text())
    except (OSError, ValueError):  # "max", or a file that this version does not have
        return -1
    return found if found < _UNLIMITED else -1


def _cache(folder: Path) -> int:
    found = _fields(folder / "memory.stat")
    return max(int(found.get(name, 0)) for name in _CACHE)


def _fields(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(None, 1) for line in lines)
