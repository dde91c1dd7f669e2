"""Which samples each rank takes in each step: one order of all samples, and one cursor of the whole job.

A step takes the next samples of the order, whatever the number of ranks, and cuts them into micro-batches.
Ranks take runs of micro-batches. So neither another world nor other shares change which samples a step has,
and every sample of an epoch is taken exactly once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_ROUNDS = 6  # of the Feistel network; four make a pseudo-random permutation (Luby and Rackoff, 1988)
_LEAST_BITS = 3  # of half a number: networks of fewer bits have few different orders
_WORD = (1 << 64) - 1


class Order:
    """A pseudo-random order of the numbers below ``size``, computed by place and without memory.

    It is a Feistel network that is repeated until the number is below ``size`` (cycle walking; Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), so it is the same on every machine.

    Args:
        size: how many numbers.
        seed: of the whole run.
        epoch: each has another order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half = max(_LEAST_BITS, -(-(size - 1).bit_length() // 2))
        self._mask = (1 << self._half) - 1
        digest = hashlib.blake2b(f"{seed},{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * _ROUNDS, 8)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} of an order of {self._size}")
        half, mask, found = self._half, self._mask, place
        while True:
            left, right = found >> half, found & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            found = left << half | right
            if found < self._size:
                return found


def _mixed(number: int) -> int:
    """Return a number of 64 bits that depends on every bit of another one (the finalizer of SplitMix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _WORD
    return number ^ number >> 31


@dataclass(frozen=True)
class Cursor:
    """Where in the data the next step begins, for the whole job.

    Args:
        epoch: from 0 on.
        taken: samples of the epoch that earlier steps took.
    """

    epoch: int = 0
    taken: int = 0


@dataclass(frozen=True)
class Sampling:
    """How samples are put into steps.

    Args:
        size: samples of the data set.
        global_batch: samples of a step, over all ranks.
        micro_batch: samples of a micro-batch.
        seed: of the order of an epoch; None: samples are taken by number.
        drop_last: leave out the samples at the end of an epoch that do not fill a step; otherwise its last
            step has fewer samples.
    """

    size: int
    global_batch: int
    micro_batch: int
    seed: int | None = 0
    drop_last: bool = False

    def problems(self) -> tuple[str, ...]:
        """Return one line for each value that makes no sense."""
        found = [
            f"{name}: found {value!r}, expected a positive whole number"
            for name, value in (("global_batch", self.global_batch), ("micro_batch", self.micro_batch))
            if not isinstance(value, int) or value < 1
        ]
        if self.size < 1:
            found.append("dataset: it has no samples")
        elif not found and self.micro_batch > self.global_batch:
            found.append(f"micro_batch: {self.micro_batch} is more than global_batch, {self.global_batch}")
        elif not found and self.drop_last and self.size < self.global_batch:
            found.append(f"drop_last: the {self.size} samples fill no step of {self.global_batch}")
        return tuple(found)

    def step(self, cursor: Cursor) -> Step:
        """Return the step that begins at a cursor, or in the next epoch if too little is left of this one."""
        left = self.size - cursor.taken
        if left < (self.global_batch if self.drop_last else 1):
            cursor, left = Cursor(cursor.epoch + 1), self.size
        return Step(cursor.epoch, cursor.taken, min(self.global_batch, left), self.micro_batch)

    def order(self, epoch: int) -> Order | range:
        """Return the sample at each place of an epoch."""
        if self.seed is None:
            return range(self.size)
        return Order(self.size, self.seed, epoch)


@dataclass(frozen=True)
class Step:
    """The samples of one step.

    Args:
        epoch: whose order counts.
        first: place of the first sample in it.
        samples: how many, over all ranks.
        micro_batch: samples of a micro-batch; the last one may have fewer.
    """

    epoch: int
    first: int
    samples: int
    micro_batch: int

    @property
    def after(self) -> Cursor:
        """Where the next step begins."""
        return Cursor(self.epoch, self.first + self.samples)

    @property
    def places(self) -> range:
        """The places of all its samples."""
        return range(self.first, self.first + self.samples)

    def of_rank(self, rank: int, shares: Sequence[int]) -> list[range]:
        """Return the places of each micro-batch that a rank takes.

        Args:
            rank: whose.
            shares: micro-batches of each rank.
        """
        begin = [0, *accumulate(shares)][rank]
        places = self.places
        bounds = ((at * self.micro_batch, (at + 1) * self.micro_batch) for at in range(shares[rank]))
        shift = begin * self.micro_batch
        return [places[shift + low : shift + high] for low, high in bounds]
