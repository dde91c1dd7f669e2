"""How a job is given back: single answers, and what holds over all histories."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import PreemptionOptions
from outlast.errors import ExitCode
from outlast.preemption.policy import (
    Broken,
    Decision,
    Durable,
    Event,
    Measured,
    Notice,
    Order,
    Preempted,
    RolledBack,
    SaveFailed,
    Signal,
    Staged,
    State,
    Voted,
    choose,
)

TIERS = {"global": 40.0, "local": 8.0, "memory": 0.5}


def only(decisions: tuple[Decision, ...]) -> Decision:
    (one,) = decisions
    return one


def test_a_signal_is_voted_on_saved_and_exits_when_durable() -> None:
    rank = Preempted(PreemptionOptions(preempt_time=120), TIERS)
    asked = only(rank.handle(Signal(15, 3), 100.0))
    assert asked.order is Order.VOTE
    assert asked.reason == (
        "Received SIGTERM on rank 3 — requesting graceful shutdown; "
        "Forced exit in 118s if shutdown not complete"
    )
    save = only(rank.handle(Voted(40, 119.0, TIERS), 101.0))
    assert (save.order, save.step, save.tier) == (Order.SAVE, 40, "global")
    assert save.reason.startswith("Shutdown requested at step 40 — saving emergency checkpoint")
    assert rank.handle(Durable(39, "global"), 110.0) == ()
    assert rank.handle(Durable(40, "memory"), 110.0) == ()
    left = only(rank.handle(Durable(40, "global"), 140.0))
    assert (left.order, left.exit_code) == (Order.EXIT, ExitCode.PREEMPTED)
    assert left.reason.startswith("Graceful shutdown complete")


def test_repeats_change_nothing_but_a_shorter_notice_does() -> None:
    rank = Preempted(PreemptionOptions(preempt_time=60.0), TIERS)
    rank.handle(Signal(15), 0.0)
    for at in range(1, 30):
        assert only(rank.handle(Signal(15), float(at))).order is Order.NONE
    assert rank.deadline == 60.0
    assert "30 s" in only(rank.handle(Notice("Slurm", 60.0 - 1), 29.0)).reason
    assert rank.deadline == 59.0
    assert only(rank.handle(Signal(12), 30.0)).order is Order.NONE


def test_without_a_word_about_the_end_only_the_timeout_ends_the_process() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    asked = only(rank.handle(Signal(15), 0.0))
    assert "Forced exit in 600s" in asked.reason
    assert (rank.deadline, rank.expected) == (602.0, 60.0)
    assert rank.tick(599.9) == ()
    assert only(rank.tick(600.0)).exit_code == ExitCode.FAILED


def test_without_a_timeout_nothing_is_forced() -> None:
    rank = Preempted(PreemptionOptions(timeout_sec=0), TIERS)
    asked = only(rank.handle(Signal(15), 0.0))
    assert "Forced exit" not in asked.reason
    assert math.isinf(rank.deadline)
    assert rank.tick(1e9) == ()
    assert only(rank.handle(Voted(4, 60.0, TIERS), 1e9)).order is Order.SAVE
    assert rank.tick(2e9) == ()
    assert only(rank.handle(Durable(4, "global"), 2e9)).exit_code == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("options", "lead", "deadline", "expected"),
    [
        (PreemptionOptions(), 0.0, 602.0, 60.0),
        (PreemptionOptions(timeout_sec=30), 0.0, 32.0, 32.0),
        (PreemptionOptions(timeout_sec=0), 0.0, math.inf, 60.0),
        (PreemptionOptions(preempt_time=120), 0.0, 120.0, 120.0),
        (PreemptionOptions(preempt_time=900), 0.0, 602.0, 602.0),
        (PreemptionOptions(preempt_time=900, timeout_sec=0), 0.0, 900.0, 900.0),
        (PreemptionOptions(preempt_time=120), 30.0, 30.0, 30.0),
    ],
)
def test_the_soonest_of_what_was_said_is_the_deadline(
    options: PreemptionOptions, lead: float, deadline: float, expected: float
) -> None:
    rank = Preempted(options, TIERS, lead)
    rank.handle(Signal(15), 0.0)
    assert (rank.deadline, rank.expected) == (deadline, expected)


@pytest.mark.parametrize(
    ("options", "exits"),
    [
        (PreemptionOptions(), 600.0),
        (PreemptionOptions(timeout_sec=0.5), 0.5),
        (PreemptionOptions(timeout_sec=5), 5.0),
        (PreemptionOptions(timeout_sec=5, margin=9), 5.0),
        (PreemptionOptions(timeout_sec=5, margin=0), 5.0),
        (PreemptionOptions(preempt_time=5), 3.0),
        (PreemptionOptions(preempt_time=5, margin=9), 0.0),
        (PreemptionOptions(preempt_time=30, timeout_sec=29), 28.0),
        (PreemptionOptions(preempt_time=30, timeout_sec=27), 27.0),
    ],
)
def test_the_forced_exit_comes_when_the_line_announces_it(options: PreemptionOptions, exits: float) -> None:
    rank = Preempted(options, TIERS)
    asked, *ended = rank.handle(Signal(15), 0.0)
    assert f"; Forced exit in {exits:g}s " in asked.reason
    assert [one.order for one in ended] == [Order.EXIT] * (exits == 0.0)
    if exits:
        assert rank.tick(exits - 0.01) == ()
        assert only(rank.tick(exits)).exit_code == ExitCode.FAILED


def test_a_rank_without_a_notice_takes_both_times_from_the_vote() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Voted(4, 50.0, TIERS, 590.0), 10.0)
    assert (rank.deadline, rank.expected) == (600.0, 60.0)


def test_the_tier_is_the_one_that_outlives_most_in_the_time_that_is_left() -> None:
    assert choose(TIERS, 60)[0] == "global"
    assert choose(TIERS, 49)[0] == "local"
    assert choose(TIERS, 9)[0] == "memory"
    assert choose(TIERS, 0.1)[0] == "memory"
    assert choose({"global": math.inf, "memory": math.inf}, 9)[0] == "global"


def test_a_hung_group_still_keeps_what_is_staged() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Staged(30), 0.0)
    rank.handle(Signal(15), 10.0)
    assert rank.tick(57.9) == ()
    flush = only(rank.tick(58.0))  # the local tier's 8 s, and a quarter more, before the margin
    assert (flush.order, flush.step, flush.tier) == (Order.FLUSH, 30, "local")
    assert only(rank.handle(Voted(31, 9.0, TIERS), 59.0)).order is Order.NONE
    assert only(rank.handle(Durable(30, "local"), 67.9)).order is Order.EXIT


def test_a_tick_that_comes_late_still_keeps_what_is_staged_by_a_quick_tier() -> None:
    rank = Preempted(PreemptionOptions(preempt_time=12.0, margin=2.0), {"local": 0.01})
    rank.handle(Staged(7), 0.0)
    rank.handle(Signal(15), 0.0)
    assert rank.tick(7.9) == ()
    assert only(rank.tick(8.0)).order is Order.FLUSH, "at 10 it would be too late"


def test_what_was_staged_after_the_step_that_training_went_back_to_is_not_promised() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Staged(30), 0.0)
    rank.handle(RolledBack(), 1.0)
    rank.handle(Signal(15), 10.0)
    assert rank.tick(58.0) == (), "nothing is staged"
    rank.handle(Staged(20), 58.0)
    assert only(rank.tick(58.0)).step == 20
    assert only(rank.handle(Durable(20, "local"), 60.0)).exit_code == ExitCode.PREEMPTED


def test_at_the_deadline_a_lesser_tier_counts() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Signal(15), 0.0)
    assert only(rank.handle(Voted(4, 60.0, TIERS), 0.0)).tier == "global"
    assert rank.handle(Durable(4, "memory"), 1.0) == ()
    assert rank.handle(Durable(4, "local"), 9.0) == ()
    late = only(rank.tick(58.0))
    assert (late.order, late.exit_code) == (Order.EXIT, ExitCode.PREEMPTED)
    assert late.reason == "out of time: step 4 is durable in the local tier only"


def test_a_save_that_fails_goes_to_the_next_tier() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Signal(10), 0.0)
    rank.handle(Voted(4, 60.0, TIERS), 0.0)
    assert only(rank.handle(SaveFailed(4, "no space"), 1.0)).tier == "local"
    assert only(rank.handle(SaveFailed(4, "no space"), 2.0)).tier == "memory"
    assert only(rank.handle(SaveFailed(4, "no space"), 3.0)).exit_code == 1


def test_a_lead_that_is_shorter_than_a_save_is_said_once() -> None:
    rank = Preempted(PreemptionOptions(), TIERS, lead=30.0)
    warned = only(rank.start())
    assert warned.order is Order.WARN
    assert "40.0 s and the lead is 30 s; a preempted job saves to the local tier" in warned.reason
    assert rank.handle(Measured("global", 50.0), 1.0) == ()
    later = Preempted(PreemptionOptions(), {"global": math.inf})
    assert later.start() == ()
    assert only(later.handle(Measured("global", 90.0), 1.0)).order is Order.WARN


def test_options_are_checked_and_heeded() -> None:
    off = Preempted(PreemptionOptions(enable_exit_handler=False), TIERS)
    assert only(off.handle(Signal(15), 0.0)).order is Order.NONE
    assert Preempted(PreemptionOptions(timeout_sec=5), TIERS).state is State.TRAINING
    assert PreemptionOptions().problems() == ()
    assert len(PreemptionOptions(preempt_time=0, margin=-1, exit_signals=["SIGKILL"]).problems()) == 3
    (useless,) = PreemptionOptions(enable_exit_handler=False, margin=3).problems()
    assert useless == "margin: has no effect with enable_exit_handler off"


def test_an_error_after_a_notice_flushes_what_is_staged_at_once() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    assert rank.handle(Broken("a DataLoader worker died"), 0.0) == ()
    rank.handle(Staged(30), 0.0)
    rank.handle(Signal(15), 10.0)
    flush = only(rank.handle(Broken("a DataLoader worker died"), 11.0))
    assert (flush.order, flush.step) == (Order.FLUSH, 30)
    assert flush.reason.startswith("ranks cannot agree: a DataLoader worker died")


def draw_event(draw: random.Random, now: float) -> Event:
    step = draw.randrange(5)
    match draw.randrange(8):
        case 0:
            return Signal(draw.choice((15, 10, 12)))
        case 1:
            return Notice("Slurm", now + draw.uniform(-5, 100))
        case 2:
            return Voted(step, draw.uniform(0, 90), {name: draw.uniform(0, 90) for name in TIERS})
        case 3:
            return Staged(step)
        case 4:
            return SaveFailed(step, "no space")
        case 5:
            return Measured(draw.choice(list(TIERS)), draw.uniform(0, 90))
        case _:
            return Durable(step, draw.choice(list(TIERS)))


@given(seed=st.integers(0, 1 << 40))
def test_it_exits_when_durable_or_at_the_deadline_and_never_later(seed: int) -> None:
    draw = random.Random(seed)
    options = PreemptionOptions(timeout_sec=draw.choice((0.0, 30.0)), margin=draw.choice((0.0, 2.0)))
    rank = Preempted(options, TIERS, draw.choice((0.0, 20.0)))
    now = 0.0
    promised: Decision | None = None
    for _ in range(draw.randint(10, 200)):
        now += draw.choice((0.0, 0.1, 0.5))
        event = draw_event(draw, now)
        said = (*rank.handle(event, now), *rank.tick(now))
        for one in said:
            assert one.reason
            if one.order in (Order.SAVE, Order.FLUSH):
                promised = one
            if one.order is Order.EXIT and one.exit_code == ExitCode.PREEMPTED:
                assert promised is not None
                if one.reason.startswith("out of time"):
                    assert now >= rank.expected - options.margin
                    continue
                assert isinstance(event, Durable)
                assert event.step >= promised.step
                order = list(TIERS)
                assert order.index(event.tier) <= order.index(promised.tier)
            elif one.order is Order.EXIT and not isinstance(event, SaveFailed):
                assert now >= rank.deadline - options.margin
        if rank.state is State.ENDED:
            assert rank.tick(now) == ()
            return
    if math.isfinite(rank.deadline):
        said = rank.tick(rank.deadline)
        assert said[-1].order is Order.EXIT
