"""In-process restart in the agent: workers that are inside their function, kept or forked.

The decisions of :mod:`outlast.inprocess.policy` are carried out here, over the re-entry barrier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from outlast.cluster.policy.messages import Assignment, NodeStatus
from outlast.hang.agent.evidence import uses_gpu
from outlast.inprocess.barrier import INTERRUPT_SIGNAL, Gate, Said
from outlast.inprocess.policy import (
    Called,
    Ended,
    Enter,
    Granularity,
    Kill,
    Leaves,
    Order,
    Reentry,
    Refill,
    Stuck,
    Unwinds,
    Waits,
    culprit_patience,
    longest,
)
from outlast.ipc.processes import state_of
from outlast.launcher.workers.generation import Generation
from outlast.launcher.workers.processes import Worker
from outlast.recovery.policy.events import Fault, FaultKind


class Where(Enum):
    """The state of a worker, as it reported."""

    INSIDE = "inside"
    LEAVING = "unwinds"
    STUCK = "stuck"
    WAITING = "waits"
    RETURNED = "returned"


_WHERE = {"failed": Where.LEAVING, **{one.value: one for one in Where}}


_PLACE = 200  # characters of the frame in which a worker sleeps


@dataclass
class _Guest:
    """A worker inside its function, and its options."""

    generation: int
    patience: float
    granularity: Granularity
    where: Where = Where.INSIDE


def _patience(suspect: Worker, allowed: float) -> float:
    """Return how long a hung rank has to answer."""
    return culprit_patience(state_of(suspect.pid) == "T", uses_gpu(suspect.pid), allowed)


def _went_on(generation: Generation, fault: Fault) -> bool:
    """Say whether a hung rank has sent a heartbeat since: signals of the examination wake some calls in C."""
    page = generation.pages.get(fault.rank)
    return page is not None and page.read().beat > fault.since


class Reentries:
    """The workers of this node that can restart in process; ``fileno()`` is readable on a message.

    Args:
        path: of the gate's socket.
        allow: takes the seconds of silence that a script allows its ranks.
        gone: called with a worker that was to be kept, and has ended; and with one that is to be killed.
        say: told why a worker was killed.
    """

    def __init__(
        self,
        path: Path,
        allow: Callable[[float], None],
        gone: tuple[Callable[[Worker], None], Callable[[Worker], None]],
        say: Callable[[str], None],
    ) -> None:
        self._gate = Gate(path)
        self._allow = allow
        self._let_go, self._kill = gone
        self._say = say
        self._guests: dict[int, _Guest] = {}  # by pid
        self._number = 0  # of the generation that was begun last
        self._machine: Reentry | None = None
        self._kept: dict[int, Worker] = {}  # by seat, while the machine runs
        self._generation: Generation | None = None  # what they are to enter, once it is there
        self._doors: tuple[int, ...] = ()
        self._reason = ""
        self._patience = 0.0  # the longest that a worker of this node has asked for; 0: none has entered yet

    @property
    def path(self) -> Path:
        """The socket's file."""
        return self._gate.path

    def bind_again(self) -> None:
        """Listen for workers once more, after the socket's file was removed.

        Raises:
            OSError: it cannot be made.
        """
        self._gate.bind_again()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._gate.fileno()

    def deadline(self) -> float | None:
        """Return when :meth:`tick` has something to do."""
        return None if self._machine is None else self._machine.deadline()

    def able(self, generation: Generation | None) -> bool:
        """Say whether a worker of a generation could be kept."""
        return generation is not None and any(one.pid in self._guests for one in generation.living())

    def offer(self, generation: Generation | None, store: int, serial: int) -> NodeStatus:
        """Return the status of this node for the next generation.

        Args:
            generation: that runs; None: workers wait for the next one, if any do.
            store: port of the store that is ready.
            serial: number of that store.
        """
        able = self.able(generation) or bool(self.kept)
        ready = able or bool(self._patience) or generation is None or not generation.living()
        patience = longest(self._patience) if able else 0.0
        return NodeStatus(store, able or (None if ready else False), patience, serial)

    @property
    def at_rest(self) -> bool:
        """Whether every interrupted worker waits at the barrier, or is gone."""
        return self._machine is None or self._machine.over

    @property
    def kept(self) -> dict[int, Worker]:
        """Workers that wait for the next generation, by seat."""
        return {} if self._generation is not None else dict(self._kept)

    @property
    def called(self) -> frozenset[int]:
        """Pids of workers whose end is not a fault: they are restarting."""
        return frozenset(worker.pid for worker in self._kept.values())

    def hear(self, now: float, failed: bool) -> Iterator[tuple[int, int]]:
        """Handle messages of workers; yield pid and generation of those whose function raised.

        Args:
            now: monotonic seconds.
            failed: a worker has ended with an error, so those that have returned are needed once more.
        """
        for pid, message in self._gate.messages():
            said = message.what
            if said == "leaves":
                self._leaves(pid, now)
            elif said == "inside":
                self._welcome(pid, message)
            elif said in _WHERE and pid in self._guests:
                self._moved(pid, _WHERE[said], now, message.place[:_PLACE])
                if said == "failed":
                    yield pid, message.generation
        if not failed:
            self._release()

    def _welcome(self, pid: int, message: Said) -> None:
        if message.generation < self._number:
            return  # forked for a generation that ended first, or kept and called out again
        with contextlib.suppress(ValueError):  # no granularity
            guest = _Guest(message.generation, message.patience, Granularity(message.granularity))
            self._guests[pid] = guest
            self._patience = max(self._patience, guest.patience)
            if message.silence is not None:
                self._allow(message.silence)

    def _moved(self, pid: int, where: Where, now: float, place: str) -> None:
        self._guests[pid].where = where
        for seat, worker in self._kept.items():
            if worker.pid == pid and self._machine is not None:
                event = (
                    Stuck(seat, place)
                    if where is Where.STUCK
                    else (Waits if where is Where.WAITING else Unwinds)(seat)
                )
                self._carry_out(self._machine.handle(event, now))
                break
        self._open()

    def _leaves(self, pid: int, now: float) -> None:
        """Handle a worker that leaves its function for good; it cannot be kept."""
        self._guests.pop(pid, None)
        seat = next((seat for seat, worker in self._kept.items() if worker.pid == pid), None)
        if seat is not None and self._machine is not None:
            self._carry_out(self._machine.handle(Leaves(seat), now))

    def _release(self) -> None:
        """Release the workers that have returned when no worker of this node is inside."""
        busy = self._machine is not None or any(
            one.where is not Where.RETURNED for one in self._guests.values()
        )
        if not busy:
            for pid in self._guests:
                self._gate.tell(pid, {"say": "release"})
            self._guests.clear()

    def begin(
        self, mine: Assignment, generation: Generation | None, fault: Fault | None, now: float
    ) -> tuple[dict[int, Worker], list[Worker]]:
        """Interrupt the functions of the workers of a generation that ends.

        Args:
            mine: what comes next.
            generation: what ends; None: it did already, and those that were kept then are kept again.
            fault: why, if it is one of this node.
            now: monotonic seconds.

        Returns:
            Those that are kept, by seat; and those that were kept before and are no more.
        """
        self._number = mine.generation
        found, suspect = self.kept, -1
        if generation is not None:
            found = {worker.rank - generation.ranks.start: worker for worker in generation.living()}
            ours = fault is not None and fault.generation == generation.number
            self._reason = fault.reason if fault is not None and ours else mine.reason
            if (
                fault is not None
                and ours
                and fault.kind is FaultKind.HANG
                and not _went_on(generation, fault)
            ):
                suspect = fault.rank
        kept = {seat: worker for seat, worker in found.items() if worker.pid in self._guests and mine.reenter}
        guests = {seat: self._guests[worker.pid] for seat, worker in kept.items()}
        whole = generation is None or len(kept) == len(generation.ranks)
        if not whole and any(one.granularity is Granularity.NODE for one in guests.values()):
            kept = {}
        others = [worker for seat, worker in found.items() if seat not in kept]
        dropped = others if generation is None else []
        self.forget(others)
        self._generation, self._doors, self._kept, self._machine = None, (), kept, None
        if not kept:
            return {}, dropped
        called = {
            seat: Called(
                _patience(worker, guests[seat].patience) if worker.rank == suspect else guests[seat].patience,
                guests[seat].where is Where.WAITING,
            )
            for seat, worker in kept.items()
        }
        some = next(guests[seat] for seat in kept)
        self._machine = Reentry(called, some.granularity, some.patience, now)
        for seat, worker in kept.items():
            if not called[seat].waits:
                told = {"say": "interrupt", "generation": mine.generation, "reason": self._reason}
                self._gate.tell(worker.pid, told)
                if guests[seat].where is Where.INSIDE:
                    worker.send(INTERRUPT_SIGNAL)
        self._carry_out(self._machine.tick(now))
        return dict(self._kept), dropped

    def forget(self, workers: Iterable[Worker]) -> None:
        """Close the connections of workers that are killed."""
        for worker in workers:
            self._guests.pop(worker.pid, None)
            self._gate.forget(worker.pid)

    def arrived(self, generation: Generation) -> Sequence[Worker]:
        """Return the workers of a new generation, without kept ones that have ended."""
        if self._machine is not None and self._generation is not generation:
            for seat in range(len(generation.ranks)):
                if seat not in self._kept and generation.ranks.start + seat in generation.kept:
                    generation.vacate(generation.ranks.start + seat)
        return generation.workers

    def started(self, generation: Generation, now: float) -> None:
        """Record the generation that the waiting workers will enter."""
        if self._machine is None or self._generation is generation:
            return
        self._generation = generation
        self._carry_out(self._machine.tick(now))
        self._open()

    def tick(self, now: float) -> Generation | None:
        """Do what is due; return the generation if it lacks workers."""
        machine, generation = self._machine, self._generation
        if machine is not None:
            for seat, worker in list(self._kept.items()):
                if worker.poll() is not None:
                    self._carry_out(machine.handle(Ended(seat), now))
            self._carry_out(machine.tick(now))
            self._open()
        return generation if generation is not None and generation.vacant else None

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case Kill(seat, reason):
                    worker = self._kept[seat]
                    self._say(f"rank {worker.rank} (pid {worker.pid}) is killed and restarted: {reason}")
                    self._kill(worker)
                case Refill(seat):
                    worker = self._kept.pop(seat)
                    self._doors = tuple(one for one in self._doors if one != seat)
                    self.forget((worker,))
                    self._let_go(worker)
                    if self._generation is not None:
                        self._generation.vacate(worker.rank)
                case Enter(seats):
                    self._doors = seats

    def _open(self) -> None:
        """Restart the waiting workers, when all wait and the generation exists."""
        generation, machine = self._generation, self._machine
        if generation is None or machine is None or not machine.over:
            return
        for seat in self._doors:
            worker = self._kept[seat]
            guest = self._guests[worker.pid]
            guest.where, guest.generation = Where.INSIDE, generation.number
            told: dict[str, Any] = {"say": "enter", "generation": generation.number, "reason": self._reason}
            self._gate.tell(worker.pid, {**told, "seat": generation.seat(worker.rank)})
        self._machine, self._kept, self._doors = None, {}, ()

    def close(self) -> None:
        """Close all connections."""
        self._gate.close()
