"""Worker processes as the agent holds them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from outlast import files
from outlast.errors import NodeUnfit
from outlast.ipc.descriptors import give_back
from outlast.ipc.processes import (
    Child,
    cannot_start,
    children_of,
    die_with_parent,
    family_of,
    is_tracker,
    parent_of,
    start,
    state_of,
)
from outlast.launcher.workers.cleaner import Cleaner

KILL_PATIENCE = 10.0  # seconds after SIGKILL; a process that outlasts it is blocked in the kernel (D)
_TRACKER_PATIENCE = 2.0  # seconds in which trackers remove shared memory, once nobody else is left
_LOOK_EVERY = 0.005  # seconds, while processes end
_ZOMBIES_EVERY = 1.0  # seconds; one that is found twice is nobody's


class Worker(Child):
    """One rank's process; ``exit_code`` is negative for a signal, None while it lives."""

    def __init__(self, rank: int, pid: int) -> None:
        super().__init__(pid)
        self.rank = rank


class Family:
    """The children of the agent, adopted ones included: those that are held, and strays.

    What is held lives on. There is one way to kill: :meth:`drop` and :meth:`sweep` signal, and each
    :meth:`tick` reaps what has ended and signals what has come to this process since, until nothing is left.

    Args:
        cleaner: kills what is held if the agent dies.
        ends: called with the pids of strays before they are killed.
    """

    def __init__(self, cleaner: Cleaner, ends: Callable[[set[int]], object] = lambda _: None) -> None:
        self._cleaner = cleaner
        self._ends = ends
        self._held: dict[int, Child] = {}
        self._dying: dict[int, Child] = {}
        self._given_up: set[int] = set()
        self._sweeping = False
        self._until = 0.0  # when the wait for dying processes ends
        self._trackers_until = 0.0
        self._zombies: set[int] = set()
        self._zombies_at = 0.0

    def hold(self, child: Child) -> None:
        """Take a process that lives until it is dropped, and dies with the agent."""
        self._held[child.pid] = child
        self._cleaner.watch(child.pid)

    def release(self, child: Child) -> None:
        """Drop a process that has been reaped."""
        if self._held.get(child.pid) is child:
            del self._held[child.pid]
            self._cleaner.forget(child.pid)
        child.close()

    def drop(self, child: Child) -> None:
        """Kill a process and what it has started; later calls of :meth:`tick` reap them."""
        if child.poll() is not None:
            self.release(child)
            return
        self._held.pop(child.pid, None)
        self._until = time.monotonic() + KILL_PATIENCE
        self._condemn(child)

    def _condemn(self, child: Child) -> None:
        self._dying[child.pid] = child
        self._trackers_until = time.monotonic() + _TRACKER_PATIENCE
        if not is_tracker(child.pid):
            child.kill_tree()

    def sweep(self) -> None:
        """Kill the strays: processes of ended workers, in whatever process group."""
        self._sweeping = True
        self._until = time.monotonic() + KILL_PATIENCE

    @property
    def ended(self) -> bool:
        """Whether all that was dropped or swept has ended, except for what is blocked in the kernel."""
        return not self._dying.keys() - self._given_up

    @property
    def at_rest(self) -> bool:
        """Whether the same is true of all strays, so that the next generation may start."""
        return self.ended and not self._sweeping

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick`; None: nothing ends now."""
        return None if self.at_rest else time.monotonic() + _LOOK_EVERY

    def tick(self, keep: Collection[int], groups: Collection[int], owed: bool) -> list[Child]:
        """Continue to kill and to reap; return the processes that do not end.

        Args:
            keep: children that live on besides those that are held.
            groups: children in these process groups live on, too.
            owed: a child may come, or have come, that is not held yet. No stray can be told from it.
        """
        now = time.monotonic()
        if not owed and (self._sweeping or now >= self._zombies_at + _ZOMBIES_EVERY):
            self._look_at_strays(now, keep, groups)
        trackers = {pid for pid in self._dying if is_tracker(pid)}
        if len(trackers) < len(self._dying):
            self._trackers_until = now + _TRACKER_PATIENCE
        for child in list(self._dying.values()):
            if child.poll() is not None:
                del self._dying[child.pid]
                self._given_up.discard(child.pid)
                self._cleaner.forget(child.pid)
                child.close()
            elif child.pid not in trackers or now >= self._trackers_until:
                child.kill_tree()
        if now < self._until:
            return []
        stuck = [child for pid, child in self._dying.items() if pid not in self._given_up]
        self._given_up.update(child.pid for child in stuck)
        self._sweeping = self._sweeping and owed
        return stuck

    def _look_at_strays(self, now: float, keep: Collection[int], groups: Collection[int]) -> None:
        known = {*self._held, *self._dying, *keep}
        strays = [pid for pid in children_of(os.getpid()) if pid not in known]
        zombies = {pid for pid in strays if state_of(pid) == "Z"}
        if self._sweeping:
            found = {pid for pid in strays if family_of(pid)[1] not in groups}
            if living := found - zombies:
                self._ends(living)
            for pid in found:
                child = Child(pid)
                if parent_of(pid) == os.getpid():  # else a thread has reaped it meanwhile
                    self._condemn(child)
                else:
                    child.close()
            self._sweeping = bool(found or self._dying)
        for pid in zombies & self._zombies - self._dying.keys():  # not at once: a thread may wait for its own
            child = Child(pid)
            child.poll()
            child.close()
        self._zombies, self._zombies_at = zombies, now

    def end(self, keep: Collection[int], patience: float = KILL_PATIENCE) -> None:
        """Kill all children except ``keep``, and wait for their end."""
        for child in list(self._held.values()):
            self.drop(child)
        self.sweep()
        deadline = time.monotonic() + patience
        while not self.at_rest and time.monotonic() < deadline:
            self.tick(keep, (), owed=False)
            files.readable((), _LOOK_EVERY)


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
        pid = start(
            command,
            env=dict(environment),
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
            preexec_fn=lambda: _begin(agent),
        )
    except (BlockingIOError, MemoryError) as error:
        refused = error if isinstance(error, OSError) else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        raise NodeUnfit(f"{cannot_start(f'rank {rank}', refused)}; the job ends") from error
    finally:
        for descriptor in files:
            if descriptor is not None:
                os.close(descriptor)
    return Worker(rank, pid)


def _begin(agent: int) -> None:
    give_back()
    die_with_parent(agent)


def _opened(path: str) -> int:
    """Open what a rank writes to: a file, a terminal or a device, but never wait for the reader of a FIFO."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o644)
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
