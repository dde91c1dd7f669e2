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

from outlast.stragglers.policy import detector as module
from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.limits import Chance, Limits
from outlast.stragglers.policy.rows import Kind, Place, Row, State, Verdict
from tests.stragglers.fleet import STEPS, Fleet, named, slow

ONSET = 12  # windows of health before a rank turns slow


@pytest.mark.parametrize(
    ("section", "kind"),
    [("data", Kind.DATA), ("forward", Kind.COMPUTE), ("reduce", Kind.COMMUNICATION)],
)
def test_a_rank_at_half_speed_is_named_with_the_kind_of_its_section(section: str, kind: Kind) -> None:
    told = Fleet(4, slow=slow(2, 2.0, section, since=ONSET)).watch(ONSET + 6)
    assert named(told) == {(2, section)}
    number, verdict = told[0]
    assert number < ONSET + 5
    assert (verdict.kind, verdict.node) == (kind, "n0")
    assert verdict.slowdown == pytest.approx(2.0, rel=0.05)
    assert verdict.share_of_steps == 1.0
    assert verdict.confidence > 0.999_99
    assert f"as long as its 3 peers in '{section}'" in verdict.reason
    assert f"{verdict.windows} of the latest {verdict.windows} windows" in verdict.reason


def test_the_estimate_of_the_jobs_slowdown() -> None:
    """0.87 s a step; rank 2 takes 0.3 s more."""
    (_, verdict), *_ = Fleet(8, slow=slow(2, 2.0, since=ONSET)).watch(ONSET + 6)
    assert verdict.job_slowdown == pytest.approx((0.87 + 0.30) / 0.87, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16, 64])
def test_twelve_percent_are_found_where_nvrx_is_blind_up_to_43(ranks: int) -> None:
    told = Fleet(ranks, noise=0.01, slow=slow(1, 1.12, "backward", since=ONSET)).watch(ONSET + 12)
    assert named(told) == {(1, "backward")}


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_rank_that_is_slow_from_the_start_is_found(ranks: int) -> None:
    assert named(Fleet(ranks, slow=slow(0, 1.5)).watch(40)) == {(0, "forward")}


@pytest.mark.parametrize("factor", [1.02, 1.04])
def test_what_is_below_the_least_effect_is_not_told(factor: float) -> None:
    assert not Fleet(64, noise=0.001, slow=slow(3, factor)).watch(40)


def test_a_slow_section_that_costs_nearly_nothing_is_not_told() -> None:
    """Twice 1 ms of a step of 0.85 s."""
    whole = {"log": 0.001, "forward": 0.8}
    assert not Fleet(16, whole=whole, slow=slow(3, 2.0, "log")).watch(40)
    whole["log"] = 0.02
    assert named(Fleet(16, whole=whole, slow=slow(3, 2.0, "log")).watch(40)) == {(3, "log")}


def test_microseconds_of_an_empty_section_are_not_told() -> None:
    """NVRx flags these: 3 us are half as fast as 1.5 us."""
    whole = {"empty": 2e-6}
    assert not Fleet(4, whole=whole, noise=0.3, slow=slow(1, 3.0, "empty")).watch(60)


@pytest.mark.parametrize("peers_take", [0.0, 1e-5])
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("seconds", [0.002_46, 0.004, 0.02])
def test_milliseconds_where_the_peers_take_none(ranks: int, seconds: float, peers_take: float) -> None:
    """No ratio tells there, so a rank must lose 5 ms of a step; one peer without a time says nothing."""
    whole = {"forward": 0.02, "log": seconds}
    told = Fleet(ranks, whole=whole, slow=lambda rank, _, name: rank == 0 or name != "log" or peers_take)
    found = seconds >= 0.02 and (ranks > 2 or peers_take > 0)
    assert named(told.watch(60)) == ({(0, "log")} if found else set())


def test_a_stage_with_more_work_is_no_straggler() -> None:
    fleet = Fleet(32, stages=(1.0, 1.0, 1.0, 2.0))
    assert not fleet.watch(40)


