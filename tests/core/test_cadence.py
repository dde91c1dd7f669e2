from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.cadence import (
    FIRST_SECONDS,
    FIRST_STEPS,
    HYSTERESIS,
    LONGEST,
    Cadence,
    Copied,
    Event,
    Recovered,
    Rule,
    Schedule,
    StepTimed,
    Tier,
)
from outlast.core.intervals import ettr, exact

MEMORY, REPLICA, LOCAL, GLOBAL = Tier
HOUR = 3600.0


def every(cadence: Cadence) -> dict[Tier, int]:
    return dict(cadence.schedule.every)


def test_every_rank_gets_the_same_answer_from_the_text_that_it_was_sent() -> None:
    schedule = Schedule(((MEMORY, 4), (LOCAL, 12), (GLOBAL, 24)), "why")
    received = Schedule.from_json(schedule.to_json())
    assert received == schedule
    assert [received.due(step) for step in (0, 1, 4, 12, 24)] == [
        (),
        (),
        (MEMORY,),
        (MEMORY, LOCAL),
        (MEMORY, LOCAL, GLOBAL),
    ]


def test_what_goes_to_disk_is_in_memory_first_where_memory_is_used() -> None:
    assert Schedule(((MEMORY, 4), (LOCAL, 10))).due(10) == (MEMORY, LOCAL)
    assert Schedule(((REPLICA, 4), (LOCAL, 10))).due(10) == (LOCAL,)


