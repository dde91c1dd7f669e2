"""What the numbers of all ranks come to in a step: sums in a row that is as wide for any number of ranks.

One sum over all ranks carries what is needed of a good step: flags, the mean loss, the norm of all gradients,
whether every number is finite and, where ranks are compared, how far apart they are. A maximum would tell
neither a mean nor the norm of gradients that are sharded. Whose number is bad is told in an exchange of its
own (:func:`to_row`), made in steps in which something is wrong.

Every rank gets the same bits: gloo adds up each part of a row on one rank, and hands the result round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from outlast.core.step import Flag, Reading

_FLAGS = tuple(Flag)
_CALM = (0.0,) * len(_FLAGS)
_NONE: frozenset[Flag] = frozenset()
_UNFIT = (1.0, *(0.0,) * 6)
WIDTH = len(_FLAGS) + len(_UNFIT)  # numbers of a row, 8 bytes each
_LARGEST = float.fromhex("0x1.fffffffffffffp+1023")


class Tally(NamedTuple):
    """What the readings of all ranks come to.

    Args:
        flags: those that are up on a rank.
        sound: every number of every rank is finite, and so is what they come to.
        loss: the mean over the ranks that have one; None: none has.
        grad_norm: the norm of all gradients of all ranks; None: none has any.
        losses: ranks that have a loss.
        above: the sum of their first terms, see :class:`outlast.core.spikes.Spacing`; 0: not compared.
        below: the sum of their second terms.
    """

    flags: frozenset[Flag]
    sound: bool
    loss: float | None
    grad_norm: float | None
    losses: int
    above: float = 0.0
    below: float = 0.0


class Observation(NamedTuple):
    """What a step's vote said of its numbers; equal on every rank.

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
    """Return what the sum of all rows means."""
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
