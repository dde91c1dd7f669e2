"""From a slow rank to other shares and back: the watch, the agreement on a step, and the division."""

from __future__ import annotations

from textwrap import dedent

import pytest

from outlast.agreement.policy.steps import NodeCoordinator, RanksSeen, StepParticipant, TellRanks
from outlast.parallelism.policy.shares import shares, speeds_of
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import Kind
from outlast.stragglers.policy.watch import MICRO_STEP, Noticed, StragglerWatch
from tests.simulation.ranks import Rank

WORLD, MICRO_BATCHES, WINDOW = 4, 28, 4


class Job:
    """Four ranks that train; rank 2 takes ``slow`` times as long for a micro-batch."""

    def __init__(self, action: str, section: str = MICRO_STEP) -> None:
        self.watch = StragglerWatch(StragglerOptions(action=action, window=WINDOW), lambda *_: ())
        self.watch.begin(1, {"a": range(WORLD)})
        self.coordinator = NodeCoordinator()
        self.ranks = [Rank(number, StepParticipant()) for number in range(WORLD)]
        for rank in self.ranks:
            rank.begin(1)
        self.shares = shares(MICRO_BATCHES, 1, WORLD)
        self.section = section
        self.said: list[str] = []

    def train(self, steps: int, slow: float) -> None:
        """Do steps, all ranks at the same pace."""
        for _ in range(steps):
            for rank in self.ranks:
                rank.completed += 1
            step = self.ranks[0].completed
            before = [len(rank.acts) for rank in self.ranks]
            for _ in range(3):  # a rank that waits for the decision looks again
                for rank in self.ranks:
                    if rank.left < rank.completed:
                        rank.look()
                self.look()
            acted = [len(rank.acts) > count for rank, count in zip(self.ranks, before, strict=True)]
            assert len(set(acted)) == 1, "all ranks or none"
            if acted[0]:
                said = self.ranks[0].said
                assert said is not None
                self.shares = shares(MICRO_BATCHES, 1, speeds_of(WORLD, said.slow))
                self.said.append(f"step {step}: ranks act, shares {self.shares}")
            if step % WINDOW == 0:
                self.report(step, slow)

    def look(self) -> None:
        seen = RanksSeen(1, tuple(rank.status() for rank in self.ranks))
        for told in self.coordinator.look(seen):
            self.hear(told)

    def hear(self, told: TellRanks) -> None:
        said = told.said
        self.said.append(
            f"step {self.ranks[0].completed}: {said.stage.name.lower()} for step {said.step}: {said.slow}"
        )
        for rank in self.ranks:
            rank.said = said

    def report(self, step: int, slow: float) -> None:
        windows = []
        for rank in range(WORLD):
            each, count = 0.1 * (slow if rank == 2 else 1.0), (self.shares[rank] - 1) * WINDOW
            total = each * count
            times = SectionTimes(self.section, Kind.COMPUTE, count, each, each, each, total, 0.0)
            windows.append(RankWindow(rank, step // WINDOW, (times,)))
        for one in self.watch.take(TimingReport(1, tuple(windows)), float(step)):
            if isinstance(one, Noticed):
                verdict = one.verdict
                self.said.append(
                    f"step {step}: rank {verdict.rank} {verdict.state.value} {verdict.slowdown:.2f}"
                )
                self.reason = verdict.reason
        self.coordinator.rebalance(self.watch.slow)
        self.look()


def test_shares_follow_the_verdict_and_return() -> None:
    job = Job("rebalance")
    job.train(40, slow=1.0)
    assert job.said == []
    job.train(80, slow=2.0)
    job.train(80, slow=1.0)
    assert "\n".join(job.said) + "\n" == dedent("""\
        step 56: rank 2 on 2.00
        step 56: proposed for step 58: ((2, 500),)
        step 57: committed for step 58: ((2, 500),)
        step 58: ranks act, shares (8, 8, 4, 8)
        step 128: proposed for step 130: ((2, 667),)
        step 129: committed for step 130: ((2, 667),)
        step 130: ranks act, shares (8, 8, 5, 7)
        step 132: proposed for step 134: ((2, 800),)
        step 133: committed for step 134: ((2, 800),)
        step 134: ranks act, shares (8, 7, 6, 7)
        step 136: rank 2 off 1.00
        step 136: proposed for step 138: ()
        step 137: committed for step 138: ()
        step 138: ranks act, shares (7, 7, 7, 7)
        """)


def test_shares_follow_a_rank_that_becomes_slower_and_not_its_noise() -> None:
    job = Job("rebalance")
    job.train(80, slow=2.0)
    job.train(40, slow=2.1)
    assert job.watch.slow == ((2, 500),)
    job.train(80, slow=4.0)
    assert job.watch.slow[0][1] < 300
    assert job.shares == (9, 9, 2, 8)


@pytest.mark.parametrize("action", ["log", "stop"])
def test_other_actions_leave_the_shares(action: str) -> None:
    job = Job(action)
    job.train(80, slow=2.0)
    assert job.shares == (7, 7, 7, 7)


def test_a_script_with_shares_of_its_own_is_told_so() -> None:
    job = Job("rebalance", section="forward")
    job.train(80, slow=2.0)
    assert job.shares == (7, 7, 7, 7)
    assert "does not measure them with outlast.Batches" in job.reason
