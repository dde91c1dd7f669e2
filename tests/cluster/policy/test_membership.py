"""Which nodes a generation runs on: single answers, and what holds over all histories."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.policy.codec import Codec
from outlast.cluster.policy.members import (
    Decision,
    Event,
    GrowthWanted,
    Heard,
    JobSpec,
    Joined,
    Left,
    Lost,
    Member,
    MembershipState,
    Plan,
    Probe,
    Refused,
    RestartOrdered,
    Role,
    SafeStep,
    TakenIn,
    TooFew,
    Unchanged,
    Unfit,
    Waits,
)
from outlast.cluster.policy.membership import Membership, Phase
from outlast.cluster.policy.rank_assignment import natural, seats
from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout


def terms(least: int = 2, most: int = 3, spares: int = 1, group_size: int = 1) -> JobSpec:
    return JobSpec("run", "1.0", "spares=1", 4, least, most, spares, group_size)


def member(name: str, **other: object) -> Member:
    return replace(Member(name, f"{name}:1", 4, "run", "1.0", "spares=1"), **other)  # type: ignore[arg-type]


def plans(decisions: tuple[Decision, ...]) -> list[Plan]:
    return [one for one in decisions if isinstance(one, Plan)]


def begun(wanted: JobSpec, *names: str) -> Membership:
    membership = Membership(wanted, 0.0)
    for name in names:
        membership.handle(Joined(member(name)), 0.0)
    return membership


def ordered(membership: Membership, now: float, *answering: str) -> list[Plan]:
    ended = membership.generation
    found = list(membership.handle(RestartOrdered(ended, ended + 1, "an error"), now))
    for name in answering:
        found += membership.handle(Heard(name), now)
    return plans(tuple(found))


def test_a_full_membership_starts_at_once_and_a_partial_one_after_the_grace() -> None:
    membership = begun(terms(), "n0", "n1")
    assert plans(membership.tick(0.1)) == []
    (plan,) = plans(membership.handle(Joined(member("n2")), 0.2))
    assert plan.nodes == ("n0", "n1", "n2")
    assert plan.world_size == 12
    assert [next(iter(seat.ranks)) for seat in plan.seats] == [0, 4, 8]
    assert plan.master == "n0"
    partial = begun(replace(terms(), grace=3.0), "n0", "n1")
    assert plans(partial.tick(2.9)) == []
    assert plans(partial.tick(3.0))[0].nodes == ("n0", "n1")


def test_the_grace_begins_when_the_nodes_that_are_needed_are_there() -> None:
    """As torchrun's last_call_timeout: a node that starts slowly does not make another one late."""
    wanted = replace(terms(), grace=3.0)
    late = begun(wanted, "n0")
    assert plans(late.tick(10.0)) == plans(late.handle(Joined(member("n1")), 10.0)) == []
    assert plans(late.handle(Joined(member("n2")), 11.0))[0].nodes == ("n0", "n1", "n2")
    again = begun(wanted, "n0", "n1")
    again.handle(Left("n1", "it ended"), 2.0)
    again.handle(Joined(member("n2")), 4.0)
    assert plans(again.tick(6.9)) == []
    assert plans(again.tick(7.0))[0].nodes == ("n0", "n2")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"run_id": "else"}, "its run id is else, the job's is run"),
        ({"version": "0.9"}, "its version of outlast is 0.9, the job's is 1.0"),
        ({"options": "spares=1,x=2"}, "its options say x=2, the job's say the default"),
        ({"options": "spares=0"}, "its options say spares=0, the job's say spares=1"),
        ({"slots": 0}, "it offers 0 ranks, at least 1 is needed"),
        ({"unfit": "/dev/shm has 64 MiB"}, "preflight: /dev/shm has 64 MiB"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_one_reason(other: dict[str, object], words: str) -> None:
    (refused,) = begun(terms()).handle(Joined(member("n0", **other)), 0.0)
    assert isinstance(refused, Refused)
    assert words in refused.reason


def test_nodes_may_have_different_numbers_of_ranks_and_sit_by_the_node_ranks_that_were_given() -> None:
    membership = Membership(terms(), 0.0)
    found: list[Decision] = []
    for name, slots, rank in (("a", 1, 2), ("b", 3, 0), ("c", 2, 1)):
        domains = (("rack", name),)
        joined = Joined(member(name, slots=slots, node_rank=rank, domains=domains))
        found += membership.handle(joined, 0.0)
    (plan,) = plans(tuple(found))
    assert [(seat.name, seat.first_rank, seat.slots) for seat in plan.seats] == [
        ("b", 0, 3),
        ("c", 3, 2),
        ("a", 5, 1),
    ]
    assert plan.world_size == 6


def test_a_second_node_of_one_node_rank_waits_until_it_is_known_whether_the_first_is_alive() -> None:
    membership = Membership(terms(2, 2, 1), 0.0)
    membership.handle(Joined(member("a", node_rank=0)), 0.0)
    second = Joined(member("b", node_rank=0))
    (waits,) = membership.handle(second, 1.0)
    assert isinstance(waits, Unchanged)
    membership.handle(Heard("a"), 2.0)
    (refused,) = membership.handle(second, 2.1)
    assert isinstance(refused, Refused)
    assert "a has joined with --node-rank=0 and is alive" in refused.reason
    membership.handle(Left("a", "gone"), 3.0)
    (taken,) = membership.handle(second, 3.1)
    assert isinstance(taken, TakenIn)


def test_too_few_nodes_are_waited_for_and_that_is_said_once_with_the_limit() -> None:
    membership = begun(replace(terms(), join_timeout=60.0), "n0")
    said: list[Decision] = []
    for now in range(1, 60):
        said += (*membership.handle(Heard("n0"), now), *membership.tick(now))
    (waits,) = said
    assert isinstance(waits, Waits)
    assert (
        "1 node(s) for 5 s, at least 2 needed (--nnodes); the job waits for nodes until 60 s" in waits.reason
    )
    (end,) = [one for one in membership.tick(60.0) if isinstance(one, TooFew)]
    assert end.exit_code == 1


def test_an_agent_that_is_back_elsewhere_before_its_end_is_known_is_taken_in_once_it_is() -> None:
    membership = begun(terms(), "n0", "n1", "n2", "n3")
    back = Joined(member("n1", address="else:1", incarnation="2"))
    (waits,) = membership.handle(back, 1.0)
    assert isinstance(waits, Unchanged)
    membership.handle(Left("n1", "its agent has ended"), 1.3)
    assert any(isinstance(one, TakenIn) for one in membership.handle(back, 2.0))


def test_names_are_unique_and_an_agent_that_begins_anew_is_another_node() -> None:
    membership = begun(terms(), "n0", "n1", "n2", "n3")
    (again,) = membership.handle(Joined(member("n1")), 1.0)
    assert isinstance(again, Unchanged)
    rival = Joined(member("n1", address="else:1", incarnation="3"))
    (waits,) = membership.handle(rival, 1.0)
    assert isinstance(waits, Unchanged)  # the one before may have died a moment ago
    membership.handle(Heard("n1"), 1.6)
    (twin,) = membership.handle(rival, 2.0)
    assert isinstance(twin, Refused)
    lost, taken = membership.handle(Joined(member("n1", incarnation="2")), 1.0)
    assert isinstance(lost, Lost)
    assert lost.ends == 1
    assert isinstance(taken, TakenIn)
    (fifth,) = membership.handle(Joined(member("n4")), 1.0)
    assert isinstance(fifth, Refused)
    assert "--spares" in fifth.reason
    assert isinstance(membership.handle(Heard("n1", ""), 1.0)[0], Unchanged)


def test_a_dead_node_and_the_errors_that_it_causes_make_one_generation() -> None:
    membership = begun(terms(), "n0", "n1", "n2", "n3")
    for name in ("n0", "n1", "n2", "n3"):
        membership.handle(Heard(name), 10.0)
    membership.tick(10.0)
    (asked,) = membership.handle(RestartOrdered(1, 2, "rank 0 lost its peer"), 10.1)
    assert isinstance(asked, Probe)
    found: list[Decision] = []
    for at in range(41, 64):
        now = at / 4
        for name in ("n0", "n2", "n3"):
            found += membership.handle(Heard(name), now)
        found += membership.handle(RestartOrdered(1, 2, "rank 9 lost its peer too"), now)
        found += membership.tick(now)
    (plan,) = plans(tuple(found))
    assert plan.generation == 2
    assert plan.nodes == ("n0", "n3", "n2")
    assert plan.moved == ()
    assert [one.name for one in found if isinstance(one, Lost)] == ["n1"]


@pytest.mark.parametrize("every", [0.25, 0.76, 1.0, 4.0])
def test_a_leader_with_slow_ticks_declares_a_silent_node_lost(every: float) -> None:
    membership = begun(terms(), "n0", "n1", "n2")
    lost: list[str] = []
    for turn in range(1, 60):
        now = turn * every
        for name in ("n0", "n2"):
            membership.handle(Heard(name), now)
        lost += [one.name for one in membership.tick(now) if isinstance(one, Lost)]
    assert lost == ["n1"]


@pytest.mark.parametrize("timeout", [1.0, 5.0])
def test_one_gap_of_the_leader_loses_nobody_that_was_heard_as_usual(timeout: float) -> None:
    membership = begun(replace(terms(), ping_timeout=timeout), "n0", "n1", "n2")
    membership.tick(0.5)  # pings come twice a second: all were heard half a second ago
    assert membership.tick(90.0) == ()


def test_a_flap_restarts_nothing_and_a_leader_that_slept_blames_nobody() -> None:
    membership = begun(terms(), "n0", "n1", "n2")
    for at in range(1, 20):
        membership.handle(Heard("n0"), at / 4)
        assert membership.tick(at / 4) == ()
    membership.handle(Heard("n1"), 4.9)
    membership.handle(Heard("n2"), 4.9)
    assert membership.tick(5.0) == ()
    assert membership.tick(500.0) == ()
    assert membership.phase is Phase.RUNNING


def test_it_shrinks_with_few_moves_and_grows_back_at_a_safe_step() -> None:
    membership = begun(terms(2, 4, 0), "n0", "n1", "n2", "n3")
    membership.handle(Left("n1", "its power went"), 1.0)
    (plan,) = ordered(membership, 1.1, "n0", "n2", "n3")
    assert plan.nodes == ("n0", "n3", "n2")
    assert plan.moved == ("n3",)
    taken, wish = membership.handle(Joined(member("n1", incarnation="2")), 2.0)
    assert isinstance(taken, TakenIn)
    assert isinstance(wish, GrowthWanted)
    assert membership.tick(2.1) == ()  # said once
    (asked,) = membership.handle(SafeStep(2, 40, 3), 3.0)
    assert isinstance(asked, Probe)
    found: list[Decision] = []
    for name in ("n0", "n2", "n3"):
        found += membership.handle(Heard(name), 3.1)
    found += membership.handle(Heard("n1", "2"), 3.1)
    assert plans(tuple(found))[0].nodes == ("n0", "n3", "n2", "n1")


def test_an_excluded_node_never_comes_back() -> None:
    membership = begun(terms(), "n0", "n1", "n2")
    (lost,) = membership.handle(Unfit("n1", "two Xid 79 in an hour"), 1.0)
    assert isinstance(lost, Lost)
    assert lost.excluded
    (refused,) = membership.handle(Joined(member("n1", incarnation="2")), 2.0)
    assert isinstance(refused, Refused)
    assert "Xid 79" in refused.reason
    assert membership.roles()["n1"] is Role.EXCLUDED


def test_too_few_nodes_for_too_long_end_the_job() -> None:
    membership = begun(terms(3, 3, 0), "n0", "n1", "n2")
    membership.handle(Left("n1", "gone"), 1.0)
    ordered(membership, 1.0, "n0", "n2")
    now = 1.0
    found: list[Decision] = []
    while not any(isinstance(one, TooFew) for one in found) and now < 1000:
        now += 0.25
        found += [*membership.handle(Heard("n0"), now), *membership.handle(Heard("n2"), now)]
        found += membership.tick(now)
    (end,) = (one for one in found if isinstance(one, TooFew))
    assert sum(isinstance(one, Waits) for one in found) == 1
    assert "2 node(s) for 300 s, at least 3 needed" in end.reason
    assert isinstance(membership.handle(Heard("n0"), now)[0], Unchanged)


def test_groups_are_taken_and_left_as_a_whole() -> None:
    wanted = terms(2, 4, 2, 2)
    membership = Membership(wanted, 0.0)
    found: list[Decision] = []
    for name, group in (("a0", "a"), ("b0", "b"), ("c0", "c"), ("c1", "c"), ("b1", "b"), ("a1", "a")):
        found += membership.handle(Joined(member(name, group=group)), 0.0)
    (plan,) = plans(tuple(found))
    assert plan.nodes == ("b0", "b1", "c0", "c1")
    membership.handle(Left("c0", "gone"), 1.0)
    (plan,) = ordered(membership, 1.0, "a0", "a1", "b0", "b1", "c1")
    assert plan.nodes == ("b0", "b1", "a0", "a1")
    assert plan.spares == ("c1",)
    with pytest.raises(UsageError, match="multiples"):
        terms(3, 4, 0, 2)


def test_a_free_seat_goes_to_a_spare_of_the_same_rack() -> None:
    racks = {"n0": "r0", "n1": "r0", "n2": "r1", "n3": "r1", "n8": "r1", "n9": "r0"}
    nodes = {name: member(name, domains=(("rack", rack),)) for name, rack in racks.items()}
    first = seats(nodes, (), 6, 1)
    assert [seat.name for seat in first] == ["n0", "n1", "n9", "n2", "n3", "n8"]
    del nodes["n1"]
    assert [seat.name for seat in seats(nodes, ("n0", "n1", "n2", "n3"), 4, 1)][1] in {"n8", "n9"}
    del nodes["n2"]
    after = seats(nodes, ("n0", "n1", "n2", "n3"), 4, 1)
    assert [seat.name for seat in after] == ["n0", "n9", "n8", "n3"]
    assert sorted(["n10", "n2"], key=natural) == ["n2", "n10"]


class History:
    """A random history, with an oracle about what may follow."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        size = self.draw.choice((1, 1, 2))
        least = size * self.draw.randint(1, 2)
        most = least + size * self.draw.randint(0, 2)
        self.wanted = replace(terms(least, most, self.draw.randint(0, 2), size), join_timeout=20.0, grace=2.0)
        self.membership = Membership(self.wanted, 0.0)
        self.now = 0.0
        self.plans: dict[int, Plan] = {}
        self.orders = 0
        self.gone: set[str] = set()
        self.left: set[str] = set()  # since the last plan
        self.said: list[Decision] = []

    def event(self) -> Event:
        name = f"n{self.draw.randrange(7)}"
        group = f"g{int(name[1:]) // self.wanted.group_size}"
        generation = self.membership.generation
        match self.draw.randrange(12):
            case 0 | 1 | 2:
                return Joined(member(name, group=group, incarnation=self.draw.choice(("", "", "2"))))
            case 3:
                return Left(name, "it left")
            case 4 if self.draw.random() < 0.3:
                return Unfit(name, "it is bad")
            case 5:
                return SafeStep(generation, 10, generation + 1)
            case 6:
                ended = max(0, generation - self.draw.randrange(2))
                return RestartOrdered(ended, generation + 1, "an error")
            case _:
                return Heard(name, self.draw.choice(("", "", "2")))

    def turn(self) -> None:
        self.now += self.draw.choice((0.05, 0.25, 0.5))
        before = self.membership.generation
        event = self.event()
        self.orders += isinstance(event, (RestartOrdered, SafeStep))
        for decision in (*self.membership.handle(event, self.now), *self.membership.tick(self.now)):
            self.said.append(decision)
            if isinstance(decision, Lost):
                self.left.add(decision.name)
            if isinstance(decision, Plan):
                self.check(decision, before)
                self.left.clear()
        if isinstance(event, Unfit) and self.membership.roles().get(event.name) is Role.EXCLUDED:
            self.gone.add(event.name)

    def check(self, plan: Plan, before: int) -> None:
        wanted, old = self.wanted, self.plans.get(before)
        assert plan.generation > before
        assert plan.generation not in self.plans
        assert self.gone.isdisjoint({*plan.nodes, *plan.spares})
        assert len(set(plan.nodes)) == len(plan.nodes)
        assert not set(plan.nodes) & set(plan.spares)
        assert wanted.least <= len(plan.nodes) <= wanted.most
        assert len(plan.nodes) % wanted.group_size == 0
        assert [rank for seat in plan.seats for rank in seat.ranks] == list(range(plan.world_size))
        assert plan.reason
        if old is not None:
            at = {name: number for number, name in enumerate(plan.nodes)}
            for number, name in enumerate(old.nodes):
                if name in at and at[name] != number and name not in self.left:
                    assert len(plan.nodes) < len(old.nodes)  # only a smaller job moves anybody
                    assert number >= len(plan.nodes)  # and nobody whose seat is still there
        self.plans[plan.generation] = plan


@given(seed=st.integers(0, 1 << 40))
def test_what_holds_over_all_histories(seed: int) -> None:
    history = History(seed)
    for _ in range(300):
        history.turn()
    assert len(history.plans) <= history.orders + 1  # it ends if the caller's budgets do
    assert all(getattr(one, "reason", "x") for one in history.said)
    again = History(seed)
    for _ in range(300):
        again.turn()
    assert again.said == history.said


@given(seed=st.integers(0, 1 << 40), turns=st.integers(1, 200))
def test_another_leader_goes_on_with_the_same_plan(seed: int, turns: int) -> None:
    history = History(seed)
    for _ in range(turns):
        history.turn()
    old = history.membership
    if old.phase is Phase.ENDED:
        return
    new = Membership(history.wanted, history.now)
    codec = Codec[MembershipState](MembershipState)
    new.restore(codec.read(codec.write(old.state())), history.now)
    assert new.roles() == old.roles()
    assert (new.generation, new.phase) == (old.generation, old.phase)
    history.membership = new
    history.now += 1.0
    for _ in range(50):
        history.turn()


# A node in quarantine or burn-in gets ranks only where no other one is left.

BAD = "quarantine: 3 faults in 30 days (lost)"


def test_a_free_seat_goes_to_a_node_that_is_good() -> None:
    nodes = {name: member(name) for name in ("n0", "n2", "n3")}
    nodes["n2"] = member("n2", last_choice=BAD)
    assert [seat.name for seat in seats(nodes, ("n0", "n1"), 2, 1)] == ["n0", "n3"]
    del nodes["n3"]
    assert [seat.name for seat in seats(nodes, ("n0", "n1"), 2, 1)] == ["n0", "n2"]


def test_a_spare_at_risk_is_passed_over_while_enough_others_are_there() -> None:
    membership = begun(terms(1, 2, 2), "n0", "n1")
    membership.handle(Joined(member("n2")), 1.0)
    assert membership.seated_without("n1", healthy=True) == 2
    assert membership.at_risk("n2", "XID 79")
    assert not membership.at_risk("n2", "XID 79"), "that is known"
    assert membership.passed_over() == "n2 (at risk: XID 79)"
    assert (membership.seated_without("n1"), membership.seated_without("n1", healthy=True)) == (1, 1)
    membership.handle(Left("n1", "gone"), 2.0)
    (first,) = ordered(membership, 2.0, "n0", "n2")
    assert first.nodes == ("n0",)
    assert "; n2 waits (at risk: XID 79)" in first.reason
    assert membership.at_risk("n2", "")
    assert membership.passed_over() == ""


def test_a_spare_at_risk_is_better_than_no_job() -> None:
    membership = begun(terms(2, 2, 2), "n0", "n1")
    membership.handle(Joined(member("n2")), 1.0)
    membership.at_risk("n2", "XID 79")
    assert (membership.seated_without("n1"), membership.seated_without("n1", healthy=True)) == (2, 1)
    membership.handle(Left("n1", "gone"), 2.0)
    (first,) = ordered(membership, 2.0, "n0", "n2")
    assert first.nodes == ("n0", "n2")
    assert "n2 has ranks, as no other node is left (at risk: XID 79)" in first.reason


def test_a_spare_in_quarantine_is_not_healthy_and_one_in_burn_in_is() -> None:
    membership = begun(terms(2, 2, 2), "n0", "n1")
    membership.handle(Joined(member("n2", last_choice=BAD)), 1.0)
    assert (membership.seated_without("n1"), membership.seated_without("n1", healthy=True)) == (2, 1)
    assert membership.passed_over() == f"n2 ({BAD})"
    membership.handle(Joined(member("n3", last_choice="burn-in: it came back 1 h ago")), 1.0)
    assert membership.seated_without("n1", healthy=True) == 2


def test_it_loses_no_seat_that_it_has() -> None:
    nodes = {name: member(name, last_choice=BAD if name == "n1" else "") for name in ("n0", "n1", "n2")}
    assert [seat.name for seat in seats(nodes, ("n0", "n1"), 2, 1)] == ["n0", "n1"]


def test_a_rack_is_not_worth_a_bad_node() -> None:
    rack = (("rack", "r0"),)
    nodes = {"n0": member("n0", domains=rack), "n2": member("n2", domains=rack, last_choice=BAD)}
    nodes["n3"] = member("n3", domains=(("rack", "r1"),))
    assert [seat.name for seat in seats(nodes, ("n0", "n1"), 2, 1)] == ["n0", "n3"]


def test_the_log_says_why_it_waits_and_why_it_does_not() -> None:
    membership = begun(terms(2, 2, 2), "n0", "n1")
    membership.handle(Joined(member("n2", last_choice=BAD)), 1.0)
    membership.handle(Joined(member("n3")), 1.0)
    membership.handle(Left("n1", "gone"), 2.0)
    (first,) = ordered(membership, 2.0, "n0", "n2", "n3")
    assert first.nodes == ("n0", "n3")
    assert f"; n2 waits ({BAD})" in first.reason
    membership.handle(Left("n3", "gone"), 3.0)
    (second,) = ordered(membership, 3.0, "n0", "n2")
    assert second.nodes == ("n0", "n2")
    assert f"; n2 has ranks, as no other node is left ({BAD})" in second.reason


def laid_out(*nodes: int, least: int = 1, most: int = 4) -> JobSpec:
    """Return terms with layouts for these numbers of nodes, of 4 ranks each."""
    return replace(terms(least, most), layouts=tuple(Layout(tp=4, dp=one) for one in nodes))


def test_a_job_goes_on_with_as_many_nodes_as_there_is_a_layout_for_and_grows_back() -> None:
    membership = Membership(laid_out(1, 2, 4), 0.0)
    found: list[Decision] = []
    for name in ("n0", "n1", "n2", "n3"):
        found += membership.handle(Joined(member(name)), 0.0)
    (plan,) = plans(tuple(found))
    assert (plan.world_size, plan.layout) == (16, "tp=4,pp=1,dp=4,cp=1,ep=1,virtual=1")
    (lost,) = membership.handle(Left("n0", "gone"), 1.0)
    assert isinstance(lost, Lost)
    (plan,) = ordered(membership, 1.0, "n1", "n2", "n3")
    assert (plan.nodes, plan.spares, plan.layout) == (
        ("n3", "n1"),
        ("n2",),
        "tp=4,pp=1,dp=2,cp=1,ep=1,virtual=1",
    )
    assert "1 node(s) wait, because [parallelism] has no layout for the ranks of more nodes" in plan.reason
    assert membership.plan_in_force("").layout == plan.layout  # type: ignore[union-attr]
    assert membership.seated_without("n1") == 2
    assert not any(isinstance(one, GrowthWanted) for one in membership.tick(1.2))
    said = membership.handle(Joined(member("n0")), 2.0)
    assert [one.nodes for one in said if isinstance(one, GrowthWanted)] == [2]
    membership.handle(SafeStep(2, 7, 3), 2.0)
    answers = [one for name in ("n0", "n1", "n2", "n3") for one in membership.handle(Heard(name), 2.1)]
    (plan,) = plans(tuple(answers))
    assert (plan.world_size, plan.layout) == (16, "tp=4,pp=1,dp=4,cp=1,ep=1,virtual=1")
    assert plan.nodes[:2] == ("n3", "n1")


def test_nodes_without_a_layout_wait_and_it_is_said_why() -> None:
    membership = begun(replace(laid_out(4, least=2), grace=0.0, join_timeout=60.0), "n0", "n1", "n2")
    said: list[Decision] = []
    for now in range(1, 60):
        for at in range(3):
            said += membership.handle(Heard(f"n{at}"), now)
        said += membership.tick(now)
    (waits,) = [one for one in said if isinstance(one, Waits)]
    assert "[parallelism] has no layout for the ranks of 2 to 3 nodes" in waits.reason
    (end,) = [one for one in membership.tick(60.0) if isinstance(one, TooFew)]
    assert "has no layout" in end.reason
