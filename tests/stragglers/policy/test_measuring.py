"""Rows of a window: what was measured and what was sampled add up to the time of the window."""

from __future__ import annotations

import pytest

from outlast.stragglers.policy.kinds import kind_of
from outlast.stragglers.policy.measuring import (
    COMMUNICATION,
    DATA,
    STEP,
    Doing,
    Entries,
    Looks,
    Times,
    rows,
)
from outlast.stragglers.policy.rows import Kind

COMPUTING, LOADING, COMMUNICATING, WAITING = Doing
COMPUTE, COMMUNICATE, LOAD = Kind.COMPUTE, Kind.COMMUNICATION, Kind.DATA


def entries(kind: Kind, *durations: float) -> Entries:
    found = Entries(kind)
    found.add(durations)
    return found


MIXED = {COMPUTING: 0.5, LOADING: 0.1, COMMUNICATING: 0.1, WAITING: 0.3}
KINDS = {
    0: {COMPUTING: 0.4, LOADING: 0.2, WAITING: 0.4},
    1: {COMPUTING: 0.1, LOADING: 0.9},
    2: {COMMUNICATING: 0.5, WAITING: 0.5},
}
ONE, OF_EACH_KIND = {0: (COMMUNICATE, 1)}, {0: (COMPUTE, 1), 1: (LOAD, 0.5), 2: (COMMUNICATE, 0.5)}
BEFORE = {0: {WAITING: 3.0, COMMUNICATING: 1.0}, 1: {LOADING: 9.0}}


@pytest.mark.parametrize(
    ("wall", "steps", "sections", "looks", "earlier", "expected"),
    [
        (2, [1, 1], {}, {-1: MIXED}, {}, {STEP: (1, 0), COMMUNICATION: (0.8, 0.6), DATA: (0.2, 0)}),
        (2, [], OF_EACH_KIND, KINDS, {}, {0: (0.8, 0.4), 1: (0.5, 0), 2: (0.5, 0.25), DATA: (0.2, 0)}),
        (1, [1], {}, {}, {}, {STEP: (1, 0), DATA: (0, 0), COMMUNICATION: (0, 0)}),
        (2, [1], ONE, {-1: {COMPUTING: 1}}, BEFORE, {0: (1, 0.75), DATA: (0, 0)}),  # no look fell on it
        (2, [1], ONE, {0: {COMMUNICATING: 1}}, BEFORE, {0: (1, 0)}),
        (1, [], {0: (COMPUTE, 3600)}, {}, {}, {0: (1, 0)}),  # open for many windows
    ],
)
def test_a_window_is_split_by_what_was_sampled(
    wall: float,
    steps: list[float],
    sections: dict[int, tuple[Kind, float]],
    looks: Looks,
    earlier: Looks,
    expected: dict[int, tuple[float, float]],
) -> None:
    """By place, the total and the waiting."""
    made = {slot: entries(*one) for slot, one in sections.items()}
    found = {one.place: one for one in rows(wall, entries(COMPUTE, *steps), made, looks, earlier)}
    for place, one in expected.items():
        assert (found[place].total, found[place].waiting) == pytest.approx(one)


def test_each_part_of_a_window_with_sections_goes_into_one_row() -> None:
    """Half of the section computes; outside of it three of four seconds do."""
    section = {COMPUTING: 2.0, LOADING: 1.0, COMMUNICATING: 1.0}
    outside = {COMPUTING: 6.0, LOADING: 1.0, COMMUNICATING: 0.5, WAITING: 0.5}
    steps, sections = entries(COMPUTE, 1.0, 3.0), {0: entries(COMPUTE, 3.0, 5.0)}
    assert rows(12.0, steps, sections, {0: section, -1: outside}, {}) == (
        Times(0, COMPUTE, 2, median=2.5, p90=2.5, longest=2.5, total=4.0, waiting=0.0),
        Times(STEP, COMPUTE, 2, median=2.25, p90=2.25, longest=2.25, total=3.0, waiting=0.0),
        Times(COMMUNICATION, COMMUNICATE, 2, 1.25, 1.25, 1.25, total=2.5, waiting=0.25),
        Times(DATA, LOAD, 2, 1.25, 1.25, 1.25, total=2.5, waiting=0.0),
    )


def test_a_window_without_a_step_has_rows_of_nothing() -> None:
    """A look may fall between two steps all the same."""
    found = rows(1.0, Entries(), {}, {-1: {COMPUTING: 1.0}}, {})
    assert found == tuple(
        Times(place, kind, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        for place, kind in ((STEP, COMPUTE), (COMMUNICATION, COMMUNICATE), (DATA, LOAD))
    )


@pytest.mark.parametrize("steps", [Entries(), entries(COMPUTE, 0.0)])
def test_what_was_sampled_of_one_step_or_none_is_not_divided(steps: Entries) -> None:
    found = rows(2.0, steps, {0: entries(COMPUTE, 1.0)}, {0: {LOADING: 1.0}}, {})
    assert [(one.median, one.total) for one in found if one.place == DATA] == [(1.0, 1.0)]


def test_entries_have_a_median_and_keep_a_bounded_number() -> None:
    found = entries(COMPUTE, *(at / 100 for at in range(20))).times(0, 60.0, 1.0)
    assert (found.median, found.p90, found.longest, found.waiting) == (0.1, 0.18, 0.19, 0.0)
    assert entries(COMPUTE, 3600.0).times(0, 1.0, 1.0).longest == 3600.0
    many = entries(COMPUTE, *[0.001] * 2000)
    assert (len(many.kept), many.count, many.total) == (512, 2000, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ("batch-generator data DataLoader", LOAD),
        ("all-grads-sync forward-recv allreduce", COMMUNICATE),
        ("forward-compute database commit", COMPUTE),
    ],
)
def test_the_words_of_a_name_decide_what_kind_a_section_is(names: str, kind: Kind) -> None:
    assert {kind_of(name) for name in names.split()} == {kind}
    assert kind_of("") is COMPUTE
