"""How a job is given back: what each event is answered with, and what holds over all histories."""

from __future__ import annotations

import math
import random
import signal
from typing import Any

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
    RolledBack,
    SaveFailed,
    Signal,
    Staged,
    State,
    Voted,
    choose,
)
from tests.preemption.policy.builders import ASK, SAVE, TIERS, Turn, decided, numbers, play, rank, short

INF = math.inf
STAGED: Turn = (Staged(3), 0.0)
QUICK = {"local": 8.0, "memory": 0.5}
FAIL, BROKEN = SaveFailed(4, "no space"), (Broken("E"), 1.0)
BACK: Turn = (RolledBack(), 1.0)
FLUSHED = "-; vote; flush 3 local; none; exit-75 3 local"
SAVING = "vote; save 4 global"


def vote(left: float = 60.0, seconds: dict[str, float] = TIERS, limit: float = INF, at: float = 0.0) -> Turn:
    return Voted(4, left, seconds, limit), at


def tick(at: float) -> Turn:
    return None, at


@pytest.mark.parametrize(
    ("given", "turns", "answers"),
    [
        # it is voted on, saved, and exits when that step or a later one is durable in that tier or above
        (
            {"preempt_time": 120},
            [ASK, vote(119), (Durable(4, "global"), 40.0)],
            f"{SAVING}; exit-75 4 global",
        ),
        ({}, [*SAVE, (Durable(5, "global"), 9.0)], f"{SAVING}; exit-75 4 global"),
        ({}, [*SAVE, (Durable(3, "global"), 9.0)], f"{SAVING}; -"),
        ({}, [*SAVE, (Durable(4, "local"), 9.0)], f"{SAVING}; -"),
        ({}, [vote(60, QUICK), (Durable(4, "global"), 9.0)], "save 4 local; exit-75 4 local"),
        ({}, [vote(60, QUICK), (Durable(4, "memory"), 9.0)], "save 4 local; -"),
        # repeats change nothing
        ({}, [ASK, ASK, (Signal(12), 1.0), (Signal(10), 1.0)], "vote; none; none; none"),
        ({}, [*SAVE, vote(1, limit=1.0, at=1.0)], f"{SAVING}; none"),
        # other signals are no notice
        ({}, [(Signal(12), 0.0)], "none"),
        ({}, [(Signal(64), 0.0)], "none"),
        ({"enable_exit_handler": False}, [ASK], "none"),
        # without a word about the end only the timeout ends the process, and without a timeout nothing does
        ({}, [ASK, tick(599.9), tick(600.0)], "vote; -; exit-1"),
        ({"timeout_sec": 0}, [ASK, tick(1e9), vote(at=1e9), tick(2e9)], "vote; -; save 4 global; -"),
        # a notice that leaves no more than the margin ends the process at once
        ({}, [STAGED, (Notice("Slurm", 100.0), 100.0)], "-; vote, exit-1"),
        ({}, [STAGED, (Notice("Slurm", 102.0), 100.0)], "-; vote, exit-1"),
        ({}, [STAGED, (Notice("Slurm", 102.1), 100.0)], "-; vote"),
        ({"margin": 100.0}, [STAGED, ASK], "-; vote, flush 3 memory"),
        ({}, [*SAVE, (Notice("Slurm", 9.0), 10.0)], f"{SAVING}; none, exit-1 4 global"),
        # a process that exits decides nothing more
        *(
            ({}, [(Notice("Slurm", 90.0), 100.0), (one, 101.0), tick(102.0)], "vote, exit-1; none; -")
            for one in (Signal(15), vote()[0], Durable(4, "global"), Broken("E"))
        ),
        # the margin is no time for a save, nor is there any for a tier that a rank has not measured
        ({}, [vote(52.0)], "save 4 global"),
        ({}, [vote(51.9)], "save 4 local"),
        ({}, [vote(11.9)], "save 4 memory"),
        ({}, [vote(60, {"local": 9.0})], "save 4 local"),
        # near the end a copy in a lesser tier is enough
        (
            {},
            [*SAVE, (Durable(4, "memory"), 1.0), tick(57.9), tick(58.0)],
            f"{SAVING}; -; -; exit-75 4 global",
        ),
        # a save that fails goes to the next tier for which there is time
        (
            {},
            [*SAVE, (SaveFailed(3, "x"), 1.0), (FAIL, 48.0), (FAIL, 48.0), (FAIL, 48.0)],
            f"{SAVING}; -; save 4 local; save 4 memory; exit-1 4 memory",
        ),
        (
            {},
            [*SAVE, (FAIL, 48.1), (Durable(4, "memory"), 49.0)],
            f"{SAVING}; save 4 memory; exit-75 4 memory",
        ),
        (
            {},
            [vote(60, {**TIERS, "local": 30.0}), (FAIL, 30.0)],
            "save 4 global; save 4 memory",
        ),  # 30 s elsewhere
        # what is staged is flushed where the ranks do not agree in time, or cannot
        ({}, [STAGED, ASK, tick(47.9), tick(48.0)], "-; vote; -; flush 3 local"),
        ({}, [STAGED, ASK, tick(48.0), vote(9.0), (Durable(3, "local"), 50.0)], FLUSHED),
        ({}, [STAGED, BACK, ASK, tick(58.0)], "-; -; vote; -"),
        ({}, [STAGED, BACK, ASK, (Staged(2), 2.0), tick(58.0)], "-; -; vote; -; flush 2 local"),
        ({}, [(Broken("E"), 0.0), ASK, BROKEN], "-; vote; -"),  # nothing is staged
        ({}, [(Staged(0), 0.0), ASK, BROKEN], "-; vote; flush 0 local"),
        ({}, [STAGED, (Staged(2), 0.0), ASK, BROKEN, BROKEN], "-; -; vote; flush 3 local; -"),
    ],
)
def test_what_each_event_is_answered_with(given: dict[str, Any], turns: list[Turn], answers: str) -> None:
    assert "; ".join(play(rank(**given), *turns)) == answers


