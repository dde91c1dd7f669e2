"""How ranks vote on what follows a step: one small maximum, over a group of its own.

A session's ranks vote only after steps on which they have agreed
(:mod:`outlast.agreement.worker.vote`), and wait for the outcome. A loop that asks a handler votes
at each call: a vote is handed in at one call and its outcome is taken at the next one, so training does not
wait for it.

How ranks agree on a step after which all of them vote, once any of them asks for a vote.

A vote is a collective: all ranks must take part after the same step. While nobody asks, no step waits for
anything. A thread of each rank looks for a request in the store of the ranks. On a request each rank writes
down how many steps it has completed; from then on it completes one more step at most before it waits. When
all have written, the last one chooses the step after the highest number, which no rank has passed. How long a
step takes plays no part in it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from outlast.agreement.policy.votes import Flag, Reading, Vote
from outlast.numerics.policy import tally
from outlast.numerics.policy.tally import Tally
from outlast.ports import ExchangeFailed

_PATIENCE = timedelta(seconds=1800)  # torch's own for gloo: training's collectives give up no later


Numbers = tuple[float | None, ...]


class Ballot(Protocol):
    """Takes one vote of each rank at a time and gives all of them the maximum."""

    def hand_in(self, vote: Vote) -> None:
        """Hand in a vote."""
        ...

    def outcome(self) -> Vote:
        """Wait for what the votes that were handed in come to.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        ...

    def tally(self, flags: frozenset[Flag], reading: Reading) -> Tally:
        """Hand in flags and the numbers of a step, and wait for what those of all ranks come to.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        ...

    def numbers(self, reading: Reading) -> tuple[Numbers, Numbers]:
        """Return losses and norms of all ranks, in their order: 16 bytes a rank.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        ...


class SoloBallot:
    """The ballot of a job of one rank."""

    def hand_in(self, vote: Vote) -> None:
        """Take the only vote."""
        self._vote = vote

    def outcome(self) -> Vote:
        """Return it."""
        return self._vote

    def tally(self, flags: frozenset[Flag], reading: Reading) -> Tally:
        """Return what the only numbers come to."""
        return tally.tally_of_one(flags, reading)

    def numbers(self, reading: Reading) -> tuple[Numbers, Numbers]:
        """Return the only ones."""
        return (reading.loss,), (reading.norm,)


class GroupBallot:
    """The ballot of all ranks of the default process group; every rank makes it at the same time."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._own = Vote()
        self._blank = array("d", self._own.numbers())
        self._row = _Row(array("d", self._blank), dist.ReduceOp.MAX, self._group)
        self._last = array("d", self._blank)
        self._outcome = self._own
        self._sums = _Row(array("d", bytes(8 * tally.WIDTH)), dist.ReduceOp.SUM, self._group)

    def hand_in(self, vote: Vote) -> None:
        """Begin the reduction."""
        if vote is not self._own and vote != self._own:
            self._own = vote
            self._blank = array("d", vote.numbers())
        self._row.begin(self._blank)

    def outcome(self) -> Vote:
        """Wait for it."""
        numbers = self._row.end()
        if numbers != self._last:
            self._last = array("d", numbers)
            self._outcome = Vote.of(numbers)
        return self._outcome

    def tally(self, flags: frozenset[Flag], reading: Reading) -> Tally:
        """Add up; see :class:`Ballot`."""
        self._sums.begin(array("d", tally.addends(flags, reading)))
        return tally.tally_of(self._sums.end())

    def numbers(self, reading: Reading) -> tuple[Numbers, Numbers]:
        """Gather; see :class:`Ballot`."""
        world, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        own = array("d", [tally.to_row(None)]) * (2 * world)
        own[rank], own[world + rank] = tally.to_row(reading.loss), tally.to_row(reading.norm)
        row = _Row(own, dist.ReduceOp.MAX, self._group)
        row.begin(own)
        found = tuple(map(tally.from_row, row.end()))
        return found[:world], found[world:]


class _Row:
    """A row of numbers that ranks reduce.

    Args:
        numbers: float64; their memory is the row's.
        operation: by which.
        group: of the ranks.
    """

    def __init__(
        self, numbers: array[float], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> None:
        self._numbers = numbers
        self._tensor = torch.frombuffer(numbers, dtype=torch.float64)  # the same memory
        self._operation = operation
        self._group = group
        self._work: dist.Work | None = None

    def begin(self, numbers: array[float]) -> None:
        """Begin the reduction of these."""
        self._numbers[:] = numbers
        self._work = dist.all_reduce(self._tensor, self._operation, self._group, async_op=True)

    def end(self) -> array[float]:
        """Wait for what they come to; it is written over by the next ones.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        assert self._work is not None, "it was begun"
        try:
            self._work.wait(_PATIENCE)
        except RuntimeError as error:
            raise ExchangeFailed(
                f"the vote after a step: a rank has gone ({error}); this one ends"
            ) from error
        return self._numbers


