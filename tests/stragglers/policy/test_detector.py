"""The decider on simulated jobs: who is named, when, of which kind, and who is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.rows import Kind, Row, State
from tests.stragglers.policy.builders import ONSET, STEPS, Fleet, Told, named, slow

LOG = {"log": 0.001, "forward": 0.8}
UNEVEN = (1.0, 1.0, 1.0, 2.0)


def for_windows(factor: float, windows: range) -> Callable[[int, int, str], float]:
    return lambda rank, at, _: factor if rank == 5 and at in windows else 1.0


@pytest.mark.parametrize(
    ("section", "kind"),
    [("data", Kind.DATA), ("forward", Kind.COMPUTE), ("reduce", Kind.COMMUNICATION)],
)
def test_a_rank_at_half_speed_is_named_with_the_kind_of_its_section(section: str, kind: Kind) -> None:
    told = Fleet(4, slow=slow(2, 2.0, section, since=ONSET)).watch(ONSET + 6)
    assert named(told) == {(2, section)}
    number, verdict = told[0]
    assert number < ONSET + 5
    assert (verdict.kind, verdict.node, verdict.share_of_steps) == (kind, "n0", 1.0)
    assert verdict.slowdown == pytest.approx(2.0, rel=0.05)
    assert verdict.confidence > 0.999_99
    lost = {"data": 0.02, "forward": 0.3, "reduce": 0.05}[section]
    assert verdict.job_slowdown == pytest.approx(1 + lost / 0.87, rel=0.05), "0.87 s a step"


TWELVE = slow(1, 1.12, "backward", since=ONSET)  # NVRx is blind up to 43 %
NAMED = {
    **{f"12 % of {n}": (Fleet(n, noise=0.01, slow=TWELVE), 24, {(1, "backward")}) for n in (2, 3, 4, 16, 64)},
    **{f"1 of {n} from the start": (Fleet(n, slow=slow(0, 1.5)), 40, {(0, "forward")}) for n in (2, 4, 64)},
    "below the least effect": (Fleet(64, noise=0.001, slow=slow(3, 1.04)), 40, set()),
    "costs nearly nothing": (Fleet(16, whole=LOG, slow=slow(3, 2.0, "log")), 40, set()),
    "costs more": (Fleet(16, whole={**LOG, "log": 0.02}, slow=slow(3, 2.0, "log")), 40, {(3, "log")}),
    "empty": (Fleet(4, whole={"empty": 2e-6}, noise=0.3, slow=slow(1, 3.0, "empty")), 60, set()),
    "a stage with more work": (Fleet(32, stages=UNEVEN), 40, set()),
    "in a stage with less": (Fleet(32, stages=UNEVEN, slow=slow(9, 1.5)), 40, {(9, "forward")}),
    "the others wait": (Fleet(8, slow=slow(5, 2.0)), 30, {(5, "forward")}),
    "it explains waiting": (Fleet(8, slow=slow(5, 1.5), tells_waiting=False), 22, {(5, "forward")}),
    "for one window": (Fleet(64, slow=for_windows(3.0, range(20, 21))), 60, set()),
    "for two windows": (Fleet(64, slow=for_windows(3.0, range(20, 22))), 60, set()),
    "light work": (Fleet(8, slow=lambda _, at, __: 0.4 if 20 <= at < 25 else 1.0), 60, set()),
    "one rank": (Fleet(1), 10, set()),
}


@pytest.mark.parametrize(("fleet", "windows", "expected"), NAMED.values(), ids=NAMED)
def test_who_is_named(fleet: Fleet, windows: int, expected: set[tuple[int, str]]) -> None:
    told = replace(fleet).watch(windows)
    assert named(told) == expected
    assert expected or not told


@pytest.mark.parametrize("peers_take", [0.0, 1e-5])
@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("seconds", [0.002_46, 0.004, 0.02])
def test_milliseconds_where_the_peers_take_none(ranks: int, seconds: float, peers_take: float) -> None:
    """No ratio holds there, so a rank must lose 5 ms of a step; one peer without a time proves nothing."""
    whole = {"forward": 0.02, "log": seconds}
    told = Fleet(ranks, whole=whole, slow=lambda rank, _, name: rank == 0 or name != "log" or peers_take)
    found = seconds >= 0.02 and (ranks > 2 or peers_take > 0)
    assert named(told.watch(60)) == ({(0, "log")} if found else set())


def test_another_model_of_the_device_is_no_straggler() -> None:
    fleet = Fleet(16, slow=lambda rank, _, __: 1.5 if rank >= 8 else 1.0)
    fleet.places = {r: replace(p, device="A100" if r >= 8 else "H100") for r, p in fleet.places.items()}
    assert not fleet.watch(30)
    fleet = Fleet(4)
    fleet.places[3] = replace(fleet.places[3], device="another")
    ((number, verdict),) = fleet.watch(10)
    assert (number, verdict.rank, verdict.state) == (0, 3, State.UNKNOWN), "it has no peers, told once"


def test_slow_now_and_then_is_found_if_it_costs_enough() -> None:
    """Every second window twice as slow: 1.5 times on the average."""
    now_and_then = Fleet(8, slow=lambda rank, at, name: 1.0 + (rank == 5 and name == "forward" and at % 2))
    ((number, verdict), *_) = now_and_then.watch(40)
    assert (verdict.rank, verdict.section) == (5, "forward")
    assert 0.3 < verdict.share_of_steps < 0.8
    assert number < 30


def test_the_stragglers_are_listed_by_what_they_cost() -> None:
    decider = Straggling(STEPS)
    factors = {3: 1.3, 9: 2.0}
    Fleet(32, slow=lambda rank, _, name: factors.get(rank, 1.0) if name == "forward" else 1.0).watch(
        20, decider
    )
    assert [one.rank for one in decider.slow] == [9, 3]


# Noise


@pytest.mark.parametrize("section", ["forward", "data"])
def test_noise_in_single_windows_hides_no_rank_at_half_speed(section: str, seed: int) -> None:
    """Windows spread by 18 %, as samples on a busy host do: with its peers' that is a third of the effect."""
    fleet = Fleet(4, seed, noise=0.18 * math.sqrt(STEPS), slow=slow(2, 2.0, section, since=30))
    (number, first), *_ = fleet.watch(30 + 30)
    assert (first.rank, first.state) == (2, State.ON)
    assert first.section in (section, "")
    assert number >= 30


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (8, 2), (64, 4)])
def test_healthy_ranks_raise_no_alarm(ranks: int, stages: int, noise: float, seed: int) -> None:
    assert not Fleet(ranks, seed, noise, stages=(1.0,) * stages).watch(120 if ranks > 8 else 400)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_that_lasts_for_some_windows_raises_no_alarm(ranks: int, seed: int) -> None:
    """Half of a deviation is left after each window."""
    draw = random.Random(seed)
    left: dict[tuple[int, str], tuple[int, float]] = {}

    def lasting(rank: int, at: int, section: str) -> float:
        before, value = left.get((rank, section), (-1, draw.gauss(0, 1)))
        if before < at:
            value = 0.5 * value + math.sqrt(0.75) * draw.gauss(0, 1)
            left[rank, section] = at, value
        return math.exp(0.15 * value)

    assert not named(Fleet(ranks, seed, slow=lasting).watch(400))