@pytest.mark.parametrize("event", [Durable(4, "global"), FAIL, Staged(4), RolledBack(), Broken("E")])
@pytest.mark.parametrize(("before", "state"), [([], State.TRAINING), ([ASK], State.ASKED)])
def test_news_of_a_save_decide_nothing_before_one_is_ordered(
    event: Event, before: list[Turn], state: State
) -> None:
    one = rank()
    assert play(one, *before, (event, 1.0))[-1] == "-"
    assert one.state is state


@pytest.mark.parametrize(
    ("copies", "step", "tier"),
    [
        ([(4, "memory"), (4, "local")], 4, "local"),
        ([(4, "local"), (4, "memory")], 4, "local"),
        ([(4, "local"), (4, "local")], 4, "local"),
        ([(4, "tape"), (4, "memory"), (4, "tape")], 4, "memory"),
        ([(4, "memory"), (6, "memory")], 6, "memory"),
    ],
)
def test_of_lesser_tiers_the_best_copy_is_named_when_the_end_is_near(
    copies: list[tuple[int, str]], step: int, tier: str
) -> None:
    one = rank()
    assert set(play(one, *SAVE, *((Durable(*copy), 1.0) for copy in copies))[2:]) == {"-"}
    (left,) = one.tick(58.0)
    assert short([left]) == "exit-75 4 global"
    assert numbers(left.reason) == [step]
    assert tier in left.reason


# Times


@pytest.mark.parametrize(
    ("given", "turns", "deadline", "expected"),
    [
        ({}, [ASK], 602.0, 60.0),
        ({"timeout_sec": 30}, [ASK], 32.0, 32.0),
        ({"timeout_sec": 0}, [ASK], INF, 60.0),
        ({"preempt_time": 120}, [ASK], 120.0, 120.0),
        ({"preempt_time": 900}, [ASK], 602.0, 602.0),
        ({"preempt_time": 900, "timeout_sec": 0}, [ASK], 900.0, 900.0),
        ({"preempt_time": 120, "lead": 30.0}, [ASK], 30.0, 30.0),
        ({}, [(Notice("Slurm", 400.0), 100.0)], 400.0, 400.0),
        ({}, [(Signal(12), 0.0)], INF, INF),
        # the first notice counts, and one that leaves less time
        ({"preempt_time": 60.0}, [(Signal(15), float(at)) for at in range(30)], 60.0, 60.0),
        ({"preempt_time": 60.0}, [ASK, (Notice("Slurm", 59.0), 10.0)], 59.0, 59.0),
        ({"preempt_time": 60.0}, [ASK, (Notice("Slurm", 61.0), 10.0)], 60.0, 60.0),
        ({"preempt_time": 60.0}, [(Notice("Spot", 120.0), 0.0), (Signal(15), 10.0)], 70.0, 70.0),
        # so does the least time of any rank
        ({}, [vote(50.0, limit=590.0, at=10.0)], 600.0, 60.0),
        ({}, [vote(), (Signal(15), 1.0)], INF, 60.0),
        ({"preempt_time": 60.0}, [ASK, vote(20.0, limit=30.0, at=10.0)], 40.0, 30.0),
        ({"preempt_time": 60.0}, [ASK, vote(90.0, limit=90.0, at=10.0)], 60.0, 60.0),
    ],
)
def test_the_soonest_of_what_was_said_is_the_deadline(
    given: dict[str, Any], turns: list[Turn], deadline: float, expected: float
) -> None:
    one = rank(**given)
    play(one, *turns)
    assert (one.deadline, one.expected) == (deadline, expected)


