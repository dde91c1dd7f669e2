"""Parts of tensors, against numpy's slices and torch's chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.parallelism.policy.slices import (
    Part,
    Split,
    blocks,
    cover,
    divided,
    extent,
    overlapping,
    part_of,
    place_in,
    strides_of,
)

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(part.offsets, part.shape, strict=True))


def numbered(shape: Sequence[int]) -> numpy.ndarray:
    return numpy.arange(math.prod(shape)).reshape(tuple(shape))


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...], least: int = 0) -> Part:
    bounds = [sorted((draw(st.integers(0, n - least)), draw(st.integers(0, n - least)))) for n in shape]
    lengths = tuple(high - low + least for low, high in bounds)
    return Part(tuple(low for low, _ in bounds), lengths)


@st.composite
def splits_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Draw pairs of an axis and a number of ranks; an axis may come twice, as in a mesh of two dimensions."""
    axes = st.integers(0, len(shape) - 1)
    return draw(st.lists(st.tuples(axes, st.integers(1, 5)), max_size=3)) if shape else []


def world(shape: tuple[int, ...], mesh: Sequence[tuple[int, int]]) -> list[Part]:
    """Return the part of each rank."""
    found = []
    for ranks in numpy.ndindex(*(count for _, count in mesh)):
        found.append(part_of(shape, [Split(axis, n, i) for (axis, n), i in zip(mesh, ranks, strict=True)]))
    return found


@given(st.data())
def test_a_split_is_what_torch_chunk_gives(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    mesh = data.draw(splits_of(shape))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for ranks in numpy.ndindex(*(count for _, count in mesh)):
        expected = whole
        for (axis, count), index in zip(mesh, ranks, strict=True):
            chunks = expected.chunk(count, axis)
            empty = expected.narrow(axis, expected.shape[axis], 0)
            expected = chunks[index] if index < len(chunks) else empty
        part = part_of(shape, [Split(axis, n, i) for (axis, n), i in zip(mesh, ranks, strict=True)])
        assert part.shape == tuple(expected.shape)
        assert whole[slices(part)].tolist() == expected.tolist()


@given(st.data())
def test_any_part_is_made_up_of_the_parts_of_any_world(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    stored = world(shape, data.draw(splits_of(shape)))
    wanted = data.draw(parts(shape))
    whole = numbered(shape)
    taken, missing = cover(wanted, stored)
    found = numpy.full(wanted.shape, -1)
    target = found.reshape(-1)
    for place, piece in taken:
        holder = stored[place]
        source = whole[slices(holder)].reshape(-1)
        here, there = strides_of(holder.shape), strides_of(wanted.shape)
        begin, end = place_in(piece, holder), place_in(piece, wanted)
        for index in numpy.ndindex(*piece.shape):
            goes = end + sum(i * step for i, step in zip(index, there, strict=True))
            assert target[goes] == -1, "an element comes twice"
            target[goes] = source[begin + sum(i * step for i, step in zip(index, here, strict=True))]
    assert missing == []
    assert (found == whole[slices(wanted)]).all()


@given(st.data())
def test_the_ranks_that_have_some_of_a_part_are_those_whose_parts_overlap_it(data: st.DataObject) -> None:
    axis, ranks = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 6))
    part, wanted = (
        Part(
            tuple(data.draw(st.integers(0, 5)) for _ in range(2)),
            tuple(data.draw(st.integers(0, 7)) for _ in range(2)),
        )
        for _ in range(2)
    )
    found = overlapping(part, axis, ranks, wanted)
    other = 1 - axis
    along = Part((wanted.offsets[axis],), (wanted.shape[axis],))
    for index in range(ranks):
        each = divided(part, Split(axis, ranks, index))
        assert (each.offsets[other], each.shape[other]) == (part.offsets[other], part.shape[other])
        meets = Part((each.offsets[axis],), (each.shape[axis],)).overlap(along) is not None
        assert meets == (index in found)


