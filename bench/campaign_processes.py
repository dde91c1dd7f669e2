"""The processes of one campaign, as the process sees them that starts, stops and kills them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from campaign_harm import Moments
from campaign_job import Child, Setup, fork, own
from campaign_oracle import Wrong

from outlast.ipc.processes import children_of, is_alive, state_of

DEADLINE = 120.0  # for a generation, and for the saver to end


class Processes:
    """Starts the processes of a campaign and reads their reports; this process is the parent of all orphans.

    Args:
        setup: of the campaign.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.children: list[Child] = []
        self.workers: list[Child] = []
        self.owner: Child | None = None
        self.moments = Moments(setup)
        self.on_moment: Callable[[str], None] = lambda _: None
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._stopped: set[int] = set()

    def start(self, name: str, body: Callable[..., None], *keep: int) -> Child:
        self.children.append(child := fork(name, body, *keep))
        return child

    def later(self, seconds: float, job: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, job))

    def runs(self, child: Child | None) -> bool:
        return child is not None and child in self.children

    def pump(self, patience: float) -> None:
        """Read reports and folder events, and do what is due, for a moment."""
        now = time.monotonic()
        for timer in sorted((one for one in self._timers if one[0] <= now), key=lambda one: one[0]):
            self._timers.remove(timer)
            timer[1]()
        due = min([patience, *(max(0.0, at - now) for at, _ in self._timers)])
        heard: list[Moments | int] = [self.moments, *(child.reader for child in self.children)]
        ready, _, _ = select.select(heard, [], [], due)
        if self.moments in ready:
            for moment in self.moments.hear():
                self.on_moment(moment)
        for child in [one for one in self.children if one.reader in ready]:
            if not child.hear():
                os.close(child.reader)
                self.children.remove(child)
                os.waitpid(child.pid, 0)

    def wait(self, done: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
        """Pump until a condition holds.

        Raises:
            Wrong: it does not hold in time.
        """
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise Wrong(f"{what}: not within {seconds:g} s")
            self.pump(0.01)

    def rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.pump(left)

    def drain(self) -> None:
        """Read all reports up to now."""
        for child in list(self.children):
            while child in self.children and select.select([child.reader], [], [], 0)[0]:
                if not child.hear():
                    os.close(child.reader)
                    self.children.remove(child)
                    os.waitpid(child.pid, 0)

    def savers(self) -> list[int]:
        """Return the running checkpoint writers, the newest last."""
        found = []
        for parent in (os.getpid(), *(child.pid for child in self.children)):
            for pid in children_of(parent):
                with contextlib.suppress(OSError):
                    if b"outlast.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes() and is_alive(
                        pid
                    ):
                        found.append(pid)
        return sorted(found)

    def ensure_owner(self) -> None:
        if self.setup.owner == "agent" and not self.runs(self.owner):
            self.owner = self.start("owner", partial(own, self.setup))
            owner = self.owner
            self.wait(lambda: bool(owner.said), "the owner's saver")

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Stop owner and writer, so that nothing changes in the folders."""
        owners = [self.owner.pid] if self.owner is not None and self.runs(self.owner) else []
        _stop(owners)
        savers = self.savers()
        _stop(savers)
        try:
            yield
        finally:
            for pid in (*(one for one in savers if one not in self._stopped), *owners):
                _send(pid, signal.SIGCONT)

    def stop_saver(self, seconds: float) -> bool:
        """Stop the writer for a while; return whether there is one."""
        for pid in self.savers()[-1:]:
            self._stopped.add(pid)
            _send(pid, signal.SIGSTOP)
            self.later(seconds, partial(self._resume, pid))
            return True
        return False

    def _resume(self, pid: int) -> None:
        self._stopped.discard(pid)
        _send(pid, signal.SIGCONT)

    def kill_saver(self) -> bool:
        """Kill the writer; return whether there was one."""
        for pid in self.savers()[-1:]:
            _send(pid, signal.SIGKILL)
            return True
        return False

    def kill_owner(self) -> bool:
        """Kill the agent that owns the writer; return whether there was one."""
        owner, self.owner = self.owner, None
        if owner is None or not self.runs(owner):
            return False
        _send(owner.pid, signal.SIGKILL)
        while is_alive(owner.pid):
            time.sleep(0.0002)
        return True

    def draining(self) -> bool:
        """Say whether a writer runs whose owner has ended; it is then a child of this process."""
        return bool(set(self.savers()) & set(children_of(os.getpid())))

    def kill_worker(self, rank: int) -> bool:
        """Kill a rank; return whether it ran."""
        if rank < len(self.workers) and self.runs(self.workers[rank]):
            _send(self.workers[rank].pid, signal.SIGKILL)
            return True
        return False

    def end_workers(self) -> None:
        """End the ranks, and drop the faults that were planned for them."""
        self._timers = [one for one in self._timers if getattr(one[1], "func", None) == self._resume]
        for rank in range(len(self.workers)):
            self.kill_worker(rank)
        self.wait(lambda: not any(map(self.runs, self.workers)), "the end of the workers")

    def part(self) -> None:
        """End the owner, and wait until the writer has ended by itself.

        Raises:
            Wrong: it does not, or it leaves something in memory.
        """
        self.kill_owner()
        self.wait(lambda: not self.children and not self.savers(), "the end of the saver")
        if self.setup.memory.exists():
            raise Wrong(f"left: {self.setup.memory}: {sorted(os.listdir(self.setup.memory))}")

    def clear(self) -> None:
        """End and reap everything that was started.

        Raises:
            Wrong: a process cannot be ended.
        """
        deadline = time.monotonic() + DEADLINE
        while left := list(children_of(os.getpid())):
            for pid in left:
                _send(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                raise Wrong(f"left: processes that cannot be ended: {left}")
        self.moments.close()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stop(pids: list[int]) -> None:
    """Stop processes, and wait until they are stopped."""
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE
    while any(state_of(pid) not in ("T", "Z", "X", "") for pid in pids):
        if time.monotonic() > deadline:
            raise Wrong(f"a stopped process still runs: {pids}")
        time.sleep(0.0002)