@pytest.mark.parametrize(
    ("given", "exits"),
    [
        ({}, 600.0),
        ({"timeout_sec": 0.5}, 0.5),
        ({"timeout_sec": 5}, 5.0),
        ({"timeout_sec": 5, "margin": 9}, 5.0),
        ({"timeout_sec": 5, "margin": 0}, 5.0),
        ({"preempt_time": 5}, 3.0),
        ({"preempt_time": 5, "margin": 9}, 0.0),
        ({"preempt_time": 30, "timeout_sec": 29}, 28.0),
        ({"preempt_time": 30, "timeout_sec": 27}, 27.0),
        ({"timeout_sec": 0}, None),
    ],
)
def test_the_forced_exit_comes_when_the_reason_announces_it(
    given: dict[str, Any], exits: float | None
) -> None:
    one = rank(**given)
    asked, *ended = decided(one, (Signal(15, 7), 0.0))
    assert numbers(asked.reason) == [7, *([] if exits is None else [exits])]
    assert "inf" not in asked.reason
    assert [each.order for each in ended] == [Order.EXIT] * (exits == 0.0)
    if exits:
        assert play(one, tick(exits - 0.01), tick(exits)) == ["-", "exit-1"]


@pytest.mark.parametrize(
    ("tiers", "tier", "when"),
    [
        ({"global": 48.0, "memory": 0.5}, "global", 20.0),
        ({"global": 48.1, "memory": 0.5}, "memory", 78.0),
        ({"global": 500.0}, "global", 20.0),
        ({"global": INF}, "global", 20.0),
        ({"memory": 1.6}, "memory", 78.0),  # a margin is the save's, since a tick may come late
        ({"memory": 4.0}, "memory", 75.0),
    ],
)
def test_an_agreement_is_waited_for_a_quarter_of_the_time_and_longer_where_a_save_leaves_it(
    tiers: dict[str, float], tier: str, when: float
) -> None:
    one = rank(tiers, preempt_time=82.0, margin=2.0)
    turns = [(Staged(0), 0.0), (Signal(15), 100.0), tick(100.0 + when - 0.1), tick(100.0 + when)]
    assert play(one, *turns) == ["-", "vote", "-", f"flush 0 {tier}"]
    assert one.state is State.SAVING


@pytest.mark.parametrize("measured", [(10.0, 4.0), (4.0, 10.0)])
def test_the_longest_save_that_was_measured_counts(measured: tuple[float, float]) -> None:
    turns = [*((Measured("local", one), 0.0) for one in measured), STAGED, ASK, tick(45.4), tick(45.5)]
    assert play(rank({"local": INF}), *turns)[-2:] == ["-", "flush 3 local"], "12.5 s before 58"


@pytest.mark.parametrize(
    ("seconds", "left", "tier", "named"),
    [
        (TIERS, 60.0, "global", [40.0, 60.0]),
        (TIERS, 49.0, "local", [8.0, 49.0]),
        (TIERS, 9.0, "memory", [0.5, 9.0]),
        (TIERS, 0.1, "memory", [0.1, 0.5]),
        ({"global": 40.0}, 50.0, "global", [40.0, 50.0]),
        ({"global": 0.0}, 0.0, "global", [0.0, 0.0]),
        ({"global": INF, "local": INF}, 9.0, "global", [9.0]),
        ({"global": INF}, -3.0, "global", [0.0]),
        ({"global": 40.0, "local": 8.0, "memory": INF}, 9.9, "local", [9.9, 8.0]),
    ],
)
def test_the_tier_is_the_one_that_outlives_most_in_the_time_that_is_left(
    seconds: dict[str, float], left: float, tier: str, named: list[float]
) -> None:
    found, why = choose(seconds, left)
    assert (found, numbers(why)) == (tier, named)


@pytest.mark.parametrize(
    ("tiers", "lead", "timeout", "named"),
    [
        ({"global": 40.0}, 52.0, 0.0, None),
        ({"global": 40.0}, 51.9, 0.0, ["global"]),
        (TIERS, 51.9, 0.0, ["global", "local"]),
        (TIERS, 11.9, 0.0, ["global", "memory"]),
        ({"global": 40.0, "local": INF}, 30.0, 0.0, ["global"]),
        (TIERS, 60.0, 50.0, None),
        (TIERS, 60.0, 49.9, ["global", "local"]),  # the timeout is a lead, too
    ],
)
def test_a_lead_that_is_shorter_than_a_save_is_reported_once_with_the_tier_that_is_left(
    tiers: dict[str, float], lead: float, timeout: float, named: list[str] | None
) -> None:
    one = rank(tiers, lead, timeout_sec=timeout)
    found = one.start()
    assert [[tier for tier in TIERS if tier in each.reason] for each in found] == ([named] if named else [])
    assert all(numbers(each.reason) == [40.0, round(min(lead, timeout or lead))] for each in found)
    assert one.start() == ()
    later = rank({"global": INF})
    assert later.start() == ()
    assert play(later, (Measured("global", 90.0), 1.0), (Measured("global", 99.0), 1.0)) == ["warn", "-"]