@pytest.mark.parametrize(
    "text",
    [
        '{"every": [["attic", 3]], "reason": ""}',
        '{"every": [["local", 0]], "reason": ""}',
        '{"every": []}',
        "x",
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        Schedule.from_json(text)


def test_what_the_user_fixed_stays_fixed() -> None:
    cadence = Cadence([Rule(LOCAL, steps=50), Rule(GLOBAL, seconds=30.0)])
    assert every(cadence) == {LOCAL: 50, GLOBAL: FIRST_STEPS}
    assert cadence.handle(StepTimed(0.5), 0.0) == Schedule(
        ((LOCAL, 50), (GLOBAL, 60)), "local every 50 steps (25 s), global every 60 steps (30 s)"
    )
    for now in range(1, 20):
        cadence.handle(Copied(LOCAL, 20.0, 600.0), float(now))
        cadence.handle(Copied(GLOBAL, 20.0, 600.0), float(now))
        cadence.handle(Recovered(LOCAL, LOCAL, 1.0), float(now))
    assert every(cadence) == {LOCAL: 50, GLOBAL: 60}


def test_seconds_that_the_user_fixed_follow_every_change_of_the_step_time() -> None:
    cadence = Cadence([Rule(LOCAL, seconds=30.0)])
    cadence.handle(StepTimed(0.5), 0.0)
    cadence.handle(StepTimed(0.54), 0.0)
    assert every(cadence) == {LOCAL: round(30 / 0.52)}


def test_before_anything_was_measured_copies_are_made_early_and_seldom() -> None:
    cadence = Cadence([Rule(MEMORY), Rule(LOCAL)])
    assert every(cadence) == {MEMORY: FIRST_STEPS, LOCAL: FIRST_STEPS}
    cadence.handle(StepTimed(0.001), 0.0)
    assert every(cadence) == {MEMORY: FIRST_SECONDS / 0.001, LOCAL: FIRST_SECONDS / 0.001}


def measured(costs: dict[Tier, tuple[float, float]]) -> Cadence:
    """Return a cadence of a job with steps of one second in which each tier was written once."""
    cadence = Cadence([Rule(tier) for tier in costs])
    cadence.handle(StepTimed(1.0), 0.0)
    for tier, (blocking, durable) in costs.items():
        cadence.handle(Copied(tier, blocking, durable), 0.0)
    return cadence


def test_a_job_that_measures_itself_saves_in_each_tier_as_it_pays() -> None:
    """With nothing but expected rates: 6 h between faults that need the memory, 24 h for the global tier."""
    cadence = measured({MEMORY: (0.2, 1), LOCAL: (1, 20), GLOBAL: (30, 60)})
    assert cadence.schedule.reason == (
        "memory every 59 steps (59 s), local every 177 steps (177 s), global every 1416 steps (1.42e+03 s)"
    )
    told = Counter(cadence.schedule.due(step) for step in range(1, 1417))
    assert told == {(): 1392, (MEMORY,): 16, (MEMORY, LOCAL): 7, (MEMORY, LOCAL, GLOBAL): 1}


def test_a_tier_that_does_not_pay_gets_no_copies() -> None:
    assert every(measured({MEMORY: (0.2, 1), REPLICA: (60, 60), LOCAL: (1, 10)})).keys() == {MEMORY, LOCAL}


def test_copies_do_not_queue_up_but_one_slow_upload_does_not_stop_saving() -> None:
    cadence = measured({LOCAL: (0.5, 1)})
    best = every(cadence)[LOCAL]
    for durable in (2 * best + 0.1, 2 * best + 0.9):
        cadence = measured({LOCAL: (0.5, durable)})
        assert every(cadence)[LOCAL] == 2 * best + 1
    cadence = measured({LOCAL: (0.5, 100.0 * best)})
    assert every(cadence)[LOCAL] == pytest.approx(LONGEST * best, rel=0.05)


def test_faults_shorten_the_interval_and_quiet_lengthens_it() -> None:
    cadence = measured({LOCAL: (1, 1)})
    first, now = every(cadence)[LOCAL], 0.0
    for _ in range(8):
        now += 300 + 10
        cadence.handle(Recovered(LOCAL, LOCAL, 10.0), now)
    busy = every(cadence)[LOCAL]
    assert 0.7 * exact(1, 300) <= busy <= 1.25 * exact(1, 300) < first / 3
    cadence.handle(Copied(LOCAL, 1, 1), now + 100 * HOUR)
    assert every(cadence)[LOCAL] > 5 * busy


def test_the_time_of_a_recovery_is_no_time_without_a_fault() -> None:
    one, other = measured({LOCAL: (1, 1)}), measured({LOCAL: (1, 1)})
    one.handle(Recovered(LOCAL, LOCAL, 0.0), 300.0)
    other.handle(Recovered(LOCAL, LOCAL, 4 * HOUR), 300.0 + 4 * HOUR)
    assert one.state()["rates"] == other.state()["rates"]


@pytest.mark.parametrize(
    ("tiers", "needed", "counted"),
    [
        ((MEMORY, LOCAL), MEMORY, MEMORY),
        ((MEMORY, LOCAL), REPLICA, LOCAL),
        ((MEMORY, LOCAL), GLOBAL, LOCAL),
        ((GLOBAL,), MEMORY, GLOBAL),
    ],
)
def test_a_fault_counts_for_the_first_tier_that_survives_it(
    tiers: tuple[Tier, ...], needed: Tier, counted: Tier
) -> None:
    cadence = Cadence([Rule(tier) for tier in tiers])
    before = cadence.state()["rates"]
    cadence.handle(Recovered(needed, tiers[0], 1.0), 0.0)
    after = cadence.state()["rates"]
    assert {tier for tier in after if after[tier] != before[tier]} == {counted.value}


def test_small_changes_make_no_new_schedule() -> None:
    cadence = measured({LOCAL: (1, 1)})
    kept = cadence.schedule
    assert [cadence.handle(Copied(LOCAL, cost, 1), 0.0) for cost in (1.2, 0.8, 1.3, 0.9)] == [None] * 4
    assert cadence.schedule is kept
    assert cadence.handle(Copied(LOCAL, 3.0, 1), 0.0) is cadence.schedule
    assert abs(every(cadence)[LOCAL] - dict(kept.every)[LOCAL]) > HYSTERESIS * dict(kept.every)[LOCAL]


EVENTS = st.one_of(
    st.builds(StepTimed, st.floats(1e-3, 30)),
    st.builds(Copied, st.sampled_from(Tier), st.floats(0, 60), st.floats(0, 4000)),
    st.builds(Recovered, st.sampled_from(Tier), st.sampled_from(Tier), st.floats(0, 600)),
)
RULES = st.lists(
    st.one_of(
        st.builds(Rule, st.sampled_from(Tier)),
        st.builds(Rule, st.sampled_from(Tier)),
        st.builds(Rule, st.sampled_from(Tier), steps=st.integers(1, 500)),
        st.builds(Rule, st.sampled_from(Tier), seconds=st.floats(1, 5000)),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda rule: rule.tier,
)
HISTORY = st.lists(st.tuples(EVENTS, st.floats(0, 20_000)), max_size=25)


def test_every_schedule_is_one_that_can_be_kept() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(RULES, HISTORY, st.lists(st.floats(0.01, 60), min_size=4, max_size=4))
    def check(rules: list[Rule], history: list[tuple[Event, float]], costs: list[float]) -> None:
        cadence, now, step = Cadence(rules), 0.0, 0.0
        copies = [Copied(tier, cost, cost) for tier, cost in zip(Tier, sorted(costs), strict=True)]
        history = [(StepTimed(1.0), 0.0), *((copy, 0.0) for copy in copies), *history]
        chosen = {rule.tier for rule in rules if rule.steps is None and rule.seconds is None}
        copied = set()
        for event, gap in history:
            now += gap
            made = cadence.handle(event, now)
            assert made is None or made is cadence.schedule
            step = cadence.state()["step"] or 0.0
            copied |= {event.tier} if isinstance(event, Copied) else set()
            steps = every(cadence)
            assert all(count >= 1 for count in steps.values())
            assert steps.keys() >= {rule.tier for rule in rules} - chosen - copied
            for rule in rules:
                if rule.steps is not None:
                    assert steps[rule.tier] == rule.steps
                elif rule.seconds is not None and step:
                    assert abs(steps[rule.tier] * step - rule.seconds) <= max(step, rule.seconds / 2)
            used = [steps[tier] for tier in Tier if tier in chosen & copied & steps.keys()]
            if step and made is not None:
                assert all(more % less == 0 for less, more in itertools.pairwise(used)), used
                seen["nested"] += len(used) > 1
                seen["dropped"] += not steps.keys() >= chosen
            seen["kept"] += made is None

    check()
    assert min(seen["nested"], seen["dropped"], seen["kept"]) > 0, seen


def test_chosen_intervals_stay_between_durable_and_four_times_the_best() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(st.floats(0, 60), st.floats(0, 4000), st.floats(1e-2, 30))
    def check(blocking: float, durable: float, step: float) -> None:
        cadence = Cadence([Rule(GLOBAL)])
        cadence.handle(StepTimed(step), 0.0)
        cadence.handle(Copied(GLOBAL, blocking, durable), 0.0)
        twin = Cadence([Rule(GLOBAL)])
        twin.handle(StepTimed(1e-4), 0.0)
        twin.handle(Copied(GLOBAL, blocking, 0.0), 0.0)
        best, seconds = every(twin)[GLOBAL] * 1e-4, every(cadence)[GLOBAL] * step
        steps_near = best - 2 * step <= seconds <= best + 2 * step
        if durable > LONGEST * best * 1.01:
            assert seconds == pytest.approx(LONGEST * best, abs=step + 0.3 * LONGEST * best)
            seen["capped"] += 1
        else:
            hysteresis = HYSTERESIS * seconds + step
            assert seconds >= durable - hysteresis
            assert steps_near or seconds <= max(best, durable) + step + hysteresis
            seen["durable" if durable > best else "best"] += 1

    check()
    assert min(seen[name] for name in ("capped", "durable", "best")) > 0, seen


def test_what_was_measured_outlives_the_process() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=100)
    @given(RULES, HISTORY, EVENTS)
    def check(rules: list[Rule], history: list[tuple[Event, float]], last: Event) -> None:
        first, second, now = Cadence(rules), Cadence(rules), 0.0
        for event, gap in history:
            now += gap
            first.handle(event, now)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.state() == first.state()
        made = first.handle(last, now)
        assert second.handle(last, now + 1e6) == made
        assert second.state() == first.state()
        seen["made"] += made is not None

    check()
    assert seen["made"] > 0, seen


def test_a_change_of_what_the_user_fixed_wins_over_what_was_kept() -> None:
    cadence = Cadence([Rule(LOCAL, steps=20), Rule(GLOBAL)])
    cadence.restore(Cadence([Rule(LOCAL, steps=10)]).state())
    assert every(cadence) == {LOCAL: 20, GLOBAL: FIRST_STEPS}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": "1"},
        {"costs": {"local": [1, -1]}},
        {"costs": {"attic": [1, 1]}},
        {"costs": {"local": [1]}},
        {"restarts": {"local": None}},
        {"rates": {"local": {"faults": 0}}},
        {"schedule": "{}"},
    ],
    ids=str,
)
def test_a_state_that_makes_no_sense_is_refused_whole(wrong: dict[str, object]) -> None:
    cadence = measured({LOCAL: (1, 1)})
    before = cadence.state()
    with pytest.raises((KeyError, TypeError, ValueError)):
        cadence.restore(before | {"step": 2.0} | wrong)
    assert cadence.state() == before


def test_following_a_rate_costs_little_against_knowing_it(seed: int) -> None:
    """A job whose faults come every 20 minutes, then every three: the loss over the best possible."""
    draw = random.Random(seed)
    cadence, now = measured({LOCAL: (1.0, 1.0)}), 0.0
    lost = []
    for mtbf in (1200.0, 180.0):
        for fault in range(60):
            now += draw.expovariate(1 / mtbf)
            cadence.handle(Recovered(LOCAL, LOCAL, 0.0), now)
            seconds = float(every(cadence)[LOCAL])
            if fault >= 10:
                lost.append(ettr(exact(1, mtbf), 1, mtbf, 0) - ettr(seconds, 1, mtbf, 0))
    assert min(lost) >= 0
    assert sum(lost) / len(lost) < 0.02
