"""The numbers of all ranks in a step, as sums in a row of fixed width, and the spread of recent values.

One sum over all ranks carries what is needed of a good step: flags, the mean loss, the norm of all gradients,
whether every number is finite and, where ranks are compared, how far apart they are. (A maximum would give
neither a mean nor the norm of sharded gradients.) Which rank is bad is found by a separate exchange
(:func:`to_row`) in steps in which something is wrong. Every rank gets the same bits: gloo adds up each part
of a row on one rank and distributes the result.

A value is a spike if it is far above the sliding median, in units of the median absolute deviation (MAD),
which single outliers do not move, unlike a standard deviation or a largest value (Megatron-LM's spiky loss
check keeps the maximum of the first 100 samples; late in training, when the loss is a fifth of that, nothing
is a spike).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outlast.agreement.policy.votes import Flag, Reading

_FLAGS = tuple(Flag)
_CALM = (0.0,) * len(_FLAGS)
_NONE: frozenset[Flag] = frozenset()
_UNFIT = (1.0, *(0.0,) * 6)
WIDTH = len(_FLAGS) + len(_UNFIT)  # numbers of a row, 8 bytes each
_LARGEST = float.fromhex("0x1.fffffffffffffp+1023")


class Tally(NamedTuple):
    """The combined readings of all ranks.

    Args:
        flags: those that are up on a rank.
        sound: every number of every rank is finite, and so is what they come to.
        loss: the mean over the ranks that have one; None: none has.
        grad_norm: the norm of all gradients of all ranks; None: none has any.
        losses: ranks that have a loss.
        above: the sum of their first terms, see :class:`outlast.numerics.policy.tally.Spacing`; 0: not
            compared.
        below: the sum of their second terms.
    """

    flags: frozenset[Flag]
    sound: bool
    loss: float | None
    grad_norm: float | None
    losses: int
    above: float
    below: float


class Observation(NamedTuple):
    """The numbers of a step from the vote; equal on every rank.

    Args:
        step: the index of the step.
        losses: of each rank the mean of what it validated; None: it validated nothing.
        norms: of each rank the norm of its share of the gradients, so that the root of the sum of their
            squares is the norm of all gradients; None: it has none.
        mismatch: a rank's rerun of the step came to something else.
        tally: what they come to, where each rank's own were not asked for.
    """

    step: int
    losses: tuple[float | None, ...] = ()
    norms: tuple[float | None, ...] = ()
    mismatch: bool = False
    tally: Tally | None = None

    @property
    def loss(self) -> float | None:
        """The mean over the ranks that have one."""
        if self.tally is not None:
            return self.tally.loss
        known = [one for one in self.losses if one is not None]
        return sum(known) / len(known) if known else None

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of all ranks."""
        if self.tally is not None:
            return self.tally.grad_norm
        known = [one for one in self.norms if one is not None]
        return math.hypot(*known) if known else None


def addends(flags: frozenset[Flag], reading: Reading) -> tuple[float, ...]:
    """Return a rank's row, of which the sum over ranks is taken.

    Args:
        flags: of the rank.
        reading: of the rank; numbers that are not finite would spoil a sum, so they are counted instead.
    """
    loss, norm, above, below = reading
    ups = tuple(float(flag in flags) for flag in _FLAGS) if flags else _CALM
    if not math.isfinite((loss or 0.0) + (norm or 0.0)):
        return ups + _UNFIT
    has_loss, has_norm = float(loss is not None), float(norm is not None)
    return (*ups, 0.0, has_loss, loss or 0.0, has_norm, (norm or 0.0) * (norm or 0.0), above, below)


def tally_of(row: Sequence[float]) -> Tally:
    """Return the tally of the sum of all rows."""
    ups = tuple(row[: len(_FLAGS)])
    flags = _NONE if ups == _CALM else frozenset(one for one, up in zip(_FLAGS, ups, strict=True) if up)
    unfit, losses, loss, norms, squares, above, below = row[len(_FLAGS) :]
    return Tally(
        flags,
        not unfit and math.isfinite(loss + squares),
        loss / losses if losses else None,
        math.sqrt(squares) if norms else None,
        int(losses),
        above,
        below,
    )


