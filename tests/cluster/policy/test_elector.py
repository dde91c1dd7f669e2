"""One agent in an election: when it asks for votes, whom it votes for, and how long its node may commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.cluster.policy.ballots import (
    HardState,
    InForce,
    Leads,
    Outcome,
    Send,
    StepsDown,
    Timing,
    founding,
)
from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.messages import (
    AppendEntries,
    AppendReply,
    ElectionMessage,
    Quorums,
    Record,
    Vote,
    VoteRequest,
)
from tests.cluster.builders import of_kind, only

TIMING = Timing(interval=0.5, lease=3.0, drift=0.0, stagger=0.5)
PROMISE = 3.0  # seconds, with clocks that do not drift
NEVER = float("-inf")
VOTERS = frozenset("abc")
RECORD = Record(0, 0, 1, VOTERS, VOTERS, "plan", (VOTERS,))


def agent(name: str, record: Record | None = RECORD, term: int = 0, now: float = 0.0) -> Elector:
    return Elector(name, TIMING, now, HardState(term, "", record), "first")


def sent(outcomes: Iterable[Outcome]) -> dict[str, ElectionMessage]:
    return {one.to: one.message for one in of_kind(Send, outcomes)}


def heartbeats(outcomes: Iterable[Outcome]) -> dict[str, AppendEntries]:
    return {to: one for to, one in sent(outcomes).items() if isinstance(one, AppendEntries)}


def granted(outcomes: Iterable[Outcome]) -> dict[str, float]:
    return {to: one.granted for to, one in heartbeats(outcomes).items()}


def elected(record: Record = RECORD, now: float = 0.0) -> Elector:
    """Return agent a, for which b has voted."""
    found = agent("a", record, now=now)
    found.tick(now)
    found.handle("b", Vote(0, 1, True, True), now)
    found.handle("b", Vote(1, 1, False, True), now)
    assert found.leads
    return found


def reply(leader: Elector, sender: str, now: float, echo: float = 0.0, **other: object) -> list[Outcome]:
    """Have a leader take the reply of an agent that has its record; ``echo``: to what was sent then."""
    record = leader.record
    assert record is not None
    said = AppendReply(leader.term, record.key, record.generation, "first", sent=now + 100, echo=echo)
    return leader.handle(sender, replace(said, **other), now)  # type: ignore[arg-type]


def begin(leader: Elector, generation: int, now: float, **other: object) -> list[Outcome]:
    wanted = replace(RECORD, generation=generation, plan=f"plan {generation}", **other)  # type: ignore[arg-type]
    return leader.propose(wanted, now)


def heartbeat(record: Record, now: float = 0.0, **other: object) -> AppendEntries:
    said = AppendEntries(record.term, now, record.key, True, 0.0, "first", 0.0, record)
    return replace(said, **other)  # type: ignore[arg-type]


def quorums(one: Elector) -> Quorums:
    assert one.record is not None
    return one.record.quorums


def in_force(outcomes: Iterable[Outcome]) -> list[int]:
    return [one.record.generation for one in of_kind(InForce, outcomes)]


@pytest.mark.parametrize(("name", "first", "second"), [("a", 0.0, 0.5), ("b", 0.5, 1.5), ("c", 1.0, 2.5)])
def test_voters_ask_one_after_the_other_in_the_order_of_their_names(
    name: str, first: float, second: float
) -> None:
    one = agent(name)
    for when in (first, second):
        assert one.tick(when - 0.01) == []
        asked = sent(one.tick(when))
        assert asked == dict.fromkeys(sorted(VOTERS - {name}), VoteRequest(1, (0, 0), True))
    assert one.term == 0, "nobody has agreed yet"


@pytest.mark.parametrize("record", [None, replace(RECORD, quorums=(frozenset("bc"),))])
def test_an_agent_that_has_no_vote_asks_for_none(record: Record | None) -> None:
    assert agent("a", record).tick(1000.0) == []


def test_an_agent_that_starts_again_keeps_what_it_may_have_promised_a_moment_ago() -> None:
    again = agent("b", term=4, now=10.0)
    request = VoteRequest(5, (0, 0), False)
    assert again.handle("c", request, 10.0 + PROMISE - 0.01) == []
    assert again.tick(10.0 + PROMISE + 0.49) == []
    assert sent(again.tick(10.0 + PROMISE + 0.5)).keys() == {"a", "c"}
    assert sent(again.handle("c", request, 10.0 + PROMISE + 0.5)) == {"c": Vote(5, 5, False, True)}


def test_a_new_agent_may_vote_at_once() -> None:
    new = Elector("d", TIMING, 10.0)
    assert (new.term, new.record) == (0, None)
    assert sent(new.handle("c", VoteRequest(1, (0, 0), False), 10.0)) == {"c": Vote(1, 1, False, True)}


def test_a_follower_waits_for_the_promise_and_its_place_and_each_heartbeat_makes_it_wait_anew() -> None:
    one = agent("b")
    for now in (1.0, 2.0):
        one.handle("a", heartbeat(replace(RECORD, term=1, version=1)), now)
    assert one.leader == "a"
    assert one.tick(2.0 + PROMISE + 0.49) == []
    assert sent(one.tick(2.0 + PROMISE + 0.5)) == dict.fromkeys("ac", VoteRequest(2, (1, 1), True))


def test_a_voter_waits_for_the_one_that_it_voted_for() -> None:
    one = agent("b")
    one.handle("c", VoteRequest(1, (0, 0), False), 0.4)
    assert one.tick(0.4 + PROMISE + 0.49) == []
    assert sent(one.tick(0.4 + PROMISE + 0.5)).keys() == {"a", "c"}


@pytest.mark.parametrize(
    ("term", "key", "yes"),
    [(3, (2, 7), True), (3, (2, 8), True), (3, (3, 0), True), (3, (2, 6), False), (2, (2, 7), False)],
)
@pytest.mark.parametrize("pre_vote", [True, False])
def test_a_vote_goes_to_a_newer_term_with_a_record_that_is_as_new(
    term: int, key: tuple[int, int], yes: bool, pre_vote: bool
) -> None:
    one = agent("b", replace(RECORD, term=2, version=7), term=2)
    one.handle("a", heartbeat(replace(RECORD, term=2, version=7)), -PROMISE)  # b's vote of term 2 is not a's
    voter = Elector("b", TIMING, 0.0, HardState(2, "a", one.record))
    said = voter.handle("c", VoteRequest(term, key, pre_vote), PROMISE)
    after = 2 if pre_vote else term
    assert said == [Send("c", Vote(after, term, pre_vote, yes))]
    assert (voter.term, voter.stored.voted) == (after, "c" if yes and not pre_vote else voter.stored.voted)
    assert (voter.stored.voted == "a") == (voter.term == 2)


def test_a_term_has_one_vote_that_may_be_repeated() -> None:
    one = agent("b")
    request = VoteRequest(1, (0, 0), False)
    assert sent(one.handle("c", request, 0.0)) == {"c": Vote(1, 1, False, True)}
    assert sent(one.handle("a", request, 0.1)) == {"a": Vote(1, 1, False, False)}
    assert sent(one.handle("c", request, 0.2)) == {"c": Vote(1, 1, False, True)}
    assert one.stored.voted == "c"


def test_a_refused_candidate_delays_nobody() -> None:
    one = agent("b", replace(RECORD, version=2))
    one.handle("c", VoteRequest(1, (0, 1), False), 0.4)
    assert (one.term, one.stored.voted) == (1, "")
    assert sent(one.tick(0.5)).keys() == {"a", "c"}


def test_an_agent_that_hears_a_leader_answers_no_request_until_its_promise_is_over() -> None:
    one = agent("b")
    one.handle("a", heartbeat(replace(RECORD, term=1, version=1)), 1.0)
    request = VoteRequest(9, (9, 9), False)
    assert one.handle("c", request, 1.0 + PROMISE - 0.01) == []
    assert one.term == 1
    assert sent(one.handle("c", request, 1.0 + PROMISE)) == {"c": Vote(9, 9, False, True)}


def test_a_leader_votes_for_nobody_else() -> None:
    leader = elected()
    assert leader.handle("c", VoteRequest(9, (9, 9), False), 1.0) == []
    assert (leader.leads, leader.term) == (True, 1)


def test_a_majority_that_would_vote_begins_a_term_and_a_majority_that_votes_elects() -> None:
    one = agent("a")
    one.tick(0.0)
    assert sent(one.handle("b", Vote(0, 1, True, True), 0.1)) == dict.fromkeys(
        "bc", VoteRequest(1, (0, 0), False)
    )
    assert (one.term, one.stored.voted, one.leads) == (1, "a", False)
    said = one.handle("c", Vote(1, 1, False, True), 0.2)
    leads = said[0]
    assert isinstance(leads, Leads)
    assert (leads.term, leads.record) == (1, RECORD)
    assert (one.leads, one.leader) == (True, "a")
    assert one.record == replace(RECORD, term=1, version=1), "the same record, in its own term"
    assert sent(said).keys() == {"b", "c"}


@pytest.mark.parametrize(
    "late",
    [
        Vote(0, 1, True, True),  # it would vote
        Vote(2, 2, False, True),  # for a later term
        Vote(0, 1, False, False),  # it does not vote
    ],
)
def test_only_votes_for_what_was_asked_count(late: Vote) -> None:
    one = agent("a")
    one.tick(0.0)
    one.handle("b", Vote(0, 1, True, True), 0.1)
    assert one.handle("c", late, 0.2) == []
    assert not one.leads


def test_a_vote_that_comes_after_the_election_changes_nothing() -> None:
    leader = elected()
    reply(leader, "b", 0.1)
    begin(leader, 2, 0.2)
    assert leader.handle("c", Vote(1, 1, False, True), 0.3) == []
    assert leader.record is not None
    assert leader.record.key == (1, 2)


def test_votes_for_the_question_are_no_votes() -> None:
    five = frozenset("abcde")
    one = agent("a", replace(RECORD, quorums=(five,)))
    one.tick(0.0)
    for name in "bc":
        one.handle(name, Vote(0, 1, True, True), 0.1)
    assert one.term == 1
    one.handle("d", Vote(1, 1, False, True), 0.2)
    assert not one.leads, "a and d are two of five"
    one.handle("e", Vote(1, 1, False, True), 0.2)
    assert one.leads


@pytest.mark.parametrize(
    "news",
    [Vote(5, 1, False, False), heartbeat(replace(RECORD, term=5)), VoteRequest(5, (0, 0), False)],
)
def test_a_candidate_that_learns_of_a_later_term_is_not_elected_in_the_earlier_one(
    news: ElectionMessage,
) -> None:
    one = agent("a")
    one.tick(0.0)
    one.handle("b", Vote(0, 1, True, True), 0.1)
    one.handle("c", news, 0.2)
    assert one.term == 5
    assert one.handle("b", Vote(1, 1, False, True), 0.3) == []
    assert not one.leads


def test_a_candidate_gives_up_when_another_one_leads_its_term() -> None:
    one = agent("a")
    one.tick(0.0)
    one.handle("b", Vote(0, 1, True, True), 0.1)
    one.handle("c", heartbeat(replace(RECORD, term=1, version=1)), 0.2)
    one.handle("b", Vote(1, 1, False, True), 0.3)
    assert (one.leads, one.leader) == (False, "c")


def test_a_voter_that_knows_a_later_term_tells_a_candidate_so() -> None:
    one = agent("b", term=7)
    said = one.handle("a", VoteRequest(3, (9, 9), False), PROMISE)
    assert said == [Send("a", Vote(7, 3, False, False))]


def test_a_leader_writes_once_an_interval() -> None:
    leader = elected()
    reply(leader, "b", 0.1)
    assert leader.tick(0.59) == []
    said = heartbeats(leader.tick(0.6))
    assert said.keys() == {"b", "c"}
    assert {one.sent for one in said.values()} == {0.6}
    assert leader.tick(1.09) == []
    assert heartbeats(leader.tick(1.1)).keys() == {"b", "c"}


def test_what_is_not_in_force_is_told_to_voters_only_and_then_to_all_others() -> None:
    told = frozenset("abcde")
    leader = agent("a", replace(RECORD, agents=told))
    leader.tick(0.0)
    leader.handle("b", Vote(0, 1, True, True), 0.0)
    first = leader.handle("b", Vote(1, 1, False, True), 0.0)
    ping = AppendEntries(1, 0.0, (1, 1), committed=False, record=leader.record)
    assert heartbeats(first) == {"b": ping, "c": ping}
    assert in_force(first) == []
    after = reply(leader, "b", 0.1)
    assert heartbeats(after).keys() == {"b", "c", "d", "e"}
    assert all(one.committed for one in heartbeats(after).values())
    assert in_force(after) == [1]
    assert reply(leader, "c", 0.2) == [], "said once"


def test_an_answer_about_an_earlier_record_puts_nothing_into_force() -> None:
    leader = elected()
    assert reply(leader, "b", 0.1, key=(0, 0)) == []
    assert reply(leader, "c", 0.1, term=0) == []
    assert in_force(reply(leader, "b", 0.2)) == [1]


def test_a_leader_that_no_majority_answers_steps_down() -> None:
    leader = elected(now=10.0)
    assert of_kind(StepsDown, leader.tick(10.0 + PROMISE - 0.01)) == []
    assert only(StepsDown, leader.tick(10.0 + PROMISE)).term == 1
    assert (leader.leads, leader.leader) == (False, "")


def test_a_leader_that_is_cut_off_steps_down_a_promise_after_what_a_majority_answered_last() -> None:
    leader = elected()
    reply(leader, "b", 1.2, echo=1.0)
    reply(leader, "b", 1.3, echo=0.5)  # it came late and takes nothing back
    assert of_kind(StepsDown, leader.tick(1.0 + PROMISE - 0.01)) == []
    assert of_kind(StepsDown, leader.tick(1.0 + PROMISE))
    assert leader.tick(1.0 + PROMISE + 0.49) == []
    assert sent(leader.tick(1.0 + PROMISE + 0.5)) == dict.fromkeys("bc", VoteRequest(2, (1, 1), True))


def test_a_leader_that_learns_of_a_later_term_votes_for_nobody_while_its_lease_may_hold() -> None:
    leader = elected()
    reply(leader, "b", 1.2, echo=1.0)
    said = reply(leader, "c", 1.3, term=5)
    assert [type(one) for one in said] == [StepsDown]
    request = VoteRequest(6, (9, 9), False)
    assert leader.handle("c", request, 1.0 + PROMISE - 0.01) == []
    assert leader.tick(1.0 + PROMISE + 0.49) == []
    assert sent(leader.handle("c", request, 1.0 + PROMISE)) == {"c": Vote(6, 6, False, True)}


def test_what_is_proposed_to_one_that_does_not_lead_is_dropped() -> None:
    one = agent("b")
    assert begin(one, 2, 0.0) == []
    assert one.record == RECORD


def test_a_proposal_waits_for_the_record_before_it_and_the_latest_one_counts() -> None:
    leader = elected()
    assert in_force(begin(leader, 2, 0.1)) == []
    begin(leader, 3, 0.2)
    assert leader.record == replace(RECORD, term=1, version=1)
    said = reply(leader, "b", 0.3)
    assert in_force(said) == [1]
    assert leader.record == replace(RECORD, term=1, version=2, generation=3, plan="plan 3")
    assert {one.key for one in heartbeats(said).values()} == {(1, 2)}
    assert in_force(reply(leader, "c", 0.4)) == [3]
    assert leader.record.key == (1, 2), "what was proposed is written once"


def test_new_voters_are_agreed_on_by_majorities_of_both_sets() -> None:
    leader = elected()
    reply(leader, "b", 0.1)
    others = frozenset("ade")
    said = begin(leader, 2, 0.2, quorums=(others,))
    assert in_force(said) == [], "generation 1 was, that is known"
    assert heartbeats(said).keys() == {"b", "c", "d", "e"}
    assert quorums(leader) == (VOTERS, others)
    assert in_force(reply(leader, "b", 0.3)) == [], "d or e is needed, too"
    assert in_force(reply(leader, "d", 0.4)) == [2]
    assert quorums(leader) == (others,)
    assert in_force(reply(leader, "e", 0.5)) == [2]


def test_the_first_agent_of_a_job_leads_by_its_own_vote() -> None:
    first = Elector("a", TIMING, 5.0, founding("a"))
    leads, force = first.tick(5.0)
    assert isinstance(leads, Leads)
    assert isinstance(force, InForce)
    assert (first.term, first.rights) == (1, (0, NEVER))


def test_a_node_may_commit_on_what_is_left_of_the_promises_of_a_majority() -> None:
    leader = elected()
    assert leader.rights == (0, NEVER)
    said = reply(leader, "b", 1.2, echo=1.0, sent=77.0)
    assert granted(said) == pytest.approx({"b": 2.8, "c": 0.0}), "c was not heard yet"
    ping = heartbeats(said)["b"]
    assert (ping.incarnation, ping.echo) == ("first", 77.0)
    assert leader.rights == (1, 4.0)
    reply(leader, "c", 1.4, echo=0.5)
    assert granted(leader.tick(1.7)) == pytest.approx({"b": 2.3, "c": 2.3})
    assert leader.rights == pytest.approx((1, 4.0))


def test_only_nodes_of_the_generation_may_commit() -> None:
    leader = elected(replace(RECORD, active=frozenset("b")))
    reply(leader, "c", 0.1)
    reply(leader, "b", 0.2)
    assert granted(leader.tick(0.6)) == pytest.approx({"b": 2.4, "c": 0.0})
    assert leader.rights == (0, NEVER)


def test_no_right_is_granted_after_the_lease_is_over() -> None:
    slow = Timing(interval=0.5, lease=3.0, drift=0.2, stagger=0.5)
    leader = Elector("a", slow, 0.0, HardState(0, "", RECORD))
    leader.tick(0.0)
    leader.handle("b", Vote(0, 1, True, True), 0.0)
    leader.handle("b", Vote(1, 1, False, True), 0.0)
    reply(leader, "b", 0.0)
    assert granted(leader.tick(2.9)) == pytest.approx({"b": 0.1, "c": 0.0})
    assert granted(leader.tick(3.5)) == {"b": 0.0, "c": 0.0}
    assert leader.rights == pytest.approx((1, 3.0))


def test_a_grant_is_counted_from_the_newest_reply_of_the_same_agent() -> None:
    leader = elected()
    reply(leader, "b", 0.1, sent=50.0)
    reply(leader, "b", 0.2, sent=40.0)  # it was late on the way
    assert heartbeats(leader.tick(0.7))["b"].echo == 50.0
    reply(leader, "b", 0.8, sent=3.0, incarnation="second")
    ping = heartbeats(leader.tick(1.3))["b"]
    assert (ping.incarnation, ping.echo) == ("second", 3.0)


def test_a_follower_counts_a_grant_from_when_it_sent_the_reply_and_keeps_the_longest() -> None:
    one, record = agent("b"), replace(RECORD, term=1, version=1)
    for echo, left, until in ((10.0, 2.0, 12.0), (9.0, 2.5, 12.0), (11.0, 2.0, 13.0)):
        one.handle("a", heartbeat(record, granted=left, echo=echo), 11.0)
        assert one.rights == (1, until)
    one.handle("a", heartbeat(record, granted=9.0, echo=11.0, incarnation="before"), 11.0)
    assert one.rights == (1, 13.0), "that was granted to an agent before"
    one.handle("a", heartbeat(replace(record, version=2)), 11.5)
    assert one.rights == (1, 13.0), "it is still the same generation"
    one.handle("a", heartbeat(replace(record, version=3, generation=2)), 11.6)
    assert one.rights == (0, NEVER)


def test_a_grant_for_another_record_than_the_newest_is_not_taken() -> None:
    one, old = agent("b"), replace(RECORD, term=1, version=1)
    new = replace(old, version=2, generation=2)
    one.handle("a", heartbeat(new), 1.0)
    said = one.handle("a", heartbeat(old, granted=2.0, echo=1.0), 1.1)
    assert (one.record, one.rights) == (new, (0, NEVER))
    assert in_force(said) == []


def test_a_new_generation_may_commit_once_each_agent_of_the_old_one_has_dropped_it() -> None:
    leader = elected()
    reply(leader, "b", 0.1)
    reply(leader, "c", 0.1)
    leader.tick(0.6)
    begin(leader, 2, 1.0, active=frozenset("ac"))
    assert leader.rights == (0, NEVER)
    said = reply(leader, "c", 1.1, echo=1.0)
    assert in_force(said) == [2]
    assert granted(said) == {"b": 0.0, "c": 0.0}, "b may commit in generation 1 still"
    reply(leader, "b", 1.3, echo=1.0, generation=1)
    assert granted(leader.tick(1.6)) == {"b": 0.0, "c": 0.0}
    reply(leader, "b", 1.7, echo=1.6)
    assert granted(leader.tick(2.1)) == pytest.approx({"b": 0.0, "c": 2.5})
    assert leader.rights == pytest.approx((2, 4.6))


def test_a_reply_that_was_late_on_the_way_does_not_end_what_was_granted_later() -> None:
    leader = elected()
    reply(leader, "b", 0.1)
    begin(leader, 2, 0.2)
    reply(leader, "b", 0.3)
    assert granted(leader.tick(0.8))["b"] > 0
    reply(leader, "b", 0.9, generation=1)
    begin(leader, 3, 1.0, active=frozenset("ac"))
    assert granted(reply(leader, "c", 1.1, echo=1.0)) == {"b": 0.0, "c": 0.0}


def test_a_new_generation_may_commit_when_the_lease_of_an_agent_that_is_cut_off_has_run_out() -> None:
    leader = elected()
    reply(leader, "b", 0.0)
    begin(leader, 2, 0.25, active=frozenset("ac"))
    for now in (0.5, 1.0, 1.5, 2.0, 2.5):
        reply(leader, "c", now, echo=now)
        assert granted(leader.tick(now)) in ({}, {"b": 0.0, "c": 0.0}), "b was granted something at 0.0"
    reply(leader, "c", PROMISE, echo=PROMISE)
    assert granted(leader.tick(PROMISE)) == {"b": 0.0, "c": 3.0}


def test_a_heartbeat_is_answered_with_what_the_agent_has() -> None:
    one = agent("b", None)
    record = replace(RECORD, term=3, version=2)
    said = one.handle("a", heartbeat(record, now=50.0), 7.0)
    assert only(InForce, said).record == record
    assert sent(said) == {"a": AppendReply(3, (3, 2), 1, "first", sent=7.0, echo=50.0)}
    assert in_force(one.handle("a", heartbeat(record, now=51.0), 7.5)) == [], "said once"


def test_an_agent_without_a_record_says_so() -> None:
    one = agent("b", None)
    said = one.handle("a", replace(heartbeat(RECORD), term=1, record=None), 7.0)
    assert sent(said) == {"a": AppendReply(1, (-1, -1), 0, "first", sent=7.0)}


def test_what_no_majority_has_is_not_done_yet() -> None:
    one = agent("b", None)
    record = replace(RECORD, term=1, version=1)
    assert in_force(one.handle("a", heartbeat(record, committed=False), 1.0)) == []
    assert in_force(one.handle("a", heartbeat(record), 1.5)) == [1]


def test_a_leader_of_an_earlier_term_is_told_of_the_later_one_and_changes_nothing() -> None:
    one = agent("b", replace(RECORD, term=4, version=1), term=5)
    old = replace(RECORD, term=4, version=9, generation=8)
    said = one.handle("a", heartbeat(old, now=1.0), 0.5)
    assert said == [Send("a", AppendReply(5, (4, 1), 1, "first", sent=0.5, echo=1.0))]
    assert (one.leader, one.term) == ("", 5)
    assert sent(one.tick(PROMISE + 0.5)).keys() == {"a", "c"}, "it does not wait for that leader"
