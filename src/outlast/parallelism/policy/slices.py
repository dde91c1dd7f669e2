"""Rectangular parts of tensors: which stored parts make up a wanted one, and which bytes those are.

A saved world keeps a tensor in parts, each at its offsets in the whole; a rank of another world
wants a part of its own. Everything here is arithmetic on offsets and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, sub

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor.

    Args:
        offsets: where it begins in the whole, one number a dimension.
        shape: how far it reaches.
    """

    offsets: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Part:
        """Return the part that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    def overlap(self, other: Part) -> Part | None:
        """Return what two parts have in common; None when that is nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = map(min, self._ends(), other._ends())
        shape = tuple(map(sub, high, low))
        return Part(low, shape) if all(length > 0 for length in shape) else None

    def without(self, taken: Part) -> Iterator[Part]:
        """Yield parts that make up this one less ``taken``, which lies within it."""
        offsets, shape = list(self.offsets), list(self.shape)
        for axis, (begin, length) in enumerate(zip(taken.offsets, taken.shape, strict=True)):
            before = begin - offsets[axis]
            after = shape[axis] - before - length
            for start, count in ((offsets[axis], before), (begin + length, after)):
                if count:
                    yield Part(
                        (*offsets[:axis], start, *offsets[axis + 1 :]),
                        (*shape[:axis], count, *shape[axis + 1 :]),
                    )
            offsets[axis], shape[axis] = begin, length

    def _ends(self) -> Iterator[int]:
        return map(add, self.offsets, self.shape)


@dataclass(frozen=True)
class Split:
    """A dimension that is divided among ranks as ``torch.chunk`` divides it.

    Args:
        axis: the tensor's dimension.
        ranks: among how many.
        index: which of them.
    """

    axis: int
    ranks: int
    index: int


def part_of(shape: Shape, splits: Sequence[Split]) -> Part:
    """Return the part that is left of a tensor after one split after the other.

    A rank for which nothing is left holds a part of length 0 at the end of what was divided.
    """
    return reduce(divided, splits, Part.whole(shape))


def divided(part: Part, split: Split) -> Part:
    """Return what one rank has of a part that is divided."""
    length = part.shape[split.axis]
    most = -(-length // split.ranks)
    begin = min(most * split.index, length)
    offsets, shape = list(part.offsets), list(part.shape)
    offsets[split.axis] += begin
    shape[split.axis] = min(most, length - begin)
    return Part(tuple(offsets), tuple(shape))


def overlapping(part: Part, axis: int, ranks: int, wanted: Part) -> range:
    """Return which ranks have some of a wanted part where a part is divided along an axis among them."""
    length = part.shape[axis]
    most = -(-length // ranks)
    begin = max(wanted.offsets[axis] - part.offsets[axis], 0)
    end = min(wanted.offsets[axis] + wanted.shape[axis] - part.offsets[axis], length)
    return range(begin // most, min(-(-end // most), ranks)) if begin < end else range(0)


def cover(wanted: Part, stored: Sequence[Part]) -> tuple[list[tuple[int, Part]], list[Part]]:
    """Find what to take of each stored part so that together it is the wanted part, each element once.

    Args:
        wanted: the part to make up.
        stored: parts of the same tensor; of two that hold an element, the first gives it.

    Returns:
        Pairs of a place in ``stored`` and the part to take from there, and what none of them holds.
    """
    taken: list[tuple[int, Part]] = []
    missing = [wanted] if wanted.numel else []
    for place, each in enumerate(stored):
        rest: list[Part] = []
        for part in missing:
            common = part.overlap(each)
            if common is None:
                rest.append(part)
            else:
                taken.append((place, common))
                rest += part.without(common)
        missing = rest
    return taken, missing


def strides_of(shape: Shape) -> Shape:
    """Return how many elements lie between neighbours along each dimension of a dense tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def place_in(part: Part, holder: Part) -> int:
    """Return how many elements of a dense ``holder`` lie before the first one of a part within it."""
    strides = strides_of(holder.shape)
    return sum(
        (begin - start) * step
        for begin, start, step in zip(part.offsets, holder.offsets, strides, strict=True)
    )


def extent(part: Part, holder: Part) -> int:
    """Return how many elements of a dense ``holder`` lie from the first of a part to its last."""
    strides = strides_of(holder.shape)
    return 1 + sum((length - 1) * step for length, step in zip(part.shape, strides, strict=True))


def blocks(part: Part, holder: Part, limit: int) -> Iterator[Part]:
    """Cut a part so that no piece extends over more than ``limit`` elements of its holder, at least one.

    Args:
        part: not empty.
        holder: the dense part in which it lies.
        limit: elements.
    """
    if extent(part, holder) <= limit:
        yield part
        return
    axis = next(place for place, length in enumerate(part.shape) if length > 1)
    step = strides_of(holder.shape)[axis]
    row = extent(Part(part.offsets, (*part.shape[:axis], 1, *part.shape[axis + 1 :])), holder)
    count = max(1, 1 + (limit - row) // step)
    for begin in range(0, part.shape[axis], count):
        length = min(count, part.shape[axis] - begin)
        offsets = (*part.offsets[:axis], part.offsets[axis] + begin, *part.offsets[axis + 1 :])
        yield from blocks(Part(offsets, (*part.shape[:axis], length, *part.shape[axis + 1 :])), holder, limit)
