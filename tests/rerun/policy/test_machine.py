"""The rerun machine: whatever happens, an incident ends, and nothing is tried twice for the same devices."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import RerunOptions
from outlast.rerun.policy.events import (
    RESTARTS,
    Event,
    Found,
    Incident,
    Loaded,
    Means,
    Order,
    Passed,
    Remedy,
    Reran,
    Started,
    Swapped,
    Verdict,
)
from outlast.rerun.policy.machine import RerunMachine

DEVICES = ("GPU-a", "GPU-b", "GPU-c")
RANKS = st.lists(st.integers(0, 3), unique=True, max_size=3).map(tuple)
DIGESTS = st.lists(st.sampled_from("xyz"), max_size=3).map(tuple)
MEANS = st.builds(
    Means,
    st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=3),
    st.booleans(),
    st.booleans(),
)
STARTED = st.builds(
    Started, st.lists(st.sampled_from([*DEVICES, "GPU-d"]), min_size=1, max_size=3).map(tuple)
)
SAME_START = st.just(Started(DEVICES))
LOADED = st.builds(
    Loaded, st.integers(0, 12), st.sampled_from(["local", "replica", "global"]), st.sampled_from("pq")
)
FOUND = st.builds(Found, st.integers(0, 12), st.just("loss"), st.just("nan"), RANKS, DIGESTS, MEANS)
RERAN = st.builds(Reran, RANKS, DIGESTS)
SWAPPED = st.builds(Swapped, RANKS, st.booleans())
PASSED = st.builds(Passed, st.integers(0, 14))
OPTIONS = st.builds(
    RerunOptions,
    rejected_action=st.sampled_from(["stop", "skip_batch", "roll_back"]),
    max_attempts=st.integers(0, 3),
    max_incidents_per_hour=st.integers(1, 4),
)


def events(start: st.SearchStrategy[Started]) -> st.SearchStrategy[list[tuple[Event, float, bool]]]:
    """Return events, each with the seconds before it and whether another process goes on after it."""
    event = st.one_of(start, LOADED, FOUND, FOUND, RERAN, SWAPPED, PASSED)
    return st.lists(st.tuples(event, st.sampled_from([0.0, 1.0, 60.0, 4000.0]), st.booleans()), max_size=80)


def play(options: RerunOptions, script: list[tuple[Event, float, bool]]) -> tuple[RerunMachine, list[Order]]:
    machine, now, orders = RerunMachine(options), 0.0, []
    devices = DEVICES
    machine.handle(Started(devices), now)
    for event, later, dies in script:
        now += later
        if isinstance(event, Started):
            devices = event.devices
        orders.append(machine.handle(event, now))
        if dies:
            records = json.loads(json.dumps(machine.records()))
            machine = RerunMachine(options)
            machine.restore(records)
            orders.append(machine.handle(Started(devices), now))
    return machine, orders


def repeated(incident: Incident) -> list[tuple[Remedy, frozenset[str]]]:
    counts = Counter((one.remedy, frozenset(one.devices)) for one in incident.attempts)
    return [key for key, count in counts.items() if count > 1]


def incidents(machine: RerunMachine) -> list[Incident]:
    return [Incident.of_record(record) for record in machine.records()]


@settings(max_examples=400)
@given(OPTIONS, events(STARTED))
def test_no_incident_has_more_restarts_than_it_may_and_none_repeats_itself(
    options: RerunOptions, script: list[tuple[Event, float, bool]]
) -> None:
    machine, orders = play(options, script)
    for incident in incidents(machine):
        assert incident.restarts <= options.max_attempts
        assert repeated(incident) == []
    assert sum(one.remedy in RESTARTS for one in orders) <= options.max_attempts * len(machine.records())
    assert sum(one.pending is not None for one in incidents(machine)) <= 1, "one outcome is awaited"


@settings(max_examples=400)
@given(OPTIONS, events(SAME_START), st.integers(0, 12), RANKS, MEANS)
def test_from_any_state_the_same_fault_on_the_same_devices_ends_in_a_stop_for_good(
    options: RerunOptions,
    script: list[tuple[Event, float, bool]],
    step: int,
    ranks: tuple[int, ...],
    means: Means,
) -> None:
    machine, _ = play(options, script)
    now, restarts, stopped = 1e6, 0, 0
    bound = options.max_attempts + len(Remedy)
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
    assert restarts <= options.max_attempts
    assert stopped >= bound


@settings(max_examples=200)
@given(OPTIONS, events(STARTED))
def test_what_is_written_down_is_what_is_known(
    options: RerunOptions, script: list[tuple[Event, float, bool]]
) -> None:
    machine, _ = play(options, script)
    other = RerunMachine(options)
    other.restore(json.loads(json.dumps(machine.records())))
    assert sorted(other.records(), key=lambda one: int(one["step"])) == sorted(
        machine.records(), key=lambda one: int(one["step"])
    )
    for step in range(15):
        assert other.skips(step) == machine.skips(step)


def test_a_machine_that_forgets_what_it_tried_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Incident, "tried", lambda *_: False)
    machine = RerunMachine(RerunOptions(max_attempts=3))
    machine.handle(Started(DEVICES), 0.0)
    for _ in range(2):
        order = machine.handle(Found(3, "loss", "nan", (1,), means=Means(another_copy=True)), 0.0)
        assert order.remedy is Remedy.RERUN
        machine.handle(Started(DEVICES), 0.0)
    assert repeated(incidents(machine)[0]) == [(Remedy.RERUN, frozenset(DEVICES))]


class Case:
    """A machine on three devices, after a load."""

    def __init__(
        self,
        options: RerunOptions | None = None,
        loaded: Loaded | None = None,
        devices: tuple[str, ...] = DEVICES,
    ) -> None:
        self.options = options or RerunOptions()
        self.machine = RerunMachine(self.options)
        self.machine.handle(Started(devices), 0.0)
        self.machine.handle(loaded or Loaded(0), 0.0)

    def found(self, *ranks: int, step: int = 5, means: Means | None = None, at: float = 1.0) -> Order:
        digests = self.digests(ranks)
        return self.machine.handle(Found(step, "loss", "nan", ranks, digests, means or Means()), at)

    def reran(
        self,
        *ranks: int,
        others: tuple[int, ...] = (),
        differences: tuple[float, ...] = (),
        at: float = 2.0,
    ) -> Order:
        return self.machine.handle(Reran(ranks, self.digests(ranks, others), differences), at)

    def clean(self, others: tuple[int, ...] = (), at: float = 2.0) -> Order:
        """Run the step again twice, without a finding and with the same results."""
        order = self.reran(others=others, at=at)
        return self.reran(others=others, at=at) if order.remedy is Remedy.CONFIRM else order

    def digests(self, rejected: tuple[int, ...], others: tuple[int, ...] = ()) -> tuple[str, ...]:
        return tuple(
            f"{rank} bad" if rank in rejected else f"{rank} other" if rank in others else f"{rank}"
            for rank in range(len(self.machine.devices))
        )

    def restarted(self, *devices: str, loaded: Loaded | None = None) -> Order:
        """Go on in another process with what was written down."""
        records = json.loads(json.dumps(self.machine.records()))
        self.machine = RerunMachine(self.options)
        self.machine.restore(records)
        order = self.machine.handle(Started(devices or DEVICES), 3.0)
        self.machine.handle(loaded or Loaded(0), 3.0)
        return order

    @property
    def results(self) -> list[str]:
        """What was tried for the last incident, and what came of it."""
        return [f"{one['remedy']}: {one['result']}" for one in self.machine.records()[-1]["attempts"]]


def test_a_clean_rerun_is_gone_on_with() -> None:
    case = Case()
    assert case.found(1).remedy is Remedy.RERUN
    assert case.reran().remedy is Remedy.CONFIRM
    order = case.reran()
    assert (order.remedy, order.verdict, order.device) == (Remedy.CONTINUE, Verdict.TRANSIENT, "GPU-b")
    assert case.results == [
        "rerun the step: nothing was rejected",
        "rerun the step once more: nothing was rejected",
    ]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_clean_rerun_of_which_a_rank_does_not_repeat_its_result_tells_nothing(rank: int) -> None:
    case = Case()
    case.found(1)
    case.reran()
    order = case.reran(others=(rank,))
    assert (order.remedy, order.verdict, order.device) == (Remedy.CONTINUE, Verdict.INCONCLUSIVE, "")
    assert order.reason.startswith(f"the result of rank {rank} changed")


@pytest.mark.parametrize(
    ("rejected", "others", "verdict"),
    [
        ((1,), (), Verdict.PERSISTENT),
        ((1,), (0,), Verdict.INCONCLUSIVE),
        ((1, 2), (), Verdict.INCONCLUSIVE),
        ((2,), (), Verdict.INCONCLUSIVE),
    ],
)
def test_a_device_that_alone_takes_back_what_it_computed_is_convicted(
    rejected: tuple[int, ...], others: tuple[int, ...], verdict: Verdict
) -> None:
    case = Case()
    case.found(1)
    case.reran()
    order = case.reran(*rejected, others=others)
    device = "GPU-b" if verdict is Verdict.PERSISTENT else ""
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, verdict, device)


def test_differences_within_the_tolerance_are_none() -> None:
    for tolerance, verdict in ((0.0, Verdict.INCONCLUSIVE), (1e-3, Verdict.TRANSIENT)):
        case = Case(RerunOptions(tolerance=tolerance))
        case.found(1)
        order = case.reran(others=(0, 2), differences=(1e-3, math.inf, 1e-5))
        if tolerance:
            order = case.reran(others=(1,), differences=(0.0, 1e-3, 1e-3))
        assert order.verdict is verdict


def test_a_finding_that_no_rank_owns_is_attributed_to_the_rank_that_computed_something_else() -> None:
    case = Case()
    case.machine.handle(Found(5, "gradients", "nan", (), ("0", "1 bad", "2")), 1.0)
    order = case.clean()
    assert (order.verdict, order.device) == (Verdict.TRANSIENT, "GPU-b")


def test_a_finding_that_no_rank_owns_and_that_stays_convicts_nobody() -> None:
    case = Case()
    case.machine.handle(Found(5, "gradients", "nan", (), ("0", "1", "2"), Means({1: 2})), 1.0)
    order = case.reran(0, 1, 2)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, Verdict.INCONCLUSIVE, "")


def test_other_ranks_each_time_are_no_evidence_against_one() -> None:
    case = Case()
    case.found(1)
    order = case.reran(2)
    assert (order.remedy, order.verdict) == (Remedy.STOP, Verdict.INCONCLUSIVE)


def test_a_peer_on_the_same_device_is_none() -> None:
    machine = RerunMachine(RerunOptions())
    machine.handle(Started(("GPU-a", "GPU-a")), 0.0)
    machine.handle(Found(5, "loss", "nan", (1,), ("0", "1"), Means({1: 0})), 1.0)
    order = machine.handle(Reran((1,), ("0", "1")), 1.0)
    assert (order.remedy, order.verdict) == (Remedy.STOP, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("loaded", "remedy"),
    [
        (Loaded(0, "local", "p"), Remedy.LOAD_OLDER),
        (Loaded(0, "global", "p"), Remedy.SWAP),
        (Loaded(0), Remedy.SWAP),
    ],
)
def test_a_near_copy_is_suspected_before_a_device_unless_it_is_global(loaded: Loaded, remedy: Remedy) -> None:
    means = Means({1: 2}, another_copy=True)
    case = Case(loaded=loaded)
    case.found(1, means=means)
    assert case.reran(1).remedy is remedy
    case = Case(loaded=loaded)
    case.found(1, step=11, means=means)
    assert case.reran(1).remedy is Remedy.SWAP


def test_a_copy_without_another_one_is_not_asked_about() -> None:
    case = Case(loaded=Loaded(0, "local", "p"))
    case.found(1, means=Means({1: 2}))
    assert case.reran(1).remedy is Remedy.SWAP


@pytest.mark.parametrize(
    ("rejected", "verdict", "device"),
    [
        ((1,), Verdict.PERSISTENT, "GPU-b"),
        ((), Verdict.PERSISTENT, "GPU-b"),
        ((2,), Verdict.DATA_OR_MODEL, ""),
        ((1, 2), Verdict.DATA_OR_MODEL, ""),
    ],
)
def test_a_swap_tells_the_device_from_the_data(
    rejected: tuple[int, ...], verdict: Verdict, device: str
) -> None:
    case = Case()
    case.found(1, means=Means({1: 2}))
    assert case.reran(1).pairs == ((1, 2),)
    order = case.machine.handle(Swapped(rejected), 3.0)
    assert (order.remedy, order.verdict, order.device) == (Remedy.STOP, verdict, device)
    assert order.exit_code == (69 if device else 93)


def test_more_incidents_than_chance_allows_end_the_job() -> None:
    case = Case(RerunOptions(max_incidents_per_hour=2, max_transients_per_day=9))
    for step in (1, 2):
        case.found(1, step=step)
        assert case.clean().remedy is Remedy.CONTINUE
    order = case.found(1, step=3)
    assert order.remedy is Remedy.STOP
    assert "incidents in an hour" in order.reason
    later = case.machine.handle(Found(4, "loss", "nan", (1,)), 4000.0)
    assert later.remedy is Remedy.RERUN


def test_the_time_for_an_incident_is_bounded() -> None:
    case = Case(RerunOptions(max_incident_seconds=10.0))
    case.found(1, means=Means({1: 2}))
    order = case.machine.handle(Reran((1,), ("0", "1 bad", "2")), 100.0)
    assert (order.remedy, order.verdict) == (Remedy.STOP, Verdict.INCONCLUSIVE)


def test_a_batch_that_was_given_up_is_left_out_of_replays() -> None:
    case = Case(RerunOptions(rejected_action="skip_batch"))
    case.found(0, 1, 2)
    assert case.reran(0, 1, 2).remedy is Remedy.SKIP_BATCH
    machine = RerunMachine(RerunOptions())
    machine.restore(json.loads(json.dumps(case.machine.records())))
    assert [machine.skips(step) for step in (4, 5, 6)] == [False, True, False]


@pytest.mark.parametrize("mode", ["disabled", "report_determinism_stats"])
def test_without_validation_nothing_is_rerun(mode: str) -> None:
    case = Case(RerunOptions(rerun_mode=mode))
    assert case.found(1).remedy is Remedy.STOP


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
    case = Case()
    case.found(1)
    (good,) = case.machine.records()
    machine = RerunMachine(RerunOptions())
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        machine.restore([good, {**good, **damage}])
    assert machine.records() == ()


def test_a_record_that_lacks_a_field_is_refused() -> None:
    case = Case()
    case.found(1)
    (good,) = case.machine.records()
    for name in good:
        with pytest.raises(ValueError, match=name):
            RerunMachine(RerunOptions()).restore([{one: value for one, value in good.items() if one != name}])
