"""The rerun machine: whatever happens, an incident ends, and nothing is tried twice for the same devices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import RerunOptions
from outlast.rerun.policy.events import (
    RESTARTS,
    Event,
    Found,
    Loaded,
    Means,
    Order,
    Passed,
    Remedy,
    Reran,
    Started,
    Swapped,
)
from outlast.rerun.policy.machine import RerunMachine
from tests.rerun.policy.builders import (
    CLEAN,
    COPY,
    DAY,
    DEVICES,
    HOUR,
    NEAR,
    OTHER,
    PEERS,
    SPARE,
    Case,
    Turn,
    found,
    incidents,
    reran,
    restarted,
    swapped,
)

RANKS = st.lists(st.integers(0, 3), unique=True, max_size=3).map(tuple)
DIGESTS = st.lists(st.sampled_from("xyz"), max_size=3).map(tuple)
PEER = st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=3)
MEANS = st.builds(Means, PEER, st.booleans(), st.booleans())
STARTED = st.builds(
    Started, st.lists(st.sampled_from([*DEVICES, "GPU-d"]), min_size=1, max_size=3).map(tuple)
)
TIERS = st.sampled_from(["local", "replica", "global"])
LOADED = st.builds(Loaded, st.integers(0, 12), TIERS, st.sampled_from("pq"))
FOUND = st.builds(Found, st.integers(0, 12), st.just("loss"), st.just("nan"), RANKS, DIGESTS, MEANS)
RERAN = st.builds(Reran, RANKS, DIGESTS)
SWAPPED = st.builds(Swapped, RANKS, st.booleans())
PASSED = st.builds(Passed, st.integers(0, 14))
OPTIONS = st.fixed_dictionaries(
    {
        "rejected_action": st.sampled_from(["stop", "skip_batch", "roll_back"]),
        "max_attempts": st.integers(0, 3),
        "max_incidents_per_hour": st.integers(1, 4),
    }
)
Script = list[tuple[Event, float, bool]]


def events(start: st.SearchStrategy[Started]) -> st.SearchStrategy[Script]:
    """Return events, each with the seconds before it and whether another process goes on after it."""
    event = st.one_of(start, LOADED, FOUND, FOUND, RERAN, SWAPPED, PASSED)
    return st.lists(st.tuples(event, st.sampled_from([0.0, 1.0, 60.0, 4000.0]), st.booleans()), max_size=80)


def play(options: dict[str, Any], script: Script) -> tuple[Case, list[Order]]:
    case, now, orders, devices = Case(**options), 0.0, [], DEVICES
    for event, later, dies in script:
        now += later
        if isinstance(event, Started):
            devices = event.devices
        orders.append(case.machine.handle(event, now))
        if dies:
            case.reread()
            orders.append(case.machine.handle(Started(devices), now))
    return case, orders


@settings(max_examples=400)
@given(OPTIONS, events(STARTED))
def test_no_incident_has_more_restarts_than_it_may_and_none_repeats_itself(
    options: dict[str, Any], script: Script
) -> None:
    case, orders = play(options, script)
    most, found = case.options.max_attempts, incidents(case.machine)
    for incident in found:
        assert incident.restarts <= most
        counts = Counter((one.remedy, frozenset(one.devices)) for one in incident.attempts)
        assert set(counts.values()) <= {1}
    assert sum(one.remedy in RESTARTS for one in orders) <= most * len(found)
    assert sum(one.pending is not None for one in found) <= 1, "one outcome is awaited"


@settings(max_examples=400)
@given(OPTIONS, events(st.just(Started(DEVICES))), st.integers(0, 12), RANKS, MEANS)
def test_from_any_state_the_same_fault_on_the_same_devices_ends_in_a_stop_for_good(
    options: dict[str, Any], script: Script, step: int, ranks: tuple[int, ...], means: Means
) -> None:
    case, _ = play(options, script)
    machine, now, restarts, stopped = case.machine, 1e6, 0, 0
    bound = case.options.max_attempts + len(Remedy)
    for _ in range(2 * bound):
        order = machine.handle(Found(step, "loss", "nan", ranks, means=means), now)
        for _ in range(bound):
            if order.remedy in (Remedy.RERUN, Remedy.CONFIRM, Remedy.SWAP):
                event = Swapped(ranks) if order.remedy is Remedy.SWAP else Reran(ranks or (0,))
                order = machine.handle(event, now)
        assert not (stopped and order.remedy is not Remedy.STOP), "a stop is the end"
        restarts += order.remedy in RESTARTS
        stopped += order.remedy is Remedy.STOP
        machine.handle(Started(DEVICES), now)
        machine.handle(Loaded(max(0, step - 3), "replica", "p"), now)
    assert restarts <= case.options.max_attempts
    assert stopped >= bound


@settings(max_examples=200)
@given(OPTIONS, events(STARTED))
def test_what_is_written_down_is_what_is_known(options: dict[str, Any], script: Script) -> None:
    case, _ = play(options, script)
    before = case.machine
    case.reread()
    one, other = (sorted(each.records(), key=lambda one: int(one["step"])) for each in (before, case.machine))
    assert one == other
    assert [case.machine.skips(step) for step in range(15)] == [before.skips(step) for step in range(15)]


# Bounds

FIRST = (found(1, step=1, at=1.7e9), reran(at=1.7e9), reran(at=1.7e9))


def later(seconds: float, rank: int = 1) -> tuple[Turn, ...]:
    """Return another transient incident, some seconds after the first."""
    at = 1.7e9 + seconds
    return (found(rank, step=2, at=at), reran(at=at), reran(at=at))


TRANSIENT = "rerun, confirm, continue transient"


@pytest.mark.parametrize(
    ("given", "turns", "orders"),
    [
        # max_incidents_per_hour
        ({"max_incidents_per_hour": 1}, [*FIRST, *later(HOUR)], f"{TRANSIENT} GPU-b, {TRANSIENT} GPU-b"),
        (
            {"max_incidents_per_hour": 1},
            [*FIRST, later(HOUR - 1)[0]],
            f"{TRANSIENT} GPU-b, stop-93 inconclusive",
        ),
        ({"max_incidents_per_hour": 1}, [*FIRST, later(0)[0]], f"{TRANSIENT} GPU-b, stop-93 inconclusive"),
        # max_transients_per_day, of each device
        ({"max_transients_per_day": 2}, [*FIRST, *later(DAY)], f"{TRANSIENT} GPU-b, {TRANSIENT} GPU-b"),
        (
            {"max_transients_per_day": 2},
            [*FIRST, *later(DAY - 1)],
            f"{TRANSIENT} GPU-b, rerun, confirm, stop-69 persistent GPU-b",
        ),
        ({"max_transients_per_day": 2}, [*FIRST, *later(0, 2)], f"{TRANSIENT} GPU-b, {TRANSIENT} GPU-c"),
        ({"max_transients_per_day": 1}, [found(), *CLEAN], TRANSIENT),  # nobody knows the device
        # max_incident_seconds
        ({"max_incident_seconds": 60.0}, [found(1, means=PEERS), reran(1, at=61.0)], "rerun, swap 1/2"),
        (
            {"max_incident_seconds": 60.0},
            [found(1, means=PEERS), reran(1, at=61.5)],
            "rerun, stop-93 inconclusive",
        ),
        # suspect_steps
        ({"loaded": NEAR}, [found(1, step=10, means=COPY), reran(1)], "rerun, load_older-1 of local/p"),
        ({"loaded": NEAR}, [found(1, step=11, means=COPY), reran(1)], "rerun, stop-93 inconclusive"),
        # max_attempts
        (
            {"max_attempts": 0},
            [found(1, means=Means({1: 2}, spare=True)), reran(1), swapped(1)],
            "rerun, swap 1/2, stop-69 persistent GPU-b",
        ),
        (
            {"max_attempts": 1},
            [found(1, means=Means({1: 2}, spare=True)), reran(1), swapped(1)],
            "rerun, swap 1/2, spare-69 persistent GPU-b",
        ),
        (
            {"loaded": NEAR, "max_attempts": 1, "rejected_action": "roll_back"},  # which counts as a restart
            [found(1, means=COPY), reran(1), restarted(loaded=OTHER), found(1)],
            "rerun, load_older-1 of local/p, -, stop-93 inconclusive",
        ),
        # without validation
        ({"rerun_mode": "disabled"}, [found(1)], "stop-93 inconclusive"),
        ({"rerun_mode": "report_determinism_stats"}, [found(1)], "stop-93 inconclusive"),
    ],
)
def test_reruns_restarts_incidents_and_time_are_counted(
    given: dict[str, Any], turns: list[Turn], orders: str
) -> None:
    assert ", ".join(Case(**given).play(*turns)) == orders


@pytest.mark.parametrize("most", [0, 1, 2])
def test_restarts_for_an_incident_are_counted(most: int) -> None:
    case, last = Case(NEAR, max_attempts=most), ""
    for turn in range(most + 1):
        first, last, _ = case.play(
            found(1, means=COPY), reran(1), restarted("GPU-a", "GPU-b", f"GPU-{turn}", loaded=NEAR)
        )
        assert first == "rerun"
        assert last == ("load_older-1 of local/p" if turn < most else "stop-93 inconclusive")


@pytest.mark.parametrize(
    ("action", "most", "order"),
    [
        ("roll_back", 0, "stop-93"),
        ("roll_back", 1, "roll_back-1"),
        ("skip_batch", 0, "skip_batch"),
        ("stop", 3, "stop-93"),
    ],
)
def test_the_policy_is_followed_once_and_then_the_job_ends(action: str, most: int, order: str) -> None:
    case = Case(rejected_action=action, max_attempts=most)
    assert case.play(found(0, 1, 2), reran(0, 1, 2)) == ["rerun", f"{order} data_or_model"]
    for _ in range(4):
        assert case.play(restarted(), found(0, 1, 2)) == ["-", "stop-93 data_or_model"]
    assert case.tried.count("stop") == 1, "an end is written down once"
    case.reread()
    assert [case.machine.skips(step) for step in (4, 5, 6)] == [False, action == "skip_batch", False]


@pytest.mark.parametrize(("megatron", "codes"), [(True, ("", "-16", "-17")), (False, ("", "-1", "-93"))])
def test_a_launcher_that_knows_megatron_is_told_by_its_exit_codes(
    megatron: bool, codes: tuple[str, str, str]
) -> None:
    case = Case(NEAR, megatron_exit_codes=megatron)
    one, other, _, end = case.play(found(1, means=COPY), reran(1), restarted(loaded=OTHER), found(1))
    assert (one, other, end) == ("rerun", f"load_older{codes[1]} of local/p", f"stop{codes[2]} inconclusive")


# What is kept


def test_a_machine_says_what_it_waits_for_and_on_which_devices() -> None:
    case = Case()
    assert (case.machine.devices, case.machine.open) == (DEVICES, None)
    case.play(found(1))
    assert case.machine.open is not None
    assert (case.machine.open.step, case.machine.open.pending) == (5, Remedy.RERUN)
    case.play(*CLEAN)
    assert case.machine.open is None


def test_an_outcome_that_is_heard_before_a_start_ends_the_incident_all_the_same() -> None:
    case = Case(NEAR)
    case.play(found(1, means=PEERS))
    case.reread()
    assert case.play(reran(1), reran(1)) == ["rerun", "stop-93 inconclusive"]
    assert case.machine.open is None


def test_only_so_many_incidents_are_kept_and_steps_count_from_the_start_where_nothing_was_loaded() -> None:
    machine = RerunMachine(RerunOptions())
    for step in range(300):
        machine.handle(Found(step, "loss", "nan", (0,)), step * 4000.0)
    kept = list(range(300 - 256, 300))
    assert [(one["step"], one["since_load"]) for one in machine.records()] == [(step, step) for step in kept]


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"step": "5"},
        {"pending": "x"},
        {"more": 1},
        {"ranks": [None]},
        {"pairs": [[None, 1]]},
        {"devices": 5},
        {"digests": None},
        {"rejected_on": 5},
    ],
)
def test_a_record_that_is_not_ours_is_refused_whole(damage: dict[str, object]) -> None:
    case, machine = Case(), RerunMachine(RerunOptions())
    case.play(found(1))
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        machine.restore([case.record, {**case.record, **damage}])
    assert machine.records() == ()
    for name in case.record:
        with pytest.raises(ValueError, match=name):
            machine.restore([{one: value for one, value in case.record.items() if one != name}])


def test_an_order_names_the_finding_and_its_ranks() -> None:
    for ranks in ((), (1,), (0, 2)):
        reason = found(*ranks)(Case()).reason
        assert [one for one in reason if one.isdigit()] == ["5", *map(str, ranks)]
        assert "loss" in reason
        assert "nan" in reason


def test_a_suspect_that_a_spare_took_to_another_rank_is_convicted_there() -> None:
    """A spare was asked for and came to another rank; the same remedy is not ordered again."""
    case, both = Case(), Means({0: 2}, spare=True)
    assert case.play(found(1, means=SPARE), reran(1)) == ["rerun", "spare-69 GPU-b"]
    moved = restarted("GPU-b", "GPU-a", "GPU-c")
    assert case.play(moved, found(0, means=both), swapped(0))[1:] == ["swap 0/2", "stop-69 persistent GPU-b"]