@pytest.mark.parametrize("what", ["uneven sequences", "pauses of single ranks"])
def test_ranks_that_are_slow_now_and_then_at_random_raise_no_alarm(what: str, seed: int) -> None:
    draw = random.Random(seed)
    drawn: dict[tuple[int, int], float] = {}

    def factor() -> float:
        if what == "uneven sequences":
            return math.exp(draw.gauss(0, 0.25))
        return 1.4 if draw.random() < 0.02 else 1.0

    stages = (1, 1, 1, 1.6) if what == "uneven sequences" else (1.0,)
    fleet = Fleet(64, seed, stages=stages, slow=lambda rank, at, _: drawn.setdefault((rank, at), factor()))
    assert not fleet.watch(100)


# Where only waiting is known


def test_what_no_section_explains_is_told_all_the_same() -> None:
    """The slow section is not timed on any rank."""
    fleet = Fleet(8, slow=slow(5, 2.0, since=ONSET))
    told = fleet.watch(ONSET + 10, change=lambda _, row: row if row.section != "forward" else None)
    assert {(one.rank, one.section) for _, one in told} == {(5, "")}


def test_a_rank_whose_waiting_is_missing_is_not_taken_for_one_that_waits_least() -> None:
    decider = Straggling(STEPS)
    told = Fleet(8, tells_waiting=False).watch(
        20, decider, change=lambda _, row: None if (row.rank, row.section) == (5, "reduce") else row
    )
    assert not named(told)
    assert [(one.rank, one.section) for one in decider.unknown] == [(5, "reduce")]


# What is missing is told, and is never health.


@pytest.mark.parametrize(
    "spoil",
    [
        None,
        {"total": math.nan},
        {"total": math.inf},
        {"total": -1.0},
        {"count": 0},
        {"waiting": math.inf},
        {"waiting": math.nan},
    ],
)
def test_a_row_that_cannot_be_used_is_told_once_and_when_it_is_back(spoil: dict[str, float] | None) -> None:
    def spoiled(at: int, row: Row) -> Row | None:
        if at not in range(15, 20) or (row.rank, row.section) != (1, "forward"):
            return row
        return None if spoil is None else replace(row, **spoil)  # type: ignore[arg-type]

    told = Fleet(4, slow=slow(1, 1.5)).watch(30, change=spoiled)
    states = [(number, one.rank, one.section, one.state) for number, one in told if number >= 15]
    assert states == [(15, 1, "forward", State.UNKNOWN), (20, 1, "forward", State.ON)]
    assert named(told) == {(1, "forward")}


def without(fleet: Fleet, decider: Straggling, left_out: Callable[[int, Row], bool], windows: int) -> Told:
    """Return the verdicts about rank 1 in "forward"."""
    told = fleet.watch(windows, decider, change=lambda at, row: None if left_out(at, row) else row)
    return [(number, one) for number, one in told if one.rank == 1 and one.section == "forward"]


