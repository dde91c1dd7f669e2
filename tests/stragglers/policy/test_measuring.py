"""Rows of a window: what was measured and what was sampled add up to the time of the window."""

from __future__ import annotations

import pytest

from outlast.stragglers.policy.kinds import kind_of
from outlast.stragglers.policy.measuring import (
    COMMUNICATION,
    DATA,
    PARTS,
    STEP,
    Doing,
    Entries,
    Times,
    rows,
)
from outlast.stragglers.policy.rows import Kind


def entries(kind: Kind, *durations: float) -> Entries:
    found = Entries(kind)
    found.add(durations)
    return found


def by_place(found: tuple[Times, ...]) -> dict[int, Times]:
    return {one.place: one for one in found}


def test_a_script_without_sections_is_split_by_what_was_sampled() -> None:
    looks = {-1: {Doing.COMPUTING: 0.5, Doing.LOADING: 0.1, Doing.COMMUNICATING: 0.1, Doing.WAITING: 0.3}}
    found = by_place(rows(2.0, entries(Kind.COMPUTE, 1.0, 1.0), {}, looks, {}))
    assert found[STEP].total == pytest.approx(1.0)
    assert found[STEP].median == pytest.approx(0.5)
    assert found[COMMUNICATION].total == pytest.approx(0.8)
    assert found[COMMUNICATION].waiting == pytest.approx(0.6)
    assert found[DATA].total == pytest.approx(0.2)
    assert sum(one.total for one in found.values()) == pytest.approx(2.0)


def test_a_section_keeps_what_is_of_its_kind() -> None:
    looks = {
        0: {Doing.COMPUTING: 0.4, Doing.LOADING: 0.2, Doing.WAITING: 0.4},
        1: {Doing.COMPUTING: 0.1, Doing.LOADING: 0.9},
        2: {Doing.COMMUNICATING: 0.5, Doing.WAITING: 0.5},
    }
    sections = {
        0: entries(Kind.COMPUTE, 1.0),
        1: entries(Kind.DATA, 0.5),
        2: entries(Kind.COMMUNICATION, 0.5),
    }
    found = by_place(rows(2.0, Entries(), sections, looks, {}))
    assert found[0].total == pytest.approx(0.8)
    assert found[0].waiting == pytest.approx(0.4)
    assert found[1].total == pytest.approx(0.5)
    assert (found[2].total, found[2].waiting) == (pytest.approx(0.5), pytest.approx(0.25))
    assert found[DATA].total == pytest.approx(0.2)
    assert found[COMMUNICATION].total == 0.0


def test_each_part_of_a_window_with_sections_goes_into_one_row() -> None:
    """Half of the section computes; outside of it three of four seconds do."""
    section = {Doing.COMPUTING: 2.0, Doing.LOADING: 1.0, Doing.COMMUNICATING: 1.0}
    outside = {Doing.COMPUTING: 6.0, Doing.LOADING: 1.0, Doing.COMMUNICATING: 0.5, Doing.WAITING: 0.5}
    steps, sections = entries(Kind.COMPUTE, 1.0, 3.0), {0: entries(Kind.COMPUTE, 3.0, 5.0)}
    assert rows(12.0, steps, sections, {0: section, -1: outside}, {}) == (
        Times(0, Kind.COMPUTE, 2, median=2.5, p90=2.5, longest=2.5, total=4.0, waiting=0.0),
        Times(STEP, Kind.COMPUTE, 2, median=2.25, p90=2.25, longest=2.25, total=3.0, waiting=0.0),
        Times(COMMUNICATION, Kind.COMMUNICATION, 2, 1.25, 1.25, 1.25, total=2.5, waiting=0.25),
        Times(DATA, Kind.DATA, 2, 1.25, 1.25, 1.25, total=2.5, waiting=0.0),
    )


def test_median_and_p90_of_many_entries() -> None:
    found = entries(Kind.COMPUTE, *(at / 100 for at in range(20))).times(0, 60.0, 1.0)
    assert (found.median, found.p90, found.longest, found.waiting) == (0.1, 0.18, 0.19, 0.0)


def test_a_window_without_a_step_has_rows_of_nothing() -> None:
    """A look may fall between two steps all the same."""
    found = rows(1.0, Entries(), {}, {-1: {Doing.COMPUTING: 1.0}}, {})
    assert found == tuple(
        Times(place, kind, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        for place, kind in ((STEP, Kind.COMPUTE), (COMMUNICATION, Kind.COMMUNICATION), (DATA, Kind.DATA))
    )


def test_what_was_sampled_of_one_step_or_none_is_not_divided() -> None:
    sections = {0: entries(Kind.COMPUTE, 1.0)}
    for steps in (Entries(), entries(Kind.COMPUTE, 0.0)):
        found = by_place(rows(2.0, steps, sections, {0: {Doing.LOADING: 1.0}}, {}))
        assert (found[DATA].median, found[DATA].total) == (1.0, 1.0)


def test_there_is_room_for_32_sections_before_the_other_parts() -> None:
    assert (STEP, COMMUNICATION, DATA) == (32, 33, 34)
    assert [PARTS[place - 32] for place in (STEP, COMMUNICATION, DATA)] == ["step", "communication", "data"]


def test_without_a_look_all_of_a_step_is_computing() -> None:
    found = by_place(rows(1.0, entries(Kind.COMPUTE, 1.0), {}, {}, {}))
    assert found[STEP].total == 1.0
    assert found[DATA].total == found[COMMUNICATION].total == 0.0


def test_a_section_that_was_open_for_many_windows_takes_no_more_than_one() -> None:
    found = by_place(rows(1.0, Entries(), {0: entries(Kind.COMPUTE, 3600.0)}, {}, {}))
    assert found[0].total == 1.0
    assert found[0].longest == 3600.0


def test_the_durations_that_are_kept_are_bounded() -> None:
    many = Entries()
    many.add(0.001 for _ in range(2000))
    assert len(many.kept) == 512
    assert many.count == 2000
    assert many.total == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("batch-generator", Kind.DATA),
        ("data", Kind.DATA),
        ("DataLoader", Kind.DATA),
        ("all-grads-sync", Kind.COMMUNICATION),
        ("forward-recv", Kind.COMMUNICATION),
        ("allreduce", Kind.COMMUNICATION),
        ("forward-compute", Kind.COMPUTE),
        ("database", Kind.COMPUTE),
        ("commit", Kind.COMPUTE),
        ("", Kind.COMPUTE),
    ],
)
def test_the_words_of_a_name_say_what_kind_a_section_is(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


def test_a_section_that_no_look_fell_on_is_shared_out_as_before() -> None:
    """A collective that is mostly waiting does not become busy because the looks missed it."""
    sections = {0: entries(Kind.COMMUNICATION, 1.0)}
    earlier = {0: {Doing.WAITING: 3.0, Doing.COMMUNICATING: 1.0}, 1: {Doing.LOADING: 9.0}}
    found = by_place(rows(2.0, entries(Kind.COMPUTE, 1.0), sections, {-1: {Doing.COMPUTING: 1.0}}, earlier))
    assert (found[0].total, found[0].waiting) == (1.0, 0.75)
    assert found[DATA].total == 0.0
    now = {0: {Doing.COMMUNICATING: 1.0}}
    assert by_place(rows(2.0, entries(Kind.COMPUTE, 1.0), sections, now, earlier))[0].waiting == 0.0
