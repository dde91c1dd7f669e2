"""A vote of all ranks: one reduction over a gloo group of its own; with a guard, of a step's numbers, too.

A session's ranks vote after steps on which they have agreed, and wait for the outcome. With a loop of its own
(:func:`should_shutdown`) a vote is handed in at one call and its outcome taken at the next one, so training
does not wait for it.
"""

from __future__ import annotations

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