# Reasons and options


@pytest.mark.parametrize("number", [1, 2, 3, 10, 12, 15])
def test_a_signal_is_chosen_and_reported_by_its_name_and_rank(number: int) -> None:
    name = signal.Signals(number).name
    for at in (-1, 0, 7):
        (asked,) = decided(rank(exit_signals=[name]), (Signal(number, at), 0.0))
        assert asked.order is Order.VOTE
        assert name in asked.reason
        assert numbers(asked.reason) == [*([at] if at >= 0 else []), 600]
    (other,) = decided(rank(exit_signals=["SIGHUP"]), (Signal(number), 0.0))
    assert name in other.reason


@pytest.mark.parametrize(
    ("given", "turns", "named"),
    [
        ({}, [(Notice("Slurm", 400.0), 100.0)], ["Slurm", "300", "298s"]),
        ({}, [ASK, (Signal(10), 1.0)], ["SIGUSR1", "SIGTERM"]),
        ({}, [*SAVE, (Signal(10), 3.0)], ["SIGUSR1", "SIGTERM"]),
        ({"preempt_time": 60.0}, [ASK, (Notice("Slurm", 60.0), 10.0)], ["Slurm", "SIGTERM"]),
        ({}, [*SAVE, (Notice("Slurm", 9.0), 10.0)], ["Slurm", " 0 s"]),
        ({"preempt_time": 60.0}, [ASK, (Notice("Slurm", 59.0), 10.0)], ["Slurm", "49"]),
        ({"preempt_time": 60.0}, [(Notice("Spot", 120.0), 0.0), (Signal(15), 10.0)], ["SIGTERM", "60"]),
        ({"preempt_time": 60.0}, [(Notice("Spot", 9.0), 0.0), (Signal(15), 1.0)], ["SIGTERM", "Spot"]),
        ({}, [vote(60, {"local": 9.0})], ["4", "local", "9.0", "58.0"]),
        ({}, [*SAVE, (FAIL, 1.0)], ["no space", "4", "local"]),
        ({}, [vote(60, {"memory": 1.0}), (FAIL, 1.0)], ["no space", "4"]),
        ({}, [STAGED, ASK, (Broken("a worker died"), 1.0)], ["a worker died", "3", "local"]),
        ({}, [*SAVE, (Durable(4, "global"), 1.0)], ["4", "global"]),
        ({"preempt_time": 20.0}, [*SAVE, tick(18.0)], ["4"]),
    ],
)
def test_a_reason_names_who_and_when(given: dict[str, Any], turns: list[Turn], named: list[str]) -> None:
    found, *_ = decided(rank(**given), *turns)
    assert all(one in found.reason for one in named), found.reason


def test_options_are_checked() -> None:
    assert PreemptionOptions().problems() == ()
    assert len(PreemptionOptions(preempt_time=0, margin=-1, exit_signals=["SIGKILL"]).problems()) == 3
    (useless,) = PreemptionOptions(enable_exit_handler=False, margin=3).problems()
    assert useless.startswith("margin: ")


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
    margin, now, tiers = draw.choice((0.0, 2.0)), 0.0, list(TIERS)
    one = rank(TIERS, draw.choice((0.0, 20.0)), timeout_sec=draw.choice((0.0, 30.0)), margin=margin)
    promised: Decision | None = None
    for _ in range(draw.randint(10, 200)):
        now += draw.choice((0.0, 0.1, 0.5))
        event = draw_event(draw, now)
        for each in (*one.handle(event, now), *one.tick(now)):
            assert each.reason
            promised = each if each.order in (Order.SAVE, Order.FLUSH) else promised
            if each.order is Order.EXIT and each.exit_code == ExitCode.PREEMPTED:
                assert promised is not None
                kept = isinstance(event, Durable) and event.step >= promised.step
                kept = kept and tiers.index(event.tier) <= tiers.index(promised.tier)
                assert kept or now >= one.expected - margin
            elif each.order is Order.EXIT and not isinstance(event, SaveFailed):
                assert now >= one.deadline - margin
        if one.state is State.ENDED:
            assert one.tick(now) == ()
            return
    if math.isfinite(one.deadline):
        assert one.tick(one.deadline)[-1].order is Order.EXIT