def tally_of_one(flags: frozenset[Flag], reading: Reading) -> Tally:
    """Return the tally of a job of one rank."""
    loss, norm, above, below = reading
    sound = math.isfinite((loss or 0.0) + (norm or 0.0))
    return Tally(flags, sound, loss, norm, int(loss is not None), above, below)


def to_row(value: float | None) -> float:
    """Return a rank's number as one that survives a maximum with what other ranks put in its place."""
    if value is None:
        return -math.inf
    if math.isnan(value):
        return _LARGEST
    return value if value > -math.inf else -_LARGEST


def from_row(value: float) -> float | None:
    """Return what :func:`to_row` was given; a NaN would not come through a maximum."""
    if -_LARGEST < value < _LARGEST:
        return value
    return {-math.inf: None, -_LARGEST: -math.inf, _LARGEST: math.nan, math.inf: math.inf}[value]


NORMAL = 1.4826  # MAD to standard deviation of a normal distribution (Rousseeuw and Croux, 1993)
_UNITS = 300  # of a reach; e to the power of twice as many is still a float64 when 10^47 ranks add it up
_LEAST_REACH = 1e-9  # of the centre, where ranks were always alike
_TINY = 1e-300
_ROUNDING = 1e-9  # units, by which sums of equal terms may be off


@dataclass(frozen=True)
class Limit:
    """The limit for spikes.

    Args:
        size: values that are kept.
        warmup: values without which nothing is a spike.
        factor: spreads above the median that are still none.
        floor: the least spread, as a share of the median.
    """

    size: int
    warmup: int
    factor: float
    floor: float


class Window:
    """The latest values of one number, in their order and sorted.

    Args:
        limit: what counts as a spike.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> list[float]:
        """The values, the oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        """The median of at least one value."""
        return _middle(self._sorted)

    @property
    def spread(self) -> float:
        """The MAD, scaled to a standard deviation, and not below the floor."""
        median = self.median
        deviation = _middle(sorted(abs(one - median) for one in self._sorted))
        return max(NORMAL * deviation, self._limit.floor * abs(median))

    @property
    def reach(self) -> float:
        """The bound of usual values: the limit for spikes, or the largest value if that is more."""
        return max(self.median + self._limit.factor * self.spread, self._sorted[-1])

    def spikes(self, value: float) -> bool:
        """Say whether a value is a spike; if all values are equal, none is."""
        limit = self._limit
        if len(self._values) < limit.warmup:
            return False
        above, median = value - self.median, self.median
        if above <= limit.factor * limit.floor * abs(median):  # spares the MAD in nearly every step
            return False
        return above > limit.factor * self.spread > 0

    def add(self, value: float) -> None:
        """Add a finite value, and drop the oldest if there are too many."""
        if len(self._values) == self._limit.size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    def replace(self, values: Iterable[float]) -> None:
        """Replace the values, by the newest of these if there are too many."""
        self._values = deque(map(float, values), maxlen=self._limit.size)
        self._sorted = sorted(self._values)


class Spacing:
    """The range of the numbers of many ranks, from two sums over ranks.

    With terms e^x and e^-x, x being a rank's number less a centre in small units, the logarithms of the means
    of both tell the range, whatever the centre. They tell it from below, by 2 ln(n) units at most: with the
    unit of a 300th of the reach, at 4 ranks 1 % of the reach and at 100,000 ranks 8 %.

    Args:
        centre: near the numbers; equal on every rank.
        window: of how far apart the ranks were lately.
    """

    def __init__(self, centre: float, window: Window) -> None:
        self._centre = centre
        self._unit = max(window.reach, _LEAST_REACH * abs(centre), _TINY) / _UNITS

    def terms(self, value: float) -> tuple[float, float]:
        """Return the terms of a rank; infinite beyond two reaches from the centre."""
        x = (value - self._centre) / self._unit
        return (math.exp(x), math.exp(-x)) if abs(x) <= 2 * _UNITS else (math.inf, math.inf)

    def apart(self, count: int, above: float, below: float) -> float | None:
        """Return the range of the numbers of so many ranks; None: the sums do not give it."""
        if count < 2 or not (0 < above < math.inf and 0 < below < math.inf):
            return None
        told = math.log(above / count) + math.log(below / count)
        return told * self._unit if told > _ROUNDING else 0.0


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
