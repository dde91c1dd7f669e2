"""What a leader does about a slow node: nothing without a second sign, and nothing before a save."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.cluster.policy.events import (
    Heartbeat,
    Judged,
    LeadOutcome,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    Rejected,
    Timed,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import JobSpec, Joined, Left, Member
from outlast.cluster.policy.messages import MESSAGES, NodeStatus
from outlast.config import FaultToleranceOptions
from outlast.errors import ExitCode
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import AllStarted, CommitSeen, OwnCheckpoint
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import BENCHMARK, Kind
from outlast.stragglers.policy.watch import Noticed

NAMES, SLOTS = ("n0", "n1"), 2
CRASH = Fault(FaultKind.CRASH, "n1", 2, 1, 5, "rank 2 was terminated by signal 11", "signal 11")


class Job:
    """Two nodes with two ranks each, and spares; the test says what happens."""

    def __init__(self, action: str, spares: int = 1, most: int = 2) -> None:
        terms = JobSpec("run", "1", "", SLOTS, 2, most, spares)
        self.lead = JobController(terms, FaultToleranceOptions(), 0.0, 0.0, StragglerOptions(action=action))
        self.nodes = (*NAMES, *(f"n{2 + one}" for one in range(spares)))
        self.generation, self.now, self.window = 1, 0.0, 0
        for name in self.nodes:
            member = Member(name, f"{name}:1", SLOTS, "run", "1", "", incarnation="1")
            self.lead.handle(Joined(member), 0.0)
            self.lead.handle(Heartbeat(name, "1", NodeStatus(5001), 0), 0.0)
        self.lead.tick(terms.grace)
        self.started()

    def started(self) -> None:
        for name in NAMES:
            self.tell(name, AllStarted(self.generation))

    def tell(self, node: str, event: AllStarted | CommitSeen | OwnCheckpoint | Fault) -> list[LeadOutcome]:
        self.now += 1.0
        return self.lead.handle(NodeEvent(node, self.generation, event), self.now)

    def crashed(self) -> None:
        self.tell("n1", CRASH)
        self.generation += 1
        self.now += 5.0
        self.lead.tick(self.now)
        for name in self.nodes:
            self.lead.handle(Heartbeat(name, "1", NodeStatus(5002), 1), self.now)
        self.started()

    def trained(self, windows: int, slow: float = 1.0) -> list[Noticed]:
        """Report windows in which rank 2, of n1, takes so many times as long."""
        found: list[LeadOutcome] = []
        for _ in range(windows):
            self.window += 1
            for at, name in enumerate(NAMES):
                ranks = range(at * SLOTS, at * SLOTS + SLOTS)
                said = TimingReport(self.generation, tuple(self._times(rank, slow) for rank in ranks))
                report = MESSAGES.read(MESSAGES.write(said))
                assert isinstance(report, TimingReport)
                self.now += 0.1
                found += self.lead.handle(Timed(name, report), self.now)
        return [one for one in found if isinstance(one, Noticed)]

    def _times(self, rank: int, slow: float) -> RankWindow:
        each = 0.1 * (slow if rank == 2 else 1.0)
        section = SectionTimes("step", Kind.COMPUTE, 4, each, each, each, 4 * each, 0.0)
        return RankWindow(rank, self.window, (section,))

    def computed(self, slow: float = 1.0) -> None:
        """Report what ranks took for the product; those of n1 take so many times as long."""
        self.window += 1
        for at, name in enumerate(NAMES):
            windows = []
            for rank in range(at * SLOTS, at * SLOTS + SLOTS):
                one = 0.01 * (slow if at else 1.0)
                section = SectionTimes(BENCHMARK, Kind.COMPUTE, 50, one, one, one, 50 * one, 0.0)
                known = self._times(rank, 2.0)
                windows.append(replace(known, sections=(*known.sections, section)))
            self.lead.handle(Timed(name, TimingReport(self.generation, tuple(windows))), self.now)


def actions(outcomes: Iterable[LeadOutcome]) -> list[RecoveryAction]:
    return [one.action.kind for one in outcomes if isinstance(one, Judged)]


@pytest.mark.parametrize("save", [CommitSeen(40, "step-000000040.g2"), OwnCheckpoint(40)])
def test_a_slow_node_with_a_fault_of_its_own_is_replaced_after_a_save(
    save: CommitSeen | OwnCheckpoint,
) -> None:
    job = Job("replace")
    job.crashed()
    job.trained(20)
    (noticed,) = job.trained(20, slow=2.0)
    assert (noticed.verdict.rank, noticed.verdict.node) == (2, "n1")
    said = job.tell("n0", save)
    assert actions(said) == [RecoveryAction.REPLACE_NODE]
    (asked,) = (one for one in said if isinstance(one, QuiesceNodes))
    assert asked.order.generation == 3
    assert [one.name for one in said if isinstance(one, Rejected)] == ["n1"]


@pytest.mark.parametrize("action", ["replace", "log"])
def test_slowness_alone_replaces_nothing(action: str) -> None:
    job = Job(action)
    job.trained(20)
    assert job.trained(20, slow=2.0)
    assert actions(job.tell("n0", CommitSeen(40, "step-000000040.g1"))) == []


def test_a_slow_node_that_computes_a_product_slowly_is_replaced_after_a_save() -> None:
    job = Job("replace")
    job.trained(20)
    assert job.lead.asks_benchmark(job.now) == "", "no rank is slow"
    job.trained(20, slow=2.0)
    assert job.lead.asks_benchmark(job.now).startswith("rank 2 on n1 is slow, and no second sign says that")
    assert job.lead.asks_benchmark(job.now) == "", "it was asked for"
    assert actions(job.tell("n0", CommitSeen(40, "step-000000040.g1"))) == []
    job.computed(slow=2.0)
    assert job.lead.asks_benchmark(job.now + 1000.0) == "", "there is a second sign"
    said = job.tell("n0", CommitSeen(60, "step-000000060.g1"))
    assert actions(said) == [RecoveryAction.REPLACE_NODE]
    (judged,) = (one for one in said if isinstance(one, Judged))
    assert "second sign: it takes 2.00 times as long as 2 ranks of other nodes" in judged.action.reason


def test_a_slow_node_that_computes_a_product_as_fast_as_others_stays() -> None:
    job = Job("replace")
    job.trained(20)
    job.trained(20, slow=2.0)
    job.computed()
    assert actions(job.tell("n0", CommitSeen(60, "step-000000060.g1"))) == []
    assert job.lead.asks_benchmark(job.now + 1000.0)


@pytest.mark.parametrize("action", ["log", "stop", "rebalance"])
def test_other_actions_ask_for_no_product(action: str) -> None:
    job = Job(action)
    job.trained(20)
    assert job.trained(20, slow=2.0)
    assert job.lead.asks_benchmark(job.now) == ""


def test_a_node_with_a_fault_of_its_own_needs_no_product() -> None:
    job = Job("replace")
    job.crashed()
    job.trained(20)
    assert job.trained(20, slow=2.0)
    assert job.lead.asks_benchmark(job.now) == ""


def test_a_healthy_node_with_a_fault_is_not_replaced() -> None:
    job = Job("replace")
    job.crashed()
    assert job.trained(40) == []
    assert actions(job.tell("n0", CommitSeen(40, "step-000000040.g2"))) == []


def test_a_fault_of_more_than_a_day_ago_is_no_second_sign() -> None:
    job = Job("replace")
    job.crashed()
    job.now += 90_000.0
    job.trained(20)
    assert job.trained(20, slow=2.0)
    assert job.lead.asks_benchmark(job.now).startswith("rank 2 on n1 is slow, and no second sign says that")
    assert actions(job.tell("n0", CommitSeen(40, "step-000000040.g2"))) == []


def test_a_spare_that_is_about_to_fail_takes_no_place_of_a_slow_node() -> None:
    job = Job("replace")
    job.crashed()
    job.trained(20)
    assert job.trained(20, slow=2.0)
    job.lead.handle(Heartbeat("n2", "1", NodeStatus(5002, at_risk="GPU 0: XID 79"), 0), job.now)
    assert actions(job.tell("n0", CommitSeen(40, "step-000000040.g2"))) == []
    job.lead.handle(Heartbeat("n2", "1", NodeStatus(5002), 0), job.now)
    assert actions(job.tell("n0", CommitSeen(60, "step-000000060.g2"))) == [RecoveryAction.REPLACE_NODE]


@pytest.mark.parametrize(("models", "peers"), [(("H100", "A100"), 1), (("H100", "H100"), 3)])
def test_ranks_are_compared_with_those_that_have_devices_of_the_same_model(
    models: tuple[str, str], peers: int
) -> None:
    job = Job("log")
    for name, device in zip(NAMES, models, strict=True):
        job.lead.handle(Heartbeat(name, "1", NodeStatus(5001, device=device), 0), 0.0)
    job.trained(20)
    (noticed,) = job.trained(20, slow=2.0)
    assert f"as its {peers} peer" in noticed.verdict.reason


def test_what_was_measured_counts_on_when_a_spare_says_what_devices_it_has() -> None:
    job = Job("log")
    job.trained(20)
    assert job.trained(2, slow=2.0) == []
    job.lead.handle(Heartbeat("n2", "1", NodeStatus(5002, device="H100"), 0), job.now)
    assert job.trained(2, slow=2.0)


def test_a_node_that_came_and_went_hides_no_slow_rank() -> None:
    job = Job("stop", spares=0, most=3)
    member = Member("n2", "n2:1", SLOTS, "run", "1", "", incarnation="1")
    job.lead.handle(Joined(member), job.now)
    job.lead.handle(Left("n2", "gone"), job.now)
    job.trained(20)
    assert job.trained(20, slow=2.0)
    job.tell("n0", CommitSeen(40, "step-000000040.g1"))
    assert job.lead.ending is not None
    assert job.lead.ending.exit_code == ExitCode.NODE_UNFIT


def test_a_job_without_a_spare_goes_on() -> None:
    job = Job("replace", spares=0)
    job.crashed()
    job.trained(20)
    assert job.trained(20, slow=2.0)
    assert actions(job.tell("n0", CommitSeen(40, "step-000000040.g2"))) == []


@pytest.mark.parametrize("save", [CommitSeen(40, "step-000000040.g1"), OwnCheckpoint(40)])
def test_a_job_that_is_to_stop_for_a_slow_rank_ends_after_a_save(save: CommitSeen | OwnCheckpoint) -> None:
    job = Job("stop")
    job.trained(20)
    assert job.trained(20, slow=2.0)
    said = job.tell("n0", save)
    (proposal,) = (one for one in said if isinstance(one, Proposal))
    assert proposal.plan.end is not None
    assert proposal.plan.end.exit_code == ExitCode.NODE_UNFIT
    assert "rank 2 on n1" in proposal.plan.end.reason


def test_a_report_of_an_older_generation_is_ignored() -> None:
    job = Job("log")
    job.trained(20)
    before, job.generation = job.generation, 7
    assert job.trained(20, slow=2.0) == []
    job.generation = before
