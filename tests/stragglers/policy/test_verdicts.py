"""Verdicts about small jobs with exact times: their figures, and the window that each comes in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outlast.stragglers.policy.limits import Limits
from outlast.stragglers.policy.rows import Kind, Place, State, Verdict
from tests.stragglers.policy.builders import AT_ONCE, RANKS, Job, Times, brief, but, full, words

NOISE = [0.4 + 0.01 * (rank % 5) for rank in range(RANKS)]


def test_a_finding_has_what_was_learned_of_other_ranks() -> None:
    """Rank 2 is slow for two windows at the lower level only, then rank 4 at both for as many.

    At the higher level three ranks turned slow in 336 windows, one of them assumed in a hundred, one rank 3
    itself. Rank 4 stayed so once and recovered once: 1 of 12, with ten recoveries as if seen.
    """
    job, told = Job(limits=Limits(false_alarms=0.2), steps=4), []
    for times in (
        *(NOISE, NOISE, but(NOISE, r2=0.47), but(NOISE, r2=0.47), NOISE),
        *(but(NOISE, r4=0.6), but(NOISE, r4=0.6), NOISE, NOISE, NOISE, NOISE, NOISE),
        *[but(NOISE, r3=0.6)] * 4,
        *[but(NOISE, r3=0.42)] * 4,
    ):
        told += [(job.window - 1, one) for one in job.see(forward=times)]
    chance = 16 * (3 / 336) * (1 / 12) ** 2
    assert [(number, full(one)) for number, one in told] == [
        (14, f"on 3 forward | n0 compute x1.429 share 1 chance {chance:.3g} job x1.75 windows 3"),
        (18, "off 3 forward | n0 compute x1 share 0 chance 1 job x1 windows 3"),
    ]
    assert {"3", "n0", "1.43", "15", "'forward'", "0.6", "0.42", "2"} <= words(told[0][1])
    assert {"3", "n0", "15", "'forward'", "0%"} <= words(told[1][1])


def test_a_rank_that_is_late_has_no_section() -> None:
    """The sections take 0.65 s of each window."""
    job, told = Job(limits=replace(AT_ONCE, windows=2)), []
    job.now = 5.0
    for late in (True, True, False, False, False):
        waits = but(0.5, r5=0.0) if late else but(0.5)
        told += job.see(waits, forward=but(0.1), reduce=but(0.05))
    assert [full(one) for one in told] == [
        "on 5 | n0 other x4.333 share 1 chance 0.00746 job x4.333 windows 2",
        "off 5 | n0 other x1 share 0 chance 1 job x1 windows 2",
    ]
    assert {"5", "n0", "15", "2", "1", "0.65", "0.15"} <= words(told[0])
    assert {"5", "n0", "15", "0%"} <= words(told[1])


def test_the_clock_tells_how_long_a_window_is_and_a_pause_does_not() -> None:
    """The sections take 0.65 s, the median of the latest five windows more."""
    job, came = Job(limits=AT_ONCE), []
    for now in (0.0, 0.8, 1.6, 2.4, 3.2, 4.0, 14.0, 24.0, 34.0):
        job.now = now
        job.see(but(0.5, r5=0.0), forward=but(0.1), reduce=but(0.05))
        came += [words(one) & {"0.65", "0.8", "10"} for one in job.decider.slow]
    assert came == [{"0.65"}] * 2 + [{"0.8"}] * 6 + [{"10"}]


def test_a_job_that_goes_back_takes_the_window_again_and_no_time_between() -> None:
    job = Job(limits=AT_ONCE)
    for at in (5, 6, 7):
        job.window = at
        job.see(forward=but(1.0))
    job.decider.again(8)
    assert job.told(1, forward=but(1.0, r3=2.0)) == ["8 on 3 forward"]
    job.decider.again(8)
    for window, expected in ((7, []), (8, ["8 off 3 forward"]), (8, [])):
        job.window = window
        assert job.told(1, forward=but(1.0)) == expected
    job.decider.again(4)
    for window, pause in ((3, 0.0), (4, 1e6), (5, 2.0), (6, 2.0)):
        job.window, job.now = window, job.now + pause
        job.see(but(0.5, r5=0.0), forward=but(0.1), reduce=but(0.05))
    (late,) = job.decider.slow
    assert "1" in words(late), "second of a window"


@pytest.mark.parametrize(
    ("window", "later", "each", "named"),
    [
        (100, 101, 1.25, True),
        (100, 101, 1.24, False),
        (100, 102, 1.49, False),
        (100, 102, 1.50, True),
        (100, 104, 1.99, False),
        (100, 104, 2.00, True),
    ],
)
def test_what_a_rank_costs_is_at_least_so_much_in_each_step(
    window: int, later: int, each: float, named: bool
) -> None:
    """A quarter of a second: one second in a window of four steps, of which some are joined."""
    limits = replace(AT_ONCE, seconds=0.25, share=0.0)
    job = Job(limits=limits, steps=4)
    job.window = window
    first = job.told(1, forward=but(1.0, r3=1.25, r4=1.24))
    assert first == [f"{window} on 3 forward"], "the number of the first window says nothing of its length"
    job.window = later
    assert job.told(1, forward=but(1.0, r5=each)) == [
        f"{later} off 3 forward",
        *[f"{later} on 5 forward"] * named,
    ]


def test_sixteen_ranks_are_judged_at_once_and_fewer_when_their_changes_are_known() -> None:
    assert Job(16, AT_ONCE).told(3, forward=[1.0] * 15 + [2.0]) == ["0 on 15 forward"]
    assert Job(15, AT_ONCE).told(9, forward=[1.0] * 14 + [2.0]) == ["3 on 14 forward"]
    assert Job(2, AT_ONCE).told(30, forward=[1.0, 2.0]) == ["16 on 1 forward"]
    assert Job(2, AT_ONCE).told(16, forward=[0.0, 2.0]) == []


def test_a_large_group_does_not_tell_how_a_small_one_changes() -> None:
    job = Job(18, AT_ONCE)
    job.places |= {rank: Place(rank, "n0", stage=1) for rank in (16, 17)}
    assert job.told(30, forward=[1.0] * 17 + [2.0]) == ["16 on 17 forward"]


def test_few_ranks_are_slow_beyond_their_changes_only() -> None:
    """Three deviations of what changes by 1.3 in each window are a factor of 2.28."""
    job, told = Job(2, AT_ONCE), []
    for at in range(40):
        told += job.told(1, forward=[1.0, 1.3 if at % 2 else 1.0])
    assert told == []
    assert job.told(1, forward=[1.0, 2.2]) == []
    assert job.told(1, forward=[1.0, 2.4]) == ["41 on 1 forward"]


def test_four_ranks_tell_their_spread_once_their_windows_are_known_to_be_independent() -> None:
    """1.5 is between 1.1 * 1.35 and 1.1 * 1.82, the bounds of the two levels."""
    job = Job(4, replace(AT_ONCE, moves=4))
    ((number, found),) = (
        (job.window - 1, one) for _ in range(9) for one in job.see(forward=[1.0, 1.1, 1.2, 1.5])
    )
    chance = 4 * 10 / 116
    assert number == 5
    assert full(found) == f"on 3 forward | n0 compute x1.364 share 1 chance {chance:.3g} job x1.5 windows 1"


SPREAD = [1.0 + 0.01 * (rank % 11) for rank in range(30)]  # the levels are beyond 1.151 and 1.250


@pytest.mark.parametrize("late", [9, 12])
def test_of_a_large_group_the_eight_slowest_ranks_reach_the_lower_level(late: int) -> None:
    times = SPREAD + [1.2 + 0.001 * rank for rank in range(late)]
    ranks = len(times)
    assert Job(ranks, AT_ONCE).told(1, forward=times) == [
        f"0 on {rank} forward" for rank in range(ranks - 8, ranks)
    ]
    for at in range(30, ranks):
        times[at] += 0.3
    assert len(Job(ranks, AT_ONCE).told(1, forward=times)) == late, "at the higher level all of them"


# What a rank is late with, and what it costs.


@pytest.mark.parametrize(("each", "found"), [(0.499, True), (0.501, False)])
def test_lateness_that_slow_sections_explain_is_not_told_beside_them(each: float, found: bool) -> None:
    """Rank 5 is late by 0.625 s; four fifths of it are 0.5 s."""
    job = Job(limits=AT_ONCE)
    told = job.told(1, but(0.625, r5=0.0), forward=but(0.1, r5=0.1 + each), reduce=but(0.05))
    assert told == ["0 on 5 forward"] + ["0 on 5"] * found
    again = job.told(2, but(0.625, r5=0.0), forward=but(0.1, r5=0.1 + each), reduce=but(0.05))
    assert again == [], "once"


def test_slow_sections_explain_lateness_together() -> None:
    job = Job(limits=AT_ONCE)
    times = {"backward": but(0.1, r5=0.4), "forward": but(0.1, r5=0.4), "reduce": but(0.05)}
    assert job.told(2, but(0.625, r5=0.0), **times) == ["0 on 5 backward", "0 on 5 forward"]


def test_a_section_that_is_slow_explains_lateness_before_it_is_told() -> None:
    job = Job(limits=replace(AT_ONCE, windows=2))
    waits, plain, slow = but(0.5, r5=0.0), but(0.1), but(0.1, r5=0.6)
    assert job.told(1, waits, forward=plain, reduce=but(0.05)) == []
    assert job.told(1, waits, forward=slow, reduce=but(0.05)) == []
    assert job.told(1, waits, forward=plain, reduce=but(0.05)) == ["2 on 5"]
    told = Job(limits=replace(AT_ONCE, windows=2))
    assert told.told(2, waits, forward=slow, reduce=but(0.05)) == ["1 on 5 forward"]
    (found,) = told.decider.slow
    assert found.job_slowdown == pytest.approx(0.65 / 0.15)


def test_where_no_waiting_is_known_a_rank_costs_what_it_takes_beyond_its_peers() -> None:
    job = Job(limits=AT_ONCE)
    job.see(forward=but(0.2, r5=0.3), backward=but(0.2, r5=0.25))
    assert [(one.section, round(one.job_slowdown, 9)) for one in job.decider.slow] == [
        *(("backward", round(0.4 / 0.25, 9)), ("forward", round(0.4 / 0.25, 9)))
    ]
    job.see(forward=but(0.2, r5=9.0))
    assert [round(one.job_slowdown, 9) for one in job.decider.slow if one.section == "forward"] == [20.0]
    off = [one for _ in range(9) for one in job.see(forward=but(0.2), backward=but(0.2))]
    assert {(one.section, one.state, one.job_slowdown) for one in off} == {
        *(("backward", State.OFF, 1.0), ("forward", State.OFF, 1.0))
    }


def test_the_cost_is_unknown_where_most_ranks_take_no_time() -> None:
    (found,) = Job(limits=AT_ONCE).see(forward=but(0.0, r3=1.0))
    assert (found.state, math.isnan(found.job_slowdown)) == (State.ON, True)
    assert {"3", "n0", "1", "'forward'", "15"} <= words(found)


def test_a_rank_on_a_node_without_a_name_has_one_peer() -> None:
    job = Job(2, replace(AT_ONCE, moves=1), node="")
    for pair in ([1.0, 1.0], [1.0, 1.0]):
        assert job.see(forward=pair) == []
    (found,) = job.see(forward=[1.0, 2.0])
    assert full(found).startswith("on 1 forward |  compute x2 ")
    assert {"1", "2.00", "'forward'", "2"} <= words(found)
    (lost,) = (one for _ in range(11) for one in job.see(backward=[1.0, 1.0]))
    assert (brief(lost), {"'forward'", "10"} <= words(lost)) == ("off 1 forward", True)


# What is forgotten.


def test_a_rank_that_was_fast_in_all_of_the_latest_windows_begins_anew() -> None:
    job = Job(limits=replace(AT_ONCE, windows=2, latest=4))
    plain, slow = but(1.0), but(1.0, r3=1.5)
    told = []
    for times in (slow, plain, plain, plain, plain, slow, plain, slow):
        told += job.see(forward=times)
    assert [(one.windows, round(one.share_of_steps, 3), "2" in words(one)) for one in told] == [
        (3, 0.667, True)
    ]


def found(rank: int = 3, section: str = "forward") -> Verdict:
    return Verdict(rank, "n0", Kind.COMPUTE, section, 1.5, 1.0, 1.0, 1.2, 0, "found before", State.ON)


@pytest.mark.parametrize(("missing", "windows"), [(2, 3), (4, 4)])
def test_a_finding_of_an_earlier_leader_in_a_section_that_nobody_enters_is_withdrawn(
    missing: int, windows: int
) -> None:
    job = Job(limits=Limits(missing=missing))
    job.decider.presume(found(), 0.0)
    assert job.told(9, backward=but(1.0)) == [f"{windows - 1} off 3 forward"]


def test_a_finding_in_a_section_that_is_entered_rarely_is_withdrawn_after_three_times_as_long() -> None:
    """A rank without peers enters the section in each window, which says nothing of the others."""
    job, told = Job(17, limits=replace(AT_ONCE, windows=2)), []
    job.places[16] = Place(16, "n2", device="another")
    for at in range(40):
        save: list[float | None] = [1.0 if at % 4 == 0 and at < 9 else None] * 16
        save = but(save, r3=1.5) if save[0] else save
        told += [one for one in job.see(save=[*save, 1.0], forward=[1.0] * 17) if one.rank == 3]
    assert [(brief(one), "12" in words(one)) for one in told][1:] == [("off 3 save", True)]


@pytest.mark.parametrize(("names", "learned"), [(998, True), (999, False)])
def test_of_a_thousand_sections_what_is_known_is_kept_and_of_more_only_what_is_slow(
    names: int, learned: bool
) -> None:
    """One of them is the whole of a rank, and two are "forward" and "backward", in which rank 1 is slow."""
    job = Job(2, replace(AT_ONCE, moves=1))
    pair = [1.0, 1.0]
    job.told(3, forward=pair)
    job.decider.presume(found(1, "backward"), 0.0)
    many: dict[str, Times] = {f"s{at}": [None, None, 1.0] for at in range(names - 1)}
    assert job.told(1, forward=pair, **many) == ["3 unknown 2"], "it is not known where it runs"
    told = [brief(one) for one in job.see(forward=[1.0, 2.0]) if one.section == "forward"]
    assert told == ["on 1 forward"] * learned
    assert [one.section for one in job.decider.slow] == [*["forward"] * learned, "backward"]


def test_what_is_known_of_a_rank_that_stays_outlasts_the_move_of_another() -> None:
    job = Job(limits=AT_ONCE)
    times = {"forward": but(1.0, r3=2.0, r5=2.0), "backward": but(1.0, r1=None, r5=None)}
    assert job.told(1, **times) == [
        *("0 on 3 forward", "0 on 5 forward", "0 unknown 1 backward", "0 unknown 5 backward")
    ]
    job.places = {**job.places, 5: Place(5, "n7")}
    told = job.see(**times)
    assert [(brief(one), one.node) for one in told] == [
        *(("off 5 forward", "n0"), ("on 5 forward", "n7"), ("unknown 5 backward", "n7"))
    ]
    assert job.told(3, **times) == []


# What is not known.


def test_what_is_not_known_has_its_rank_and_section() -> None:
    job = Job(4, AT_ONCE, node="")
    job.places[3] = Place(3, "n1")
    told = job.see(forward=[1.0, 1.0, math.nan, None], backward=[1.0, math.nan, math.nan, None])
    assert [(full(one), "'backward'" in words(one)) for one in told] == [
        (f"unknown {who} other xnan share nan chance 1 job xnan windows 0", "backward" in who)
        for who in ("3 | n1", "1 backward | ", "2 backward | ", "0 backward | ", "2 forward | ")
    ]
    assert [brief(one) for one in job.decider.unknown] == [
        *("unknown 0 backward", "unknown 1 backward", "unknown 2 backward", "unknown 2 forward", "unknown 3")
    ]
    assert len({one.reason for one in told}) == 5


def test_each_section_is_told_when_it_is_known_again() -> None:
    """Rank 1 is slow in two sections."""
    job, gone, logs = Job(limits=AT_ONCE), but(1.0, r1=None, r2=None), but(1.0)
    slow = {"forward": but(1.0, r1=2.0), "backward": but(1.0, r1=3.0)}
    told = [
        [f"{brief(one)} x{one.slowdown:.2f}" for one in job.see(**times)]
        for times in (
            {"log": logs, **slow},
            {"log": logs, "forward": gone, "backward": gone},
            {"log": logs, "forward": slow["forward"], "backward": gone},
            {"log": logs, **slow},
            {"log": gone, "forward": gone, "backward": gone},
            {"log": logs, **slow},
        )
    ]
    three, twice = "on 1 backward x3.00", "on 1 forward x2.00"
    assert told == [
        [three, twice],
        [f"unknown {one} xnan" for one in ("1 backward", "2 backward", "1 forward", "2 forward")],
        [twice, "off 2 forward xnan"],
        [three, "off 2 backward xnan"],
        ["unknown 1 xnan", "unknown 2 xnan"],
        [three, twice, "off 2 xnan"],
    ]
