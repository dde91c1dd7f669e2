"""How an agent finds the leader, when a quorum is lost, and which of two jobs gives way."""

from __future__ import annotations

import pytest

from outlast.cluster.policy.ballots import Timing, confirmed, founding, majority
from outlast.cluster.policy.contacts import Contact, Contacts, LeaderBeacon, meet
from outlast.cluster.policy.events import Start
from outlast.cluster.policy.members import KnownNode, Member, MembershipState, Role
from outlast.cluster.policy.messages import Beacon, Join, NodeStatus, Record
from outlast.cluster.policy.plan import JobPlan
from outlast.recovery.policy.events import StateSource

ME = Member("n0", "n0:1", 4, "run", "1", "-", "7", endpoint="rendezvous:1")
PATIENCE = 8.0


def contacts(*seeds: str) -> Contacts:
    return Contacts(ME, Start(False, seeds, after=3), PATIENCE, 100.0)


def record(*voters: str, agents: tuple[str, ...] = ()) -> Record:
    return Record(1, 1, 1, frozenset(), frozenset(agents), "", (frozenset(voters),))


def plan(*names: str) -> JobPlan:
    nodes = (KnownNode(Member(name, f"{name}:1", 4, "run", "1", "-", "5"), Role.ACTIVE, "") for name in names)
    membership = MembershipState(1, names, tuple(nodes), None)
    return JobPlan(membership, {}, (), "", "", False, StateSource.NEWEST, (), 0, False, "", None)


def test_an_agent_that_hears_no_leader_for_longer_than_its_patience_is_out() -> None:
    one = contacts()
    assert (one.out(False, 100.0), one.out_since) == (True, 100.0), "it never heard one"
    one.pinged = 110.0
    assert one.out(False, 110.0 + PATIENCE) is False
    assert one.out(False, 110.0 + PATIENCE + 0.1)
    assert one.out(False, 500.0)
    assert one.out_since == 110.0 + PATIENCE, "when it was last known not to be"
    assert not one.out(True, 600.0), "it leads"
    assert one.out_since == 600.0


def test_an_agent_asks_once_a_second_at_all_addresses_but_its_own() -> None:
    one = contacts("z:1", "n0:1", "rendezvous:1")
    one.learn(plan("n0", "n1", "n2"))
    voters = record("n0#7", "n1#5", "n2#6", "n9#5")
    assert one.due(voters, 99.9) == []
    assert one.due(voters, 100.0) == ["n1:1", "z:1"], "another agent of n2 was known"
    assert one.due(voters, 100.9) == []
    one.seek("a:1")
    assert one.due(None, 101.0) == ["a:1", "z:1"]


def test_an_agent_says_what_it_knows_when_it_asks_to_join() -> None:
    status = NodeStatus(store=29500)
    assert contacts().join(2, status, "n1#5", 15) == Join(ME, 2, 3, "n1#5", 15, status)


def test_a_quorum_is_lost_when_too_few_voters_are_left_that_have_not_started_again() -> None:
    one = contacts()
    three = record("n0#7", "n1#5", "n2#5", agents=("n3#5",))
    assert one.bury({"n3#6", "n1#5"}, three) == "", "n3 had no vote, and n1 is as it was"
    assert one.bury({"n1#6"}, three) == "", "two of three are left"
    assert one.bury({"n2#6"}, three) == "n1, n2"


OURS = Beacon("run", 4, "n0#7", "n0:1")


@pytest.mark.parametrize(
    ("other", "begun", "does"),
    [
        (Beacon("another", 9, "n5#1", "n5:1"), True, Contact.NOTHING),
        (Beacon("run", 9, "n0#7", "n1:1"), True, Contact.NOTHING),  # it is the same job
        (Beacon("run", 5, "n5#1", "n5:1"), True, Contact.GIVE_WAY),
        (Beacon("run", 3, "n5#1", "n5:1"), True, Contact.ANSWER),
        (Beacon("run", 4, "n5#1", "n5:1"), True, Contact.GIVE_WAY),  # the names of their founders decide
        (Beacon("run", 4, "m5#1", "n5:1"), True, Contact.ANSWER),
        (Beacon("run", 3, "n5#1", "n5:1"), False, Contact.JOIN),
        (Beacon("run", 5, "n5#1", "n5:1"), None, Contact.ANSWER),
    ],
)
def test_of_two_jobs_the_one_that_has_begun_less_gives_way(
    other: Beacon, begun: bool | None, does: Contact
) -> None:
    assert meet(other, OURS, begun) is does


def test_an_agent_that_knows_no_leader_answers_no_other_job() -> None:
    assert meet(Beacon("run", 5, "n5#1", "n5:1"), Beacon("run", 4, "n0#7", ""), None) is Contact.NOTHING


def test_a_job_runs_if_its_beacon_changes() -> None:
    reader = LeaderBeacon(10.0)
    first, second = (Beacon("run", 1, "n5#1", "n5:1", beat) for beat in (1, 2))
    assert reader.until == float("-inf"), "there is nothing to wait for"
    assert reader.runs(None, "n0#7", 50.0) is False
    assert not reader.runs(second, "n5#1", 50.0), "it is of this job"
    assert reader.until == float("-inf")
    assert not reader.runs(first, "n0#7", 50.0), "it may have been left behind"
    assert not reader.runs(first, "n0#7", 55.0)
    assert reader.until == 60.0
    assert reader.runs(second, "n0#7", 56.0)
    assert reader.until == 66.0
    other = Beacon("run", 1, "n6#1", "n6:1", 9)
    assert not reader.runs(other, "n0#7", 57.0), "that one may have been left behind, too"
    assert reader.until == 67.0


def test_a_promise_lasts_as_long_as_a_lease_however_their_clocks_drift() -> None:
    timing = Timing(lease=3.0, drift=0.1)
    longest_lease, shortest_promise = timing.lease / (1 - timing.drift), timing.promise / (1 + timing.drift)
    assert shortest_promise == pytest.approx(longest_lease)


@pytest.mark.parametrize(
    ("voters", "agreed", "yes"),
    [("a", "", False), ("a", "a", True), ("ab", "a", False), ("ab", "ab", True), ("abcd", "abx", False)],
)
def test_half_of_the_voters_is_no_majority(voters: str, agreed: str, yes: bool) -> None:
    assert majority((frozenset(voters),), agreed) is yes
    times = {name: 5.0 for name in agreed}
    assert confirmed((frozenset(voters),), times) == (5.0 if yes else float("-inf"))


def test_both_sets_of_voters_must_have_followed() -> None:
    times = {"a": 9.0, "b": 7.0, "c": 1.0, "d": 8.0, "e": 3.0}
    assert confirmed((frozenset("abc"),), times) == 7.0
    assert confirmed((frozenset("abc"), frozenset("ace")), times) == 3.0
    assert confirmed((frozenset("abcd"),), times) == 7.0, "three of four have, since then"


def test_the_founder_of_a_job_has_the_only_vote_and_no_generation() -> None:
    state = founding("n0#7")
    assert (state.term, state.voted) == (0, "")
    assert state.record is not None
    assert (state.record.key, state.record.generation) == ((0, 0), 0)
    assert (state.record.agents, state.record.quorums) == (frozenset({"n0#7"}), (frozenset({"n0#7"}),))