def should_shutdown() -> Callable[[bool], bool]:
    """Return what is told whether this rank is to stop, and answers whether any is: the same on all."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return lambda asked: asked
    ballot, under_way, stop = GroupBallot(), False, False

    def ask(asked: bool) -> bool:
        nonlocal under_way, stop
        if under_way and not stop:
            stop = bool(ballot.outcome().flags)
        if not stop:
            ballot.hand_in(Vote(frozenset({Flag.PREEMPTED} if asked else ())))
            under_way = True
        return stop

    return ask


_LOOK = 0.1  # seconds between two looks at the store
_LOOKS = 4000  # that all ranks together take in a second at most: one process serves the store
_ROUND_PATIENCE = 1800.0  # torch's own for gloo: training's collectives give up no later
_SLICE = 1.0  # the longest uninterrupted wait of the main thread: signals are handled in between
_JOIN = 1.0  # seconds for the thread to end: one whose store does not answer is left behind
_GONE = "gone "


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> object:
        """Set a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys exist."""
        ...


class StepAgreement:
    """One rank's part; rounds follow one another, and every rank begins each after the same step.

    Args:
        store: over a connection that no other thread waits on.
        rank: this rank.
        world_size: ranks that take part.
        generation: their generation.
        wants: says whether this rank wants a vote; called by the thread.

    Raises:
        ExchangeFailed: the store does not answer.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, generation: int, wants: Callable[[], bool]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._wants = wants
        self._state = threading.Condition()
        self._round = 0
        self._completed = 0
        self._written = False  # how far this rank is, in this round
        self._meet: int | None = None
        self._failure = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        prefix = f"outlast/{generation}/votes"
        try:
            self._prefix = f"{prefix}/{store.add(f'{prefix}/opened/{rank}', 1)}"
        except RuntimeError as error:
            raise ExchangeFailed(f"the vote after a step: the store does not answer ({error})") from error

    def begin(self, step: int) -> None:
        """Begin a round, on every rank after the same step: before a loop, after a vote, after a rollback."""
        with self._state:
            self._round += 1
            self._completed, self._written, self._meet = step, False, None
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._listen, name="votes", daemon=True)
            self._thread.start()
            atexit.register(self.end)  # a thread in the store must not meet the end of the interpreter

    def due(self, step: int) -> bool:
        """Say whether all ranks vote after this step; waits only where somebody has asked for a vote.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        end = 0.0
        with self._state:
            self._completed = step
            while self._written and self._meet is None:
                end = end or time.monotonic() + _ROUND_PATIENCE
                if self._failure or time.monotonic() > end:
                    reason = self._failure or f"not every rank has answered in {_ROUND_PATIENCE:.0f} s"
                    raise ExchangeFailed(f"the vote after step {step}: {reason}; this rank ends")
                self._state.wait(_SLICE)
            return self._meet == step

    def close(self) -> None:
        """End the loop: this rank completes no more steps, and stands in nobody's way."""
        if self._thread is None or not self._stop():
            return
        with self._state:
            turn, step, written = self._round, self._completed, self._written
        if not (written or self._failure):
            with contextlib.suppress(RuntimeError):
                self._write(turn, step)

    def fail(self, reason: str) -> None:
        """Let the others know that this rank ends with an error, and stop."""
        if self._thread is not None and self._stop() and not self._failure:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key("meet", self._round), f"{_GONE}rank {self._rank} failed: {reason}")

    def end(self) -> None:
        """End the thread; nobody hears of it."""
        self._stop()

    def _stop(self) -> bool:
        """End the thread; return whether it has ended."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        atexit.unregister(self.end)
        if thread is not None:
            thread.join(_JOIN)
        return thread is None or not thread.is_alive()

    def _listen(self) -> None:
        pause = max(_LOOK, self._world_size / _LOOKS)
        try:
            while not self._stopped.wait(pause):
                self._look()
        except RuntimeError as error:
            with self._state:
                self._failure = f"the store between the ranks does not answer ({error})"
                self._state.notify_all()

    def _look(self) -> None:
        with self._state:
            turn, written, known = self._round, self._written, self._meet is not None
        if known:
            return
        if written:
            self._read(turn)
        elif self._wants():
            self._store.set(self._key("asked", turn), "1")
            self._answer(turn)
        elif self._store.check([self._key("asked", turn)]):
            self._answer(turn)

    def _answer(self, turn: int) -> None:
        with self._state:
            if self._round != turn:
                return
            self._written, step = True, self._completed
        self._write(turn, step)
        self._read(turn)

    def _write(self, turn: int, step: int) -> None:
        self._store.set(self._key(f"completed/{self._rank}", turn), str(step))
        if self._store.add(self._key("count", turn), 1) == self._world_size:
            every = (self._key(f"completed/{rank}", turn) for rank in range(self._world_size))
            highest = max(int(self._store.get(key)) for key in every)
            self._store.set(self._key("meet", turn), str(highest + 1))

    def _read(self, turn: int) -> None:
        key = self._key("meet", turn)
        if not self._store.check([key]):
            return
        said = self._store.get(key).decode()
        with self._state:
            if self._round == turn and said.startswith(_GONE):
                self._failure = said.removeprefix(_GONE)
            elif self._round == turn:
                self._meet = int(said)
            self._state.notify_all()

    def _key(self, name: str, turn: int) -> str:
        return f"{self._prefix}/{turn}/{name}"