def test_a_straggler_in_a_stage_with_less_work_is_found() -> None:
    told = Fleet(32, stages=(1.0, 1.0, 1.0, 2.0), slow=slow(9, 1.5)).watch(40)
    assert named(told) == {(9, "forward")}


def test_another_model_of_the_device_is_no_straggler() -> None:
    fleet = Fleet(16, slow=lambda rank, _, __: 1.5 if rank >= 8 else 1.0)
    fleet.places = {r: replace(p, device="A100" if r >= 8 else "H100") for r, p in fleet.places.items()}
    assert not fleet.watch(30)


def test_uneven_work_is_no_straggler() -> None:
    """Sequence lengths differ at random: every rank is slow now and then, none for long."""
    draw = random.Random(7)
    lengths: dict[tuple[int, int], float] = {}

    def uneven(rank: int, window: int, section: str) -> float:
        return lengths.setdefault((rank, window), math.exp(draw.gauss(0, 0.25)))

    assert not Fleet(64, stages=(1, 1, 1, 1.6), slow=uneven).watch(80)


def test_slow_now_and_then_is_found_if_it_costs_enough() -> None:
    """Every second window twice as slow: 1.5 times on the average."""
    now_and_then = Fleet(
        8, slow=lambda rank, window, name: 2.0 if rank == 5 and name == "forward" and window % 2 else 1.0
    )
    ((number, verdict), *_) = now_and_then.watch(40)
    assert (verdict.rank, verdict.section) == (5, "forward")
    assert 0.3 < verdict.share_of_steps < 0.8
    assert number < 30


def test_on_needs_several_windows() -> None:
    for windows in (1, 2):
        fleet = Fleet(64, slow=lambda rank, at, _, n=windows: 3.0 if rank == 5 and 20 <= at < 20 + n else 1.0)
        assert not fleet.watch(60)


def test_off_when_it_is_fast_again_and_not_between_the_limits() -> None:
    def factor(rank: int, window: int, section: str) -> float:
        if rank != 1 or section != "forward" or window < ONSET:
            return 1.0
        return 1.5 if window < 30 else 1.07 if window < 50 else 1.0

    told = Fleet(16, noise=0.005, slow=factor).watch(80)
    assert [one.state for _, one in told] == [State.ON, State.OFF]
    number, verdict = told[1]
    assert 50 < number < 60
    assert (verdict.rank, verdict.section) == (1, "forward")
    assert "as fast as its 15 peers again" in verdict.reason


def test_the_stragglers_are_listed_by_what_they_cost() -> None:
    def two(rank: int, window: int, section: str) -> float:
        return {3: 1.3, 9: 2.0}.get(rank, 1.0) if section == "forward" else 1.0

    decider = Straggling(STEPS)
    Fleet(32, slow=two).watch(20, decider)
    assert [one.rank for one in decider.slow] == [9, 3]


@pytest.mark.parametrize("section", ["forward", "data"])
def test_noise_in_single_windows_hides_no_rank_at_half_speed(section: str, seed: int) -> None:
    """Windows spread by 18 %, as samples on a busy host do: with its peers' that is a third of the effect."""
    fleet = Fleet(4, seed, noise=0.18 * math.sqrt(STEPS), slow=slow(2, 2.0, section, since=30))
    (number, first), *_ = fleet.watch(30 + 30)
    assert (first.rank, first.state) == (2, State.ON)
    assert first.section in (section, "")
    assert number >= 30


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_that_lasts_for_some_windows_raises_no_alarm(ranks: int, seed: int) -> None:
    """Half of a deviation is left after each window."""
    draw = random.Random(seed)
    left: dict[tuple[int, str], tuple[int, float]] = {}

    def lasting(rank: int, window: int, section: str) -> float:
        at, value = left.get((rank, section), (-1, draw.gauss(0, 1)))
        if at < window:
            value = 0.5 * value + math.sqrt(0.75) * draw.gauss(0, 1)
            left[rank, section] = window, value
        return math.exp(0.15 * value)

    assert not named(Fleet(ranks, seed, slow=lasting).watch(400))


