"""The edges of a preemption: times at their bounds, news that come early, late or twice, and what is said."""

from __future__ import annotations

import math
import signal

import pytest

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
from tests.preemption.policy.test_preemption import TIERS, only


def saving(tier: str = "global", step: int = 4) -> Preempted:
    """Return a rank that has agreed at 0 s to save a step, 60 s before the expected end."""
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Signal(15), 0.0)
    seconds = {name: needed for name, needed in TIERS.items() if TIERS[tier] >= needed}
    assert only(rank.handle(Voted(step, 60.0, seconds), 0.0)).tier == tier
    return rank


@pytest.mark.parametrize("number", [1, 2, 3, 10, 12, 15])
def test_a_signal_is_chosen_and_reported_by_its_name(number: int) -> None:
    name = signal.Signals(number).name
    rank = Preempted(PreemptionOptions(exit_signals=[name]), TIERS)
    asked = only(rank.handle(Signal(number), 0.0))
    assert asked.order is Order.VOTE
    assert asked.reason.startswith(f"Received {name} — requesting graceful shutdown")


@pytest.mark.parametrize(("rank", "where"), [(-1, ""), (0, " on rank 0"), (7, " on rank 7")])
def test_the_rank_that_got_the_signal_is_named(rank: int, where: str) -> None:
    asked = only(Preempted(PreemptionOptions(), TIERS).handle(Signal(15, rank), 0.0))
    assert asked.reason.startswith(f"Received SIGTERM{where} — requesting")
    assert Signal(15) == Signal(15, -1), "nobody says to whom it came"


@pytest.mark.parametrize(("number", "name"), [(12, "SIGUSR2"), (64, "signal 64")])
def test_another_signal_is_no_notice(number: int, name: str) -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    (found,) = rank.handle(Signal(number), 0.0)
    assert found == Decision(Order.NONE, f"{name} is no notice (exit_signals, enable_exit_handler)")
    assert rank.state is State.TRAINING
    assert math.isinf(rank.deadline)


def test_a_cluster_that_says_when_it_ends_is_believed() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    asked = only(rank.handle(Notice("Slurm", 400.0), 100.0))
    assert asked.reason == "Slurm ends this job in 300 s; Forced exit in 298s if shutdown not complete"
    assert (asked.order, asked.step, asked.tier, asked.exit_code) == (Order.VOTE, -1, "", ExitCode.OK)
    assert (rank.deadline, rank.expected) == (400.0, 400.0)


@pytest.mark.parametrize(("ends", "exits"), [(100.0, True), (102.0, True), (102.1, False)])
def test_a_notice_that_leaves_no_more_than_the_margin_ends_the_process_at_once(
    ends: float, exits: bool
) -> None:
    rank = Preempted(PreemptionOptions(margin=2.0), TIERS)
    rank.handle(Staged(3), 0.0)
    orders = [one.order for one in rank.handle(Notice("Slurm", ends), 100.0)]
    assert orders[0] is Order.VOTE
    assert (Order.EXIT in orders) == exits


def test_where_the_margin_is_longer_than_the_time_that_is_assumed_the_flush_comes_at_once() -> None:
    rank = Preempted(PreemptionOptions(margin=100.0), TIERS)
    rank.handle(Staged(3), 0.0)
    vote, flush = rank.handle(Signal(15), 0.0)
    assert (vote.order, flush.order, flush.tier) == (Order.VOTE, Order.FLUSH, "memory")


def test_a_process_that_exits_decides_nothing_more() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    _, left = rank.handle(Notice("Slurm", 90.0), 100.0)
    words = "Graceful shutdown timed out — forcing exit: nothing was staged"
    assert left == Decision(Order.EXIT, words, exit_code=int(ExitCode.FAILED))
    assert (left.step, left.tier) == (-1, "")
    for event in (Signal(15), Voted(4, 60.0, TIERS), Durable(4, "global"), Broken("E")):
        assert rank.handle(event, 101.0) == (Decision(Order.NONE, "the process exits already"),)
    assert rank.tick(102.0) == ()


