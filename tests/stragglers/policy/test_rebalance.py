"""From a slow rank to other shares and back: the watch, the agreement on a step, and the division."""

from __future__ import annotations

from textwrap import dedent

import pytest

from outlast.agreement.policy.steps import NodeCoordinator, RanksSeen, StepParticipant, TellRanks
from outlast.parallelism.policy.shares import Slow, shares, speeds_of
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, TimingReport
from outlast.stragglers.policy.options import StragglerOptions
from outlast.stragglers.policy.rows import LAST_MICRO_STEP, MICRO_STEP, Kind
from outlast.stragglers.policy.watch import Noticed, StragglerWatch
from tests.simulation.ranks import Rank
from tests.stragglers.policy.builders import words

WORLD, MICRO_BATCHES, WINDOW = 4, 28, 4


class Job:
    """Ranks that train; rank 2, or the last, takes ``slow`` times as long for a micro-batch.

    ``loading``: seconds of each micro-batch. ``late``: seconds of a step that rank 1 spends in no section.
    """

    loading = late = 0.0

    def __init__(
        self, action: str, section: str = "", world: int = WORLD, micro_batches: int = MICRO_BATCHES
    ) -> None:
        self.world, self.micro_batches = world, micro_batches
        self.options = StragglerOptions(action=action, window=WINDOW)
        self.begin()
        self.coordinator = NodeCoordinator()
        self.ranks = [Rank(number, StepParticipant()) for number in range(world)]
        for rank in self.ranks:
            rank.begin(1)
        self.shares = shares(micro_batches, 1, world)
        self.section = section
        self.said: list[str] = []

    def begin(self) -> None:
        """Compare the ranks anew, as another leader does."""
        self.watch = StragglerWatch(self.options, lambda *_: ())
        self.watch.begin(1, {"a": range(self.world)})

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
                self.shares = shares(self.micro_batches, 1, speeds_of(self.world, said.slow))
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
        """Report a window; each rank waits in its last micro-step for the latest one."""
        parts: list[dict[str, tuple[int, float]]] = []
        for rank, share in enumerate(self.shares):
            each = 0.1 * (slow if rank == min(2, self.world - 1) else 1.0)
            micro = {MICRO_STEP: (share - 1, each), LAST_MICRO_STEP: (1, each)}
            known = {self.section: (1, each)} if self.section else micro
            parts.append({**known, "step": (1, 0.01), "data": (1, self.loading * share)})
        busy = [sum(count * each for count, each in one.values()) for one in parts]
        latest = max(one + (self.late if rank == 1 else 0.0) for rank, one in enumerate(busy))
        windows = []
        for rank in range(self.world):
            waits = max(0.0, latest - busy[rank] - (self.late if rank == 1 else 0.0))
            times = [
                self._times(section, count, each, waits if section == LAST_MICRO_STEP else 0.0)
                for section, (count, each) in parts[rank].items()
                if count
            ]
            windows.append(RankWindow(rank, step // WINDOW, tuple(times)))
        for one in self.watch.take(TimingReport(1, tuple(windows)), float(step)):
            if isinstance(one, Noticed):
                verdict = one.verdict
                self.said.append(
                    f"step {step}: rank {verdict.rank} {verdict.state.value} {verdict.slowdown:.2f}"
                    f" in {verdict.section or 'no section'}"
                )
                self.reason = words(verdict)
        self.coordinator.rebalance(self.watch.slow)
        self.look()

    def _times(self, section: str, count: int, each: float, waits: float) -> SectionTimes:
        entries, waiting = count * WINDOW, waits * WINDOW
        kind = Kind.DATA if section == "data" else Kind.COMPUTE
        return SectionTimes(section, kind, entries, each, each, each, each * entries + waiting, waiting)


def test_shares_follow_the_verdict_and_return() -> None:
    job = Job("rebalance")
    job.train(40, slow=1.0)
    assert job.said == []
    job.train(80, slow=2.0)
    job.train(80, slow=1.0)
    assert "\n".join(job.said) + "\n" == dedent("""\
        step 60: rank 2 on 2.00 in last-micro-step
        step 60: rank 2 on 2.00 in micro-step
        step 60: proposed for step 62: ((2, 500),)
        step 61: committed for step 62: ((2, 500),)
        step 62: ranks act, shares (8, 8, 4, 8)
        step 128: proposed for step 130: ((2, 625),)
        step 129: committed for step 130: ((2, 625),)
        step 130: ranks act, shares (8, 8, 5, 7)
        step 136: proposed for step 138: ((2, 833),)
        step 137: committed for step 138: ((2, 833),)
        step 138: ranks act, shares (8, 7, 6, 7)
        step 140: rank 2 off 1.00 in last-micro-step
        step 140: rank 2 off 1.00 in micro-step
        step 140: proposed for step 142: ()
        step 141: committed for step 142: ()
        step 142: ranks act, shares (7, 7, 7, 7)
        """)


def test_shares_follow_a_rank_that_becomes_slower_and_not_its_noise() -> None:
    job = Job("rebalance")
    job.train(80, slow=2.0)
    job.train(40, slow=2.1)
    assert job.watch.slow == ((2, 500),)
    job.train(80, slow=4.0)
    assert job.watch.slow[0][1] < 300
    assert job.shares == (9, 9, 2, 8)


def resumed(shares: Slow) -> Job:
    """Return a job with a slow rank whose times are compared by another leader from step 80 on."""
    job = Job("rebalance")
    job.train(80, slow=2.0)
    assert job.shares == (8, 8, 4, 8)
    job.said.clear()
    job.begin()
    job.watch.resume(shares, 80.0)
    assert job.watch.slow == ((2, 500),)
    return job


def test_another_leader_goes_on_with_a_finding_until_the_rank_is_fast_again() -> None:
    job = resumed(((2, 500), (WORLD, 250)))
    job.train(80, slow=2.0)
    assert job.said == [], "the verdict was told before"
    job.watch.resume(((1, 300),), 160.0)  # shares are learned once
    job.train(24, slow=1.0)
    assert "\n".join(job.said) + "\n" == dedent("""\
        step 164: proposed for step 166: ((2, 600),)
        step 165: committed for step 166: ((2, 600),)
        step 166: ranks act, shares (8, 8, 4, 8)
        step 168: proposed for step 170: ((2, 750),)
        step 169: committed for step 170: ((2, 750),)
        step 170: ranks act, shares (8, 8, 5, 7)
        step 172: rank 2 off 1.00 in last-micro-step
        step 172: rank 2 off 1.00 in micro-step
        step 172: proposed for step 174: ()
        step 173: committed for step 174: ()
        step 174: ranks act, shares (7, 7, 7, 7)
        """)


def test_a_finding_of_another_leader_ends_with_times_that_deny_it_or_without_times() -> None:
    job = resumed(((2, 500),))
    job.train(8, slow=1.0)
    assert job.said[0] == "step 84: rank 2 off 1.00 in last-micro-step"
    assert (job.watch.slow, job.shares) == ((), (7, 7, 7, 7))
    job = resumed(((2, 500),))
    job.section = "forward"
    job.train(9 * WINDOW, slow=1.0)
    assert job.watch.slow == ((2, 500),)
    job.train(WINDOW, slow=1.0)
    assert job.watch.slow == ()
    assert {"'last-micro-step'", "10"} <= job.reason


@pytest.mark.parametrize(("action", "section"), [("log", ""), ("stop", ""), ("rebalance", "forward")])
def test_shares_stay_with_other_actions_and_where_the_script_has_its_own(action: str, section: str) -> None:
    job = Job(action, section)
    job.train(80, slow=2.0)
    assert job.shares == (7, 7, 7, 7)
    assert ("outlast.Batches" in job.reason) is bool(section)


@pytest.mark.parametrize(("world", "micro_batches"), [(4, 5), (2, 3), (3, 4), (4, 6), (8, 9)])
@pytest.mark.parametrize(("action", "loading"), [("stop", 0.0), ("rebalance", 0.0), ("stop", 0.2)])
def test_a_rank_that_computes_or_loads_more_micro_batches_is_no_straggler(
    world: int, micro_batches: int, action: str, loading: float
) -> None:
    job = Job(action, world=world, micro_batches=micro_batches)
    job.loading = loading
    job.train(400, slow=1.0)
    assert job.said == []
    assert job.watch.wanted(0.0) is None


def test_a_rank_that_is_late_is_named_though_it_has_fewer_micro_batches() -> None:
    job = Job("stop", world=4, micro_batches=17)
    assert job.shares == (5, 4, 4, 4)
    job.train(200, slow=1.0)
    job.late = 0.3  # rank 0 waits for it, too, though it has a micro-batch more
    job.train(200, slow=1.0)
    assert [line.split(" ", 2)[2] for line in job.said] == ["rank 1 on 1.43 in no section"]


@pytest.mark.parametrize(
    ("world", "micro_batches"), [(2, 4), (2, 3), (3, 6), (4, 8), (4, 4), (8, 36), (2, 8)]
)
def test_shares_settle_and_no_other_rank_is_named(world: int, micro_batches: int) -> None:
    job = Job("rebalance", world=world, micro_batches=micro_batches)
    job.train(1600, slow=2.0)
    assert sum("ranks act" in line for line in job.said) == 1, job.said
    assert {line.split()[3] for line in job.said if " on " in line} == {str(min(2, world - 1))}
    assert min(job.shares) == job.shares[min(2, world - 1)]