# Busy time is told from waiting; the culprit waits least.


def test_those_who_wait_are_not_slow() -> None:
    told = Fleet(8, slow=slow(5, 2.0)).watch(30)
    assert named(told) == {(5, "forward")}


def test_a_collective_of_which_waiting_is_unknown_names_who_waits_least() -> None:
    """Nothing else is timed, as in a script of which only the collectives are."""
    fleet = Fleet(8, slow=slow(5, 1.5, since=ONSET), tells_waiting=False)
    decider = Straggling(STEPS)
    told = []
    for number in range(ONSET + 10):
        rows = [row for row in fleet.window(number) if row.section == "reduce"]
        told += decider.observe(number, rows, fleet.places, number * 5.0)
    (verdict,) = told
    assert (verdict.rank, verdict.section, verdict.kind) == (5, "", Kind.OTHER)
    assert verdict.job_slowdown > 1.1


def test_a_slow_section_that_explains_the_waiting_is_told_alone() -> None:
    fleet = Fleet(8, slow=slow(5, 1.5, since=ONSET), tells_waiting=False)
    assert named(fleet.watch(ONSET + 10)) == {(5, "forward")}


def test_what_no_section_explains_is_told_all_the_same() -> None:
    """The slow section is not timed on any rank."""
    fleet = Fleet(8, slow=slow(5, 2.0, since=ONSET))
    decider = Straggling(STEPS)
    told: list[Verdict] = []
    for number in range(ONSET + 10):
        rows = [row for row in fleet.window(number) if row.section != "forward"]
        told += decider.observe(number, rows, fleet.places, number * 5.0)
    assert {(one.rank, one.section) for one in told} == {(5, "")}
    assert "no section explains it" in told[0].reason


def test_a_rank_whose_waiting_is_missing_is_not_taken_for_one_that_waits_least() -> None:
    fleet = Fleet(8, tells_waiting=False)
    decider = Straggling(STEPS)
    for number in range(20):
        rows = [row for row in fleet.window(number) if (row.rank, row.section) != (5, "reduce")]
        told = decider.observe(number, rows, fleet.places, number * 5.0)
        assert not [one for one in told if one.state is State.ON]
    assert [(one.rank, one.section) for one in decider.unknown] == [(5, "reduce")]


# What is missing is told, and is never health.

BAD: list[Callable[[Row], Row | None]] = [
    lambda row: None,
    lambda row: replace(row, total=math.nan),
    lambda row: replace(row, total=math.inf),
    lambda row: replace(row, total=-1.0),
    lambda row: replace(row, count=0),
    lambda row: replace(row, waiting=math.inf),
    lambda row: replace(row, waiting=math.nan),
]


@pytest.mark.parametrize("spoil", BAD)
def test_a_row_that_cannot_be_used_is_told_once_and_when_it_is_back(
    spoil: Callable[[Row], Row | None],
) -> None:
    fleet, decider = Fleet(4, slow=slow(1, 1.5)), Straggling(STEPS)
    told = []
    for number in range(30):
        rows = fleet.window(number)
        if 15 <= number < 20:
            spoiled = [spoil(row) if (row.rank, row.section) == (1, "forward") else row for row in rows]
            rows = [row for row in spoiled if row is not None]
        told += [(number, one) for one in decider.observe(number, rows, fleet.places, number * 5.0)]
    states = [(number, one.rank, one.section, one.state) for number, one in told if number >= 15]
    assert states == [(15, 1, "forward", State.UNKNOWN), (20, 1, "forward", State.ON)]
    assert named(told) == {(1, "forward")}