@given(st.data())
def test_what_no_part_holds_is_said(data: st.DataObject) -> None:
    """Parts drawn at random overlap and leave gaps: each element is taken once or missing, never both."""
    shape = data.draw(SHAPES)
    stored = data.draw(st.lists(parts(shape), max_size=5))
    wanted = data.draw(parts(shape))
    taken, missing = cover(wanted, stored)
    held = numpy.zeros(shape, dtype=int)
    for each in stored:
        held[slices(each)] = 1
    seen = numpy.zeros(shape, dtype=int)
    for place, piece in taken:
        seen[slices(piece)] += 1
        assert piece.overlap(stored[place]) == piece
    lost = numpy.zeros(shape, dtype=int)
    for piece in missing:
        lost[slices(piece)] += 1
    inside = numpy.zeros(shape, dtype=int)
    inside[slices(wanted)] = 1
    assert (seen == held * inside).all()
    assert (lost == (1 - held) * inside).all()


@given(st.data())
def test_the_bytes_of_a_part_lie_within_its_extent(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    holder = data.draw(parts(shape, least=1))
    inner = data.draw(parts(holder.shape, least=1))
    part = Part(tuple(map(sum, zip(inner.offsets, holder.offsets, strict=True))), inner.shape)
    line = numbered(shape)[slices(holder)].reshape(-1).tolist()
    begin = place_in(part, holder)
    wanted = numbered(shape)[slices(part)].reshape(-1).tolist()
    found = line[begin : begin + extent(part, holder)]
    assert (found[0], found[-1]) == (wanted[0], wanted[-1])
    assert set(wanted) <= set(found)


@given(st.data(), st.integers(1, 40))
def test_blocks_are_the_part_and_none_is_larger_than_allowed(data: st.DataObject, limit: int) -> None:
    shape = data.draw(SHAPES)
    part = data.draw(parts(shape, least=1))
    holder = Part.whole(shape)
    seen = numpy.zeros(shape, dtype=int)
    for block in blocks(part, holder, limit):
        seen[slices(block)] += 1
        assert extent(block, holder) <= limit
    inside = numpy.zeros(shape, dtype=int)
    inside[slices(part)] = 1
    assert (seen == inside).all()


# By hand


def test_the_first_part_that_holds_an_element_gives_it() -> None:
    stored = [Part((2,), (3,)), Part((4,), (4,)), Part((20,), (9,)), Part((2,), (6,))]
    taken = [(0, Part((2,), (3,))), (1, Part((5,), (3,)))]
    assert cover(Part((0,), (10,)), stored) == (taken, [Part((0,), (2,)), Part((8,), (2,))])
    assert cover(Part((2,), (6,)), stored) == (taken, [])
    assert cover(Part((2,), (0,)), stored) == ([], [])
    assert cover(Part((3,), (1,)), []) == ([], [Part((3,), (1,))])


@pytest.mark.parametrize(
    ("limit", "rows"),
    [(20, [4]), (19, [3, 1]), (15, [3, 1]), (14, [2, 2]), (10, [2, 2]), (9, [1, 1, 1, 1]), (5, [1, 1, 1, 1])],
)
def test_blocks_have_as_many_rows_as_the_limit_allows(limit: int, rows: list[int]) -> None:
    holder = Part.whole((4, 5))
    begins = [sum(rows[:place]) for place in range(len(rows))]
    expected = [Part((begin, 0), (count, 5)) for begin, count in zip(begins, rows, strict=True)]
    assert list(blocks(holder, holder, limit)) == expected


@pytest.mark.parametrize(
    "use",
    [
        lambda whole, line: list(whole.without(Part((0, 0), (4,)))),
        lambda whole, line: place_in(line, whole),
        lambda whole, line: extent(line, whole),
    ],
)
def test_a_part_that_is_no_part_of_its_tensor_is_refused(use: Callable[[Part, Part], object]) -> None:
    with pytest.raises(ValueError, match="zip"):
        use(Part.whole((4, 5)), Part.whole((4,)))


def test_a_row_that_is_too_long_is_cut() -> None:
    found = list(blocks(Part((1, 1), (2, 4)), Part.whole((4, 5)), 3))
    assert found == [
        *(Part((1, 1), (1, 3)), Part((1, 4), (1, 1))),
        *(Part((2, 1), (1, 3)), Part((2, 4), (1, 1))),
    ]