def test_a_rank_that_leaves_a_section_is_unknown_then_not_on_record() -> None:
    """It is named again only after as many slow windows as at first."""
    gone = range(20, 34)
    told = without(
        Fleet(4, slow=slow(1, 1.5)),
        Straggling(STEPS),
        lambda at, row: at in gone and (row.rank, row.section) == (1, "forward"),
        45,
    )
    states = [(number, one.state) for number, one in told]
    assert states[1:4] == [(20, State.UNKNOWN), (29, State.OFF), (34, State.OFF)]
    assert (states[4][1], states[4][0] >= 36) == (State.ON, True)


def test_a_section_that_is_entered_rarely_is_compared_all_the_same() -> None:
    told = without(
        Fleet(4, slow=slow(1, 2.0)),
        Straggling(STEPS),
        lambda at, row: at % 12 > 0 and row.section == "forward",
        12 * 20,
    )
    assert [one.state for _, one in told] == [State.ON]


def test_rows_without_a_place_or_of_another_window_and_no_rows() -> None:
    fleet, decider = Fleet(4), Straggling(STEPS)
    del fleet.places[2]
    (verdict,) = decider.observe(0, fleet.window(0) + Fleet(4).window(0), fleet.places, 0.0)
    assert (verdict.rank, verdict.state) == (2, State.UNKNOWN)
    fleet, decider = Fleet(4), Straggling(STEPS)
    assert {one.state for one in decider.observe(0, [], fleet.places, 0.0)} == {State.UNKNOWN}
    assert not decider.observe(1, [], fleet.places, 0.0)
    fleet, decider = Fleet(4), Straggling(STEPS)
    stale = [replace(row, window=3) for row in fleet.window(0)]
    assert len(decider.observe(7, stale, fleet.places, 0.0)) == 4
    assert decider.observe(7, fleet.window(7), fleet.places, 0.0) == []
    assert decider.observe(6, fleet.window(6), fleet.places, 0.0) == []


# Properties


@st.composite
def jobs(draw: st.DrawFn) -> Fleet:
    stages = draw(st.integers(1, 3))
    ranks = stages * draw(st.integers(2, 6))
    factors = {
        draw(st.integers(0, ranks - 1)): draw(st.sampled_from([1.0, 1.3, 2.5]))
        for _ in range(draw(st.integers(0, 2)))
    }
    return Fleet(
        ranks,
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([0.005, 0.03])),
        stages=(1.0, 1.4, 2.0)[:stages],
        slow=lambda rank, at, name: factors.get(rank, 1.0) if name == "backward" and at >= 10 else 1.0,
    )


def told_of(
    fleet: Fleet, change: Callable[[list[Row]], list[Row]] = list, names: dict[int, int] | None = None
) -> list[object]:
    """Return the verdicts about a job whose rows are changed and whose ranks have other numbers."""
    names = names or {rank: rank for rank in range(fleet.ranks)}
    decider, fleet = Straggling(STEPS), replace(fleet)
    back = {new: old for old, new in names.items()}
    places = {names[rank]: replace(place, rank=names[rank]) for rank, place in fleet.places.items()}
    found = []
    for number in range(24):
        rows = [replace(row, rank=names[row.rank]) for row in change(fleet.window(number))]
        found += sorted(
            (number, back[one.rank], one.section, one.state.value, round(one.slowdown, 6))
            for one in decider.observe(number, rows, places, number * 5.0)
        )
    return found


@bounds(max_examples=10)
@given(jobs(), st.integers(0, 10_000))
def test_neither_the_numbers_of_ranks_nor_the_order_of_rows_matter(fleet: Fleet, draws: int) -> None:
    drawn = random.Random(draws)
    names = dict(enumerate(drawn.sample(range(fleet.ranks), fleet.ranks)))
    assert told_of(fleet, lambda rows: drawn.sample(rows, len(rows)), names) == told_of(fleet)


@bounds(max_examples=10)
@given(jobs(), st.sampled_from([0.5, 4.0, 64.0]))
def test_the_unit_of_time_does_not_matter(fleet: Fleet, factor: float) -> None:
    """Times a power of two, so that nothing is rounded."""

    def scaled(rows: list[Row]) -> list[Row]:
        return [replace(row, total=row.total * factor, waiting=row.waiting * factor) for row in rows]

    assert told_of(fleet, scaled) == told_of(fleet)


@bounds(max_examples=10)
@given(jobs(), st.integers(0, 10_000))
def test_missing_rows_name_nobody_who_is_healthy(fleet: Fleet, draws: int) -> None:
    drawn, decider = random.Random(draws), Straggling(STEPS)
    for number in range(24):
        rows = [replace(row, total=math.nan) if drawn.random() < 0.1 else row for row in fleet.window(number)]
        rows = [row for row in rows if drawn.random() > 0.1]
        for one in decider.observe(number, rows, fleet.places, number * 5.0):
            assert one.state is not State.ON or fleet.slow(one.rank, number, "backward") > 1