def test_a_rank_of_which_nothing_comes() -> None:
    fleet, decider = Fleet(4), Straggling(STEPS)
    told = []
    for number in range(10):
        rows = [row for row in fleet.window(number) if row.rank != 3 or number not in (4, 5)]
        told += [(number, one) for one in decider.observe(number, rows, fleet.places, 0.0)]
    assert [(number, one.rank, one.section, one.state) for number, one in told] == [
        (4, 3, "", State.UNKNOWN),
        (6, 3, "", State.OFF),
    ]
    assert told[0][1].reason == "rank 3 on n0 cannot be judged: no times of it arrived"
    assert math.isnan(told[0][1].slowdown)


def _without(fleet: Fleet, decider: Straggling, left_out: Callable[[int, Row], bool], windows: int) -> list:
    told = []
    for number in range(windows):
        rows = [row for row in fleet.window(number) if not left_out(number, row)]
        told += [(number, one) for one in decider.observe(number, rows, fleet.places, number * 5.0)]
    return [(number, one) for number, one in told if one.rank == 1 and one.section == "forward"]


def presumed(fleet: Fleet) -> Straggling:
    """Return a decider that has seen some windows, and then hears of a finding about rank 1."""
    decider = Straggling(STEPS)
    assert fleet.watch(ONSET, decider) == []
    found = Verdict(1, "n0", Kind.COMPUTE, "forward", 1.5, 1.0, 1.0, 1.2, 0, "found before", State.ON)
    decider.presume(found, 60.0)
    assert decider.slow == [found]
    return decider


def test_what_an_earlier_leader_found_is_told_when_it_is_over_and_not_before() -> None:
    fleet = Fleet(4, slow=slow(1, 1.5, since=ONSET))
    decider = presumed(fleet)
    assert fleet.watch(8, decider, first=ONSET) == []
    (verdict,) = decider.slow
    assert verdict.slowdown == pytest.approx(1.5, rel=0.05)
    assert "for 35 s" in verdict.reason, "since it was heard of"
    fleet.slow = slow(1, 1.0)
    ((number, verdict),) = fleet.watch(8, decider, first=ONSET + 8)
    assert (number, verdict.rank, verdict.state) == (ONSET + 10, 1, State.OFF)
    assert decider.slow == []


def test_what_an_earlier_leader_found_is_withdrawn_without_times() -> None:
    fleet = Fleet(4)
    told = _without(fleet, presumed(fleet), lambda _, row: row.section == "forward", ONSET + 20)
    assert [(number, one.state) for number, one in told] == [(ONSET + 9, State.OFF)]


def test_a_section_that_is_entered_no_more_keeps_no_verdict() -> None:
    fleet, decider = Fleet(4, slow=slow(1, 1.5)), Straggling(STEPS)
    told = _without(fleet, decider, lambda number, row: number >= 20 and row.section == "forward", 40)
    assert [one.state for _, one in told] == [State.ON, State.OFF]
    number, verdict = told[1]
    assert number == 29
    assert verdict.reason == (
        "rank 1 on n0 is no straggler on record any more: no times of it in 'forward' for 10 windows;"
        " it may still be slow"
    )
    assert not [one for one in decider.slow if one.section]  # that it comes last is still told


def test_a_rank_that_tells_a_section_no_more_is_unknown_then_not_on_record() -> None:
    """It is named again only after as many slow windows as at first."""
    fleet, decider = Fleet(4, slow=slow(1, 1.5)), Straggling(STEPS)
    gone = range(20, 34)
    told = _without(
        fleet, decider, lambda at, row: at in gone and (row.rank, row.section) == (1, "forward"), 45
    )
    states = [(number, one.state) for number, one in told]
    assert states[1:4] == [(20, State.UNKNOWN), (29, State.OFF), (34, State.OFF)]
    assert "known again" in told[3][1].reason
    assert (states[4][1], states[4][0] >= 36) == (State.ON, True)