def test_a_repeat_names_the_notice_that_came_first() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Signal(15), 0.0)
    assert only(rank.handle(Signal(10), 1.0)).reason == "SIGUSR1 changes nothing: SIGTERM came before"
    rank.handle(Voted(4, 60.0, TIERS), 2.0)
    assert only(rank.handle(Signal(15), 3.0)).reason == "SIGTERM changes nothing: SIGTERM came before"
    other = Preempted(PreemptionOptions(), TIERS)
    other.handle(Voted(4, 60.0, TIERS), 0.0)
    again = only(other.handle(Signal(15), 1.0))
    assert again.reason == "SIGTERM changes nothing: another rank's notice came before"
    assert math.isinf(other.deadline), "the first notice counts"


@pytest.mark.parametrize(("ends", "sooner"), [(60.0, False), (59.0, True), (61.0, False)])
def test_only_a_notice_that_leaves_less_time_counts_besides_the_first(ends: float, sooner: bool) -> None:
    rank = Preempted(PreemptionOptions(preempt_time=60.0), TIERS)
    rank.handle(Signal(15), 0.0)
    found = only(rank.handle(Notice("Slurm", ends), 10.0))
    assert found.order is Order.NONE
    assert found.reason == (
        "Slurm leaves only 49 s; the exit comes sooner"
        if sooner
        else "Slurm changes nothing: SIGTERM came before"
    )
    assert rank.deadline == rank.expected == min(ends, 60.0)


def test_a_signal_that_leaves_less_time_than_a_notice_before_it_counts() -> None:
    rank = Preempted(PreemptionOptions(preempt_time=60.0), TIERS)
    rank.handle(Notice("Spot", 120.0), 0.0)
    assert only(rank.handle(Signal(15), 10.0)).reason == "SIGTERM leaves only 60 s; the exit comes sooner"
    assert rank.deadline == rank.expected == 70.0
    assert only(rank.handle(Signal(15), 20.0)).reason == "SIGTERM changes nothing: Spot came before"
    assert rank.deadline == 70.0


def test_a_notice_that_leaves_no_time_ends_what_the_first_one_began() -> None:
    rank = saving()
    said, left = rank.handle(Notice("Slurm", 9.0), 10.0)
    assert said.reason == "Slurm leaves only 0 s; the exit comes sooner"
    words = "Graceful shutdown timed out — forcing exit: step 4 is not durable"
    assert left == Decision(Order.EXIT, words, 4, "global", int(ExitCode.FAILED))


def test_the_least_time_of_any_rank_counts_for_all() -> None:
    rank = Preempted(PreemptionOptions(preempt_time=60.0), TIERS)
    rank.handle(Signal(15), 0.0)
    rank.handle(Voted(4, 20.0, TIERS, 30.0), 10.0)
    assert (rank.deadline, rank.expected) == (40.0, 30.0)
    later = Preempted(PreemptionOptions(preempt_time=60.0), TIERS)
    later.handle(Signal(15), 0.0)
    later.handle(Voted(4, 90.0, TIERS, 90.0), 10.0)
    assert (later.deadline, later.expected) == (60.0, 60.0)


@pytest.mark.parametrize(("left", "tier"), [(52.0, "global"), (51.9, "local"), (11.9, "memory")])
def test_the_margin_is_no_time_for_a_save(left: float, tier: str) -> None:
    rank = Preempted(PreemptionOptions(margin=2.0), TIERS)
    assert only(rank.handle(Voted(4, left, TIERS), 0.0)).tier == tier


def test_a_tier_that_a_rank_has_not_measured_is_none_that_there_is_time_for() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    save = only(rank.handle(Voted(4, 60.0, {"local": 9.0}), 0.0))
    assert save.tier == "local"
    assert save.reason.endswith("to the local tier: it takes 9.0 s and 58.0 s are left")


def test_a_second_vote_changes_nothing() -> None:
    rank = saving()
    again = only(rank.handle(Voted(5, 1.0, TIERS, 1.0), 1.0))
    assert again == Decision(Order.NONE, "a save is on its way; the vote for step 5 changes nothing")
    assert only(rank.handle(Durable(4, "global"), 30.0)).order is Order.EXIT


