"""What a leader does about a slow node: nothing without a second sign, and nothing before a save."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from outlast.cluster.policy.events import Timed
from outlast.cluster.policy.messages import MESSAGES
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import BENCHMARK, Kind, State
from outlast.stragglers.policy.watch import Noticed
from tests.cluster.builders import Job, decided, of_kind, only, spec

NAMES = ("n0", "n1")
REPLACED = ["replace-node n1", "ends n0 n1 n2 for 2", "excludes n1"]
SAVES = ["saved n0 40", "own n0 40"]


class Training(Job):
    """Two nodes with two ranks each, and spares; the test says what they measured."""

    def __init__(self, action: str, spares: int = 1, crashed: bool = False) -> None:
        super().__init__(spec(2, 2, spares, slots=2), stragglers=StragglerOptions(action=action))
        self.now, self.window = 1.0, 0
        if crashed:  # n1 has had a fault of its own
            self.does("crash n1")
            self.does("answers")
            self.does("started n0 n1")

    def does(self, line: str) -> list[str]:
        """Let something happen; return what is decided."""
        self.now += 1.0
        what, *words = line.split()
        return list(filter(None, map(decided, self.happens(self.now, what, words))))

    def trained(self, windows: int = 20, slow: float = 1.0) -> list[Noticed]:
        """Report windows in which rank 2, of n1, takes so many times as long."""
        found: list[Any] = []
        for _ in range(windows):
            self.window += 1
            self.now += 0.2
            for at, name in enumerate(NAMES):
                ranks = tuple(self._times(rank, slow) for rank in (2 * at, 2 * at + 1))
                report = MESSAGES.read(MESSAGES.write(TimingReport(self.lead.generation, ranks)))
                assert isinstance(report, TimingReport)
                found += self.lead.handle(Timed(name, report), self.now)
        return of_kind(Noticed, found)

    def _times(self, rank: int, slow: float) -> RankWindow:
        each = 0.1 * (slow if rank == 2 else 1.0)
        section = SectionTimes("step", Kind.COMPUTE, 4, each, each, each, 4 * each, 0.0)
        return RankWindow(rank, self.window, (section,))

    def computed(self, slow: float = 1.0) -> None:
        """Report what ranks took for the product; those of n1 take so many times as long."""
        self.window += 1
        for at, name in enumerate(NAMES):
            one = 0.01 * (slow if at else 1.0)
            product = SectionTimes(BENCHMARK, Kind.COMPUTE, 50, one, one, one, 50 * one, 0.0)
            known = [self._times(rank, 2.0) for rank in (2 * at, 2 * at + 1)]
            windows = tuple(replace(each, sections=(*each.sections, product)) for each in known)
            self.lead.handle(Timed(name, TimingReport(self.lead.generation, windows)), self.now)


Times = Callable[[int, int], Mapping[str, float]]  # of a rank in a window: seconds of an entry, by section


def named(ranks: int, times: Times, windows: int = 40) -> set[int]:
    """Return the ranks that a leader names, each of which has a node."""
    job, found = Job(spec(ranks, ranks)), []
    for window in range(1, windows + 1):
        for rank in range(ranks):
            sections = tuple(
                SectionTimes(name, Kind.COMPUTE, 4, each, each, each, 4 * each, 0.0)
                for name, each in times(rank, window).items()
            )
            report = TimingReport(job.lead.generation, (RankWindow(rank, window, sections),))
            found += job.lead.handle(Timed(f"n{rank}", report), 1.0 + 0.5 * window)
    return {one.verdict.rank for one in of_kind(Noticed, found) if one.verdict.state is State.ON}


def slow(action: str, **given: Any) -> Training:
    """Return a job in which rank 2 has become slow, which was noticed."""
    job = Training(action, **given)
    job.trained()
    noticed = only(Noticed, job.trained(slow=2.0))
    assert (noticed.verdict.rank, noticed.verdict.node) == (2, "n1")
    return job


@pytest.mark.parametrize("save", SAVES)
def test_a_slow_node_with_a_fault_of_its_own_is_replaced_after_a_save(save: str) -> None:
    job = slow("replace", crashed=True)
    assert job.lead.asks_benchmark(job.now) == "", "there is a second sign"
    assert job.does(save) == ["saved 40", "replace-node n1", "ends n0 n1 n2 for 3", "excludes n1"]


@pytest.mark.parametrize("save", SAVES)
def test_a_job_that_is_to_stop_for_a_slow_rank_ends_after_a_save(save: str) -> None:
    assert slow("stop").does(save)[-1] == "over 69"


@pytest.mark.parametrize(
    ("action", "given"),
    [
        ("replace", {}),
        ("log", {"crashed": True}),
        ("rebalance", {}),
        ("replace", {"crashed": True, "spares": 0}),
    ],
    ids=["slowness alone", "log", "rebalance", "no spare"],
)
def test_a_slow_node_stays(action: str, given: dict[str, Any]) -> None:
    assert slow(action, **given).does("saved n0 40") == ["saved 40"]


def test_a_healthy_node_with_a_fault_stays() -> None:
    job = Training("replace", crashed=True)
    assert job.trained(40) == []
    assert job.does("saved n0 40") == ["saved 40"]


def test_a_slow_node_is_asked_for_a_product_once_and_replaced_if_it_is_slow_at_that() -> None:
    job = Training("replace")
    job.trained()
    assert job.lead.asks_benchmark(job.now) == "", "no rank is slow"
    job.trained(slow=2.0)
    asks = job.lead.asks_benchmark(job.now)
    assert "2" in asks
    assert "n1" in asks
    assert job.lead.asks_benchmark(job.now) == "", "it was asked for"
    job.computed(slow=2.0)
    assert job.lead.asks_benchmark(job.now + 1000.0) == "", "there is a second sign"
    assert job.does("saved n0 60") == ["saved 60", *REPLACED]


def test_a_slow_node_that_computes_a_product_as_fast_as_others_stays() -> None:
    job = slow("replace")
    job.computed()
    assert job.does("saved n0 60") == ["saved 60"]
    assert job.lead.asks_benchmark(job.now + 1000.0)


@pytest.mark.parametrize("action", ["log", "stop", "rebalance"])
def test_other_actions_ask_for_no_product(action: str) -> None:
    job = slow(action)
    assert job.lead.asks_benchmark(job.now) == ""


def test_a_fault_of_more_than_a_day_ago_is_no_second_sign() -> None:
    job = Training("replace", crashed=True)
    job.now += 90_000.0
    job.trained()
    job.trained(slow=2.0)
    assert job.lead.asks_benchmark(job.now)
    assert job.does("saved n0 40") == ["saved 40"]


def test_a_spare_that_is_about_to_fail_takes_no_place_of_a_slow_node() -> None:
    job = slow("replace", crashed=True)
    job.does("beat n2 risk=XID")
    assert job.does("saved n0 40") == ["saved 40"]
    job.does("beat n2")
    assert job.does("saved n0 60")[1] == "replace-node n1"


@pytest.mark.parametrize(("models", "peers"), [(("H100", "A100"), 1), (("H100", "H100"), 3)])
def test_ranks_are_compared_with_those_that_have_devices_of_the_same_model(
    models: tuple[str, str], peers: int
) -> None:
    job = Training("log")
    for name, device in zip(NAMES, models, strict=True):
        job.does(f"beat {name} device={device}")
    job.trained()
    assert f" {peers} " in only(Noticed, job.trained(slow=2.0)).verdict.reason


def test_what_was_measured_counts_on_when_a_spare_says_what_devices_it_has() -> None:
    job = Training("log")
    job.trained()
    assert job.trained(2, slow=2.0) == []
    job.does("beat n2 device=H100")
    assert job.trained(2, slow=2.0)


def test_a_node_that_came_and_went_hides_no_slow_rank() -> None:
    job = Training("stop")
    job.does("left n2")
    job.trained()
    job.trained(slow=2.0)
    assert job.does("saved n0 40")[-1] == "over 69"


def test_a_report_of_an_older_generation_is_ignored() -> None:
    job = Training("log")
    job.trained()
    job.does("crash n1")
    generation = job.lead.generation
    job.does("answers")
    assert generation == 2
    job.lead.handle(Timed("n1", TimingReport(1, (job._times(2, 50.0),))), job.now)
    assert job.trained() == []


def test_a_report_before_the_first_generation_is_ignored() -> None:
    job = Job(started=False)
    assert job.lead.handle(Timed("n0", TimingReport(0, ())), 0.0) == []


@pytest.mark.parametrize(("extra", "expected"), [(0.003, set()), (0.03, {2})])
def test_a_few_milliseconds_of_a_section_in_which_others_take_no_time_are_no_slowness(
    extra: float, expected: set[int]
) -> None:
    assert named(4, lambda rank, _: {"step": 0.1, "own": extra if rank == 2 else 0.0}) == expected


def test_two_of_three_ranks_are_not_slow_because_the_third_has_less_to_do() -> None:
    assert named(3, lambda rank, _: {"step": 0.16 if rank else 0.1}) == set()


def lasting(seed: int) -> Times:
    """Return the times of healthy ranks whose noise lasts for some windows."""
    noise, dice = dict.fromkeys(range(8), 0.0), random.Random(seed)

    def times(rank: int, _: int) -> Mapping[str, float]:
        noise[rank] = 0.8 * noise[rank] + dice.gauss(0.0, 0.06)
        return {"step": 0.1 * (1.0 + max(-0.9, noise[rank]))}

    return times


@pytest.mark.parametrize("seed", [6, 8])
def test_noise_that_lasts_for_some_windows_names_no_rank(seed: int) -> None:
    assert named(8, lasting(seed), windows=200) == set()