def test_a_section_that_is_entered_rarely_is_compared_all_the_same() -> None:
    fleet, decider = Fleet(4, slow=slow(1, 2.0)), Straggling(STEPS)
    told = _without(fleet, decider, lambda at, row: at % 12 > 0 and row.section == "forward", 12 * 20)
    assert [one.state for _, one in told] == [State.ON]


def test_a_section_entered_on_one_rank_only() -> None:
    fleet, decider = Fleet(4), Straggling(STEPS)
    for number in range(10):
        rows = fleet.window(number)
        rows.append(replace(rows[0], section="save"))
        assert named([(0, one) for one in decider.observe(number, rows, fleet.places, 0.0)]) == set()
    (verdict,) = decider.unknown
    assert (verdict.rank, verdict.section) == (0, "save")
    assert "only 1 of 4 peers enter 'save'" in verdict.reason


def test_of_a_job_of_one_rank_nothing_is_told() -> None:
    assert Fleet(1).watch(10) == []


def test_a_rank_without_peers_is_told_once() -> None:
    fleet = Fleet(4)
    fleet.places[3] = replace(fleet.places[3], device="another")
    ((number, verdict),) = fleet.watch(10)
    assert (number, verdict.rank, verdict.state) == (0, 3, State.UNKNOWN)
    assert "no other rank has equal work on an equal device" in verdict.reason


def test_a_rank_without_a_place() -> None:
    fleet, decider = Fleet(4), Straggling(STEPS)
    del fleet.places[2]
    fleet_rows = Fleet(4).window(0)
    (verdict,) = decider.observe(0, fleet_rows, fleet.places, 0.0)
    assert (verdict.rank, verdict.reason) == (2, "rank 2 cannot be judged: it is not known where it runs")


def test_no_rows_at_all() -> None:
    fleet, decider = Fleet(4), Straggling(STEPS)
    assert {one.state for one in decider.observe(0, [], fleet.places, 0.0)} == {State.UNKNOWN}
    assert not decider.observe(1, [], fleet.places, 0.0)


def test_rows_of_another_window_are_not_looked_at() -> None:
    fleet, decider = Fleet(4), Straggling(STEPS)
    stale = [replace(row, window=3) for row in fleet.window(0)]
    assert len(decider.observe(7, stale, fleet.places, 0.0)) == 4
    assert decider.observe(7, fleet.window(7), fleet.places, 0.0) == []
    assert decider.observe(6, fleet.window(6), fleet.places, 0.0) == []


def test_a_rank_that_moves_to_another_node_begins_anew() -> None:
    """NVRx remembers the first node of a rank for ever."""
    fleet, decider = Fleet(8, slow=slow(5, 2.0)), Straggling(STEPS)
    fleet.watch(20, decider)
    assert [one.node for one in decider.slow] == ["n0"]
    fleet.places = {**fleet.places, 5: Place(5, "spare")}
    fleet.slow = lambda *_: 1.0
    told = fleet.watch(20, decider, first=20)
    assert [(one.rank, one.node, one.state, one.reason) for _, one in told] == [
        (5, "n0", State.OFF, "rank 5 has left n0")
    ]
    assert not decider.slow


def test_light_work_in_between_does_not_change_what_is_usual() -> None:
    """NVRx's individual score ratchets: after one window of short sequences every later one is slow."""
    fleet = Fleet(8, slow=lambda _, window, __: 0.4 if 20 <= window < 25 else 1.0)
    assert not fleet.watch(60)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (8, 2), (64, 4)])
def test_healthy_ranks_raise_no_alarm(ranks: int, stages: int, noise: float, seed: int) -> None:
    assert not Fleet(ranks, seed, noise, stages=(1.0,) * stages).watch(120 if ranks > 8 else 400)


def test_pauses_of_single_ranks_raise_no_alarm(seed: int) -> None:
    """Garbage collection, say: one of 50 windows of a rank takes 1.4 times as long."""
    draw = random.Random(seed)
    pauses: dict[tuple[int, int], float] = {}
    fleet = Fleet(
        32,
        seed,
        slow=lambda rank, at, _: pauses.setdefault((rank, at), 1.4 if draw.random() < 0.02 else 1.0),
    )
    assert not fleet.watch(120)


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