@pytest.mark.parametrize(
    ("seconds", "left", "tier", "why"),
    [
        ({"global": 40.0}, 50.0, "global", "it takes 40.0 s and 50.0 s are left"),
        ({"global": 0.0}, 0.0, "global", "it takes 0.0 s and 0.0 s are left"),
        ({"global": math.inf, "local": math.inf}, 9.0, "global", "no save was measured; 9.0 s are left"),
        ({"global": math.inf}, -3.0, "global", "no save was measured; 0.0 s are left"),
        (
            {"global": 40.0, "local": 8.0, "memory": math.inf},
            9.9,
            "local",
            "no tier is quick enough for 9.9 s; this one is the quickest, 8.0 s",
        ),
    ],
)
def test_the_choice_of_a_tier_says_why(seconds: dict[str, float], left: float, tier: str, why: str) -> None:
    assert choose(seconds, left) == (tier, why)


@pytest.mark.parametrize(
    "event", [Durable(4, "global"), SaveFailed(4, "no space"), Staged(4), RolledBack(), Broken("E")]
)
def test_news_of_a_save_decide_nothing_before_one_is_ordered(event: Event) -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    assert rank.handle(event, 0.0) == ()
    assert rank.state is State.TRAINING
    asked = Preempted(PreemptionOptions(), TIERS)
    asked.handle(Signal(15), 0.0)
    assert asked.handle(event, 1.0) == ()
    assert asked.state is State.ASKED


@pytest.mark.parametrize(
    ("step", "tier", "exits"),
    [(4, "local", True), (5, "local", True), (4, "global", True), (3, "local", False), (4, "memory", False)],
)
def test_a_copy_of_that_step_or_a_later_one_in_that_tier_or_a_better_one_is_enough(
    step: int, tier: str, exits: bool
) -> None:
    words = f"Graceful shutdown complete: step {step} is durable in the {tier} tier"
    complete = Decision(Order.EXIT, words, 4, "local", int(ExitCode.PREEMPTED))
    assert saving("local").handle(Durable(step, tier), 1.0) == ((complete,) if exits else ())


def test_a_copy_in_a_tier_that_nobody_knows_does_not_count() -> None:
    rank = saving()
    for tier in ("tape", "memory", "tape"):
        assert rank.handle(Durable(4, tier), 1.0) == ()
    assert only(rank.tick(58.0)).reason == "out of time: step 4 is durable in the memory tier only"


@pytest.mark.parametrize("tiers", [("memory", "local"), ("local", "memory"), ("local", "local")])
def test_of_lesser_tiers_the_best_one_counts_when_the_end_is_near(tiers: tuple[str, str]) -> None:
    rank = saving()
    for tier in tiers:
        assert rank.handle(Durable(4, tier), 1.0) == ()
    assert rank.tick(57.9) == ()
    (left,) = rank.tick(58.0)
    words = "out of time: step 4 is durable in the local tier only"
    assert left == Decision(Order.EXIT, words, 4, "global", int(ExitCode.PREEMPTED))


def test_a_copy_in_a_lesser_tier_is_told_by_its_own_step() -> None:
    rank = saving()
    for step in (4, 6):
        rank.handle(Durable(step, "memory"), 1.0)
    assert only(rank.tick(58.0)).reason == "out of time: step 6 is durable in the memory tier only"


@pytest.mark.parametrize(("at", "tier"), [(48.0, "local"), (48.1, "memory")])
def test_a_save_that_fails_goes_where_there_is_still_time(at: float, tier: str) -> None:
    rank = saving()
    assert rank.handle(SaveFailed(3, "no space"), at) == (), "that was another save"
    again = only(rank.handle(SaveFailed(4, "no space"), at))
    assert (again.order, again.step, again.tier) == (Order.SAVE, 4, tier)
    assert again.reason.startswith(f"no space; step 4 goes to the {tier} tier: ")
    assert only(rank.handle(Durable(4, tier), at)).exit_code == ExitCode.PREEMPTED


def test_after_a_save_that_fails_the_slowest_rank_still_counts_for_all() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Voted(4, 60.0, {"global": 40.0, "local": 30.0, "memory": 0.5}), 0.0)
    assert only(rank.handle(SaveFailed(4, "no space"), 30.0)).tier == "memory", "8 s here, 30 s elsewhere"


def test_a_save_that_fails_in_the_last_tier_ends_the_process() -> None:
    left = only(saving("memory").handle(SaveFailed(4, "no space"), 1.0))
    words = "step 4 could not be saved (no space), and no other tier is left"
    assert left == Decision(Order.EXIT, words, 4, "memory", int(ExitCode.FAILED))


@pytest.mark.parametrize(
    ("tiers", "tier", "when"),
    [
        ({"global": 48.0, "memory": 0.5}, "global", 20.0),
        ({"global": 48.1, "memory": 0.5}, "memory", 78.0),
        ({"global": 500.0}, "global", 20.0),
        ({"global": math.inf}, "global", 20.0),
        ({"memory": 1.6}, "memory", 78.0),
        ({"memory": 4.0}, "memory", 75.0),
    ],
)
def test_an_agreement_is_waited_for_a_quarter_of_the_time_and_longer_where_a_save_leaves_it(
    tiers: dict[str, float], tier: str, when: float
) -> None:
    rank = Preempted(PreemptionOptions(preempt_time=82.0, margin=2.0), tiers)
    rank.handle(Staged(0), 0.0)
    rank.handle(Signal(15), 100.0)
    assert rank.tick(100.0 + when - 0.1) == ()
    flush = only(rank.tick(100.0 + when))
    assert (flush.order, flush.step, flush.tier) == (Order.FLUSH, 0, tier)
    assert flush.reason == (
        "ranks did not agree in time: their group may hang; step 0, which is staged, is flushed to the"
        f" {tier} tier without an agreement"
    )
    assert rank.state is State.SAVING


def test_the_newest_step_that_is_staged_is_flushed_once() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    assert rank.handle(Broken("E"), 0.0) == ()
    rank.handle(Signal(15), 0.0)
    assert rank.handle(Broken("E"), 1.0) == (), "nothing is staged"
    for step in (0, 8, 7):
        rank.handle(Staged(step), 2.0)
    flush = only(rank.handle(Broken("E"), 3.0))
    assert (flush.order, flush.step) == (Order.FLUSH, 8)
    assert rank.handle(Broken("E"), 4.0) == ()
    assert rank.tick(57.9) == ()


def test_the_first_step_of_all_can_be_flushed_after_an_error() -> None:
    rank = Preempted(PreemptionOptions(), TIERS)
    rank.handle(Staged(0), 0.0)
    rank.handle(Signal(15), 0.0)
    assert only(rank.handle(Broken("E"), 1.0)).step == 0


@pytest.mark.parametrize("measured", [(10.0, 4.0), (4.0, 10.0)])
def test_the_longest_save_that_was_measured_counts(measured: tuple[float, float]) -> None:
    rank = Preempted(PreemptionOptions(), {"local": math.inf})
    for seconds in measured:
        assert rank.handle(Measured("local", seconds), 0.0) == ()
    rank.handle(Staged(3), 0.0)
    rank.handle(Signal(15), 0.0)
    assert rank.tick(45.4) == ()
    assert only(rank.tick(45.5)).order is Order.FLUSH, "12.5 s before 58"


@pytest.mark.parametrize(
    ("tiers", "lead", "words"),
    [
        ({"global": 40.0}, 52.0, ""),
        ({"global": 40.0}, 51.9, "a preempted job may lose its last steps"),
        (TIERS, 51.9, "a preempted job saves to the local tier"),
        (TIERS, 11.9, "a preempted job saves to the memory tier"),
        ({"global": 40.0, "local": math.inf}, 30.0, "a preempted job may lose its last steps"),
    ],
)
def test_it_is_said_before_training_where_a_preempted_job_will_be_saved(
    tiers: dict[str, float], lead: float, words: str
) -> None:
    rank = Preempted(PreemptionOptions(margin=2.0), tiers, lead)
    said = rank.start()
    assert bool(said) == bool(words)
    assert all(words in one.reason for one in said)
    assert rank.start() == (), "once"


@pytest.mark.parametrize(("timeout", "warns"), [(0.0, False), (50.0, False), (49.9, True)])
def test_the_timeout_is_a_lead_too(timeout: float, warns: bool) -> None:
    said = Preempted(PreemptionOptions(timeout_sec=timeout, margin=2.0), TIERS, 60.0).start()
    words = "a save to the global tier takes 40.0 s and the lead is 50 s; a preempted job saves to the local"
    assert [one.reason.startswith(words) for one in said] == [True] * warns