def _told(fleet: Fleet, change: Callable[[list[Row]], list[Row]], names: dict[int, int]) -> list[object]:
    """Return what is said of a job whose rows are changed and whose ranks have other numbers."""
    decider = Straggling(STEPS)
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


def _same(rows: list[Row]) -> list[Row]:
    return rows


def _check_permutation(fleet: Fleet, drawn: random.Random) -> None:
    names = dict(enumerate(drawn.sample(range(fleet.ranks), fleet.ranks)))
    plain = _told(replace(fleet), _same, {rank: rank for rank in range(fleet.ranks)})
    assert _told(replace(fleet), lambda rows: drawn.sample(rows, len(rows)), names) == plain


def _check_scale(fleet: Fleet, factor: float) -> None:
    """Times a power of two, so that nothing is rounded."""

    def scaled(rows: list[Row]) -> list[Row]:
        return [replace(row, total=row.total * factor, waiting=row.waiting * factor) for row in rows]

    names = {rank: rank for rank in range(fleet.ranks)}
    assert _told(replace(fleet), scaled, names) == _told(replace(fleet), _same, names)


@bounds(max_examples=10)
@given(jobs(), st.integers(0, 10_000))
def test_neither_the_numbers_of_ranks_nor_the_order_of_rows_matter(fleet: Fleet, draws: int) -> None:
    _check_permutation(fleet, random.Random(draws))


@bounds(max_examples=10)
@given(jobs(), st.sampled_from([0.5, 4.0, 64.0]))
def test_the_unit_of_time_does_not_matter(fleet: Fleet, factor: float) -> None:
    _check_scale(fleet, factor)


@bounds(max_examples=10)
@given(jobs(), st.integers(0, 10_000))
def test_missing_rows_name_nobody_who_is_healthy(fleet: Fleet, draws: int) -> None:
    _check_missing(fleet, random.Random(draws))


def _check_missing(fleet: Fleet, drawn: random.Random) -> None:
    decider = Straggling(STEPS)
    for number in range(24):
        rows = [replace(row, total=math.nan) if drawn.random() < 0.1 else row for row in fleet.window(number)]
        rows = [row for row in rows if drawn.random() > 0.1]
        for one in decider.observe(number, rows, fleet.places, number * 5.0):
            assert one.state is not State.ON or fleet.slow(one.rank, number, "backward") > 1


def test_each_property_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fleet(ranks: int = 6) -> Fleet:
        return Fleet(ranks, slow=slow(1, 1.5, "backward", since=8))

    drawn = random.Random(3)
    for check in (_check_permutation, _check_missing):
        check(fleet(), drawn)
    _check_scale(fleet(), 64.0)

    judged = Straggling._reached
    with monkeypatch.context() as patch:  # a rank is left out by its number
        patch.setattr(
            Straggling, "_reached", lambda *what: {r: n for r, n in judged(*what).items() if r != 1}
        )
        with pytest.raises(AssertionError):
            _check_permutation(fleet(), random.Random(3))
    with monkeypatch.context() as patch:  # an effect in seconds only
        patch.setattr(Limits, "ratio", 1.0)
        patch.setattr(
            Straggling,
            "_reached",
            lambda self, cell, *_: {r: 2 for r, t in cell.busy.items() if t > cell.usual + 0.2},
        )
        with pytest.raises(AssertionError):
            _check_scale(fleet(), 64.0)
    with monkeypatch.context() as patch:  # every window convicts, and those that lack rows look late
        patch.setattr(Chance, "of_healthy", lambda *_: 0.0)
        patch.setattr(module, "spread", lambda ordered: 0.0)
        patch.setattr(module, "ENOUGH", 0)
        with pytest.raises(AssertionError):
            _check_missing(Fleet(6, noise=0.5), random.Random(3))
