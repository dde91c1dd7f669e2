"""What the leading writer answers, and what a member does then, turn by turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outlast.checkpoint.policy.joint import Answer, Complete, Leader, Member, Report, Written
from outlast.checkpoint.policy.manifest import Row, copy_name


def written(step: int, error: str = "", session: str = "s", blocked: float = 0.5) -> Written:
    return Written(copy_name(step, 1), (), blocked, error, session)


def told(leader: Leader, *reports: Report) -> Answer:
    """Return what a leader answers after some reports."""
    for report in reports:
        leader.hear(report)
    return leader.answer


def begun(newest: int = 10) -> Leader:
    """Return the leader of two nodes that has just opened its first round."""
    leader = Leader(["a", "b"], replicate=True)
    told(leader, Report("a", "s", newest), Report("b", "s", newest))
    return leader


def in_round(leader: Leader, newest: int, **more: Any) -> list[Report]:
    """Return the reports of two nodes that are in the leader's round."""
    return [Report(node, "s", newest, leader.answer.round, **more) for node in "ab"]


def test_a_report_of_a_node_of_no_session_is_refused_by_name() -> None:
    leader = Leader(["a"], replicate=True)
    with pytest.raises(ValueError, match="'x'"):
        leader.hear(Report("x", "s", 3))
    assert leader.answer == Answer()


def test_a_member_cuts_an_error_so_that_its_report_is_read() -> None:
    member = Member("a", "s")
    member.wrote(written(3, "e" * 9999))
    (said,) = Report.from_values(member.report.to_values()).written
    assert said.error == "e" * 2000


def test_a_member_whose_leader_has_long_been_silent_still_sends_a_report_that_is_read() -> None:
    member = Member("a", "s")
    for step in range(500):
        member.wrote(written(step))
    said = [one.step for one in Report.from_values(member.report.to_values()).written]
    assert said == list(range(500))[-len(said) :]
    leader = Leader(["a"], replicate=False)
    assert [one.name for one in leader.hear(member.report)] == [copy_name(step, 1) for step in said]


def test_no_round_is_opened_before_every_node_has_reported_and_one_has_a_copy() -> None:
    leader = Leader(["a", "b"], replicate=True)
    assert told(leader, Report("a", "s", 10)).round == 0
    leader = Leader(["a", "b"], replicate=True)
    assert told(leader, Report("a", "s"), Report("b", "s")).round == 0
    assert told(leader, Report("b", "s", 0)) == Answer(round=1, after=0)


def test_a_round_asks_for_the_first_copy_after_the_newest_that_any_node_has() -> None:
    leader = Leader(["a", "b"], replicate=True)
    assert told(leader, Report("a", "s", 12), Report("b", "s", 10)) == Answer(round=1, after=12)


def test_a_round_that_a_node_misses_is_followed_by_one_twice_as_far_ahead_and_no_more_than_64() -> None:
    leader = begun(newest=10)
    ahead = []
    for _ in range(8):
        sent, _ = in_round(leader, 10, replicated=11)
        missed, _ = in_round(leader, 10, missed=True)
        answer = told(leader, sent, replace(missed, node="b"))
        ahead.append(answer.after - 10 + 1)
    assert ahead == [2, 4, 8, 16, 32, 64, 64, 64]
    assert leader.answer.replicated == -1
    for expected in (32, 16, 8, 4, 2, 1, 1):
        answer = told(leader, *in_round(leader, 10, replicated=11))
        assert answer.after - 10 + 1 == expected
    assert (leader.answer.replicated, leader.answer.round) == (11, 16)


def test_nodes_that_sent_different_steps_have_replicated_none() -> None:
    leader = begun()
    first, _ = in_round(leader, 12, replicated=11)
    _, second = in_round(leader, 12, replicated=12)
    assert told(leader, first, second) == Answer(round=2, after=13)


def test_what_is_replicated_never_goes_back() -> None:
    leader = begun()
    told(leader, *in_round(leader, 20, replicated=20))
    assert told(leader, *in_round(leader, 20, replicated=15)).replicated == 20


def test_a_round_is_over_when_all_nodes_are_in_it_and_not_before() -> None:
    leader = begun()
    sent, other = in_round(leader, 11, replicated=11)
    assert told(leader, sent).round == 1
    assert told(leader, replace(other, round=0)).round == 1, "what it sent was for another round"
    assert told(leader, other).round == 2


def test_a_new_leader_opens_the_round_after_the_highest_that_a_node_is_in() -> None:
    leader = Leader(["a", "b"], replicate=True)
    assert told(leader, Report("a", "s", 12, 7), Report("b", "s", 11, 6)) == Answer(round=8, after=12)
    assert told(leader, Report("a", "s", 12, 8)).round == 8, "it is in the round of this leader"


def rests(leader: Leader, times: int, *reports: Report) -> int:
    """Return the round after nodes have said the same so many times more."""
    for _ in range(times):
        told(leader, *reports)
    return leader.answer.round


def test_when_no_node_makes_copies_the_newest_that_all_have_is_asked_for_after_three_equal_reports() -> None:
    leader = begun(newest=10)
    first, second = Report("a", "s", 11, 1), Report("b", "s", 10, 1)
    assert rests(leader, 3, first, second) == 1
    assert rests(leader, 1, first) == 1
    assert rests(leader, 1, second) == 2
    assert leader.answer.after == 9, "10 is the first copy after it, and both have that"
    assert rests(leader, 3, *in_round(leader, 11)) == 2, "equal reports are counted anew in each round"


def test_a_report_that_differs_begins_the_count_of_equal_ones_anew() -> None:
    leader = begun(newest=10)
    same = Report("a", "s", 10, 1), Report("b", "s", 10, 1)
    assert rests(leader, 3, *same) == 1
    told(leader, replace(same[0], newest=11))
    assert rests(leader, 3, *same) == 1
    assert rests(leader, 1, *same) == 2


def test_nodes_that_all_have_a_copy_to_send_are_waited_for() -> None:
    leader = begun(newest=10)
    assert rests(leader, 9, Report("a", "s", 11, 1), Report("b", "s", 11, 1)) == 1


def test_what_all_have_is_sent_once() -> None:
    leader = begun(newest=10)
    told(leader, *in_round(leader, 11, replicated=11))
    assert rests(leader, 9, *in_round(leader, 11)) == 2
    told(leader, Report("a", "s", 11, 2, missed=True), Report("b", "s", 11, 2, missed=True))
    assert leader.answer == Answer(round=3, after=12, replicated=11), "it is further ahead"
    assert rests(leader, 9, *in_round(leader, 12)) == 4, "there is a newer one, and it is not far enough"


@pytest.mark.parametrize(("step", "complete"), [(5, 0), (6, 1)])
def test_a_copy_that_was_on_disk_before_the_leader_began_is_not_written_again(
    step: int, complete: int
) -> None:
    leader = Leader(["a"], replicate=False, answer=Answer(durable_step=5))
    assert leader.answer.durable_step == 5
    assert len(leader.hear(Report("a", "s", written=(written(step),)))) == complete


def test_failures_are_counted_in_a_row_and_the_newest_steps_are_told() -> None:
    leader = Leader(["a"], replicate=False)
    first, second = leader.hear(Report("a", "s", written=(written(5, "x"), written(6, "y"))))
    leader.settled(second, "y")
    leader.settled(first, "x")
    answer = leader.answer
    assert (answer.lost_step, answer.failures, answer.error) == (6, 2, "x")
    seventh, eighth = leader.hear(Report("a", "s", written=(written(7), written(8))))
    leader.settled(eighth)
    leader.settled(seventh)
    answer = leader.answer
    assert (answer.durable_step, answer.lost_step, answer.failures, answer.error) == (8, 6, 0, "")


def test_a_copy_that_is_given_up_is_complete_again_only_when_all_nodes_have_written_it_again() -> None:
    """As where another generation makes the same step under the same name."""
    leader = Leader(["a", "b"], replicate=False)
    name = written(5).name
    told(leader, Report("a", "s", written=(written(5), written(6))))
    (complete,) = leader.hear(Report("b", "s", written=(written(5),)))
    leader.settled(complete, counts=False)
    assert complete.name == name
    assert leader.hear(Report("b", "s", written=(written(5),))) == ()
    assert len(leader.hear(Report("a", "s", written=(written(5),)))) == 1
    assert len(leader.hear(Report("b", "s", written=(written(6),)))) == 1, "its other part is still known"


def test_a_copy_blocks_as_long_as_the_slowest_node_and_names_each_that_failed() -> None:
    leader = Leader(["a", "b", "c"], replicate=False)
    told(leader, Report("c", "s", written=(written(5, "disk full", blocked=0.25),)))
    told(leader, Report("a", "s", written=(written(5, "no answer", blocked=2.0),)))
    (found,) = leader.hear(Report("b", "s", written=(written(5, blocked=1.0),)))
    assert (found.name, found.session, found.blocked) == (copy_name(5, 1), "s", 2.0)
    assert found.errors == ("node a: no answer", "node c: disk full")


def test_a_node_that_could_not_write_is_not_one_that_shares_nothing() -> None:
    shared = Row(5, "0" * 32, "1" * 32, 2, "2" * 32)
    leader = Leader(["a", "b"], replicate=False)
    told(leader, Report("a", "s", written=(replace(written(5), shared=(shared,)),)))
    (found,) = leader.hear(Report("b", "s", written=(written(5, "disk full"),)))
    assert found.errors == ("node b: disk full",)


def heard(member: Member, *answers: Answer) -> Member:
    for answer in answers:
        member.hear(answer)
    return member


def made(*steps: int) -> Member:
    member = Member("a", "s")
    for step in steps:
        member.made(step)
    return member


def test_a_member_sends_nothing_before_a_round_and_then_the_first_copy_after_the_step_named() -> None:
    member = made(5, 7, 6, 8)
    assert member.wanted({5, 6, 7, 8}) == -1
    heard(member, Answer(round=1, after=5))
    assert member.wanted({6, 7, 8}) == 6


@pytest.mark.parametrize("step", [0, 9])
def test_a_member_stays_at_the_copy_that_it_has_begun_to_send_whatever_is_made_meanwhile(step: int) -> None:
    member = heard(made(step), Answer(round=1, after=-1))
    assert member.wanted({step}) == step
    for other in range(1, 999):
        member.made(other)
    assert member.wanted({step, 998}) == step


@pytest.mark.parametrize("fine", [True, False])
def test_a_member_says_how_sending_went_and_sends_nothing_more_in_that_round(fine: bool) -> None:
    member = heard(made(6), Answer(round=1, after=5))
    assert member.wanted({6}) == 6
    assert member.report.replicated == -1, "it is not sent yet"
    member.sent(5, True)
    assert member.report.replicated == -1, "another one was sent"
    member.sent(6, fine)
    assert (member.report.replicated, member.report.missed) == ((6, False) if fine else (-1, True))
    member.made(7)
    assert member.wanted({6, 7}) == -1
    heard(member, Answer(round=2, after=6))
    assert member.report == Report("a", "s", 7, 2)
    assert member.wanted({6, 7}) == 7


def test_a_member_that_does_not_hold_the_copy_any_more_has_missed_the_round() -> None:
    member = heard(made(6, 7), Answer(round=1, after=5))
    assert member.wanted({7}) == -1
    assert member.report == Report("a", "s", 7, 1, missed=True)
    assert member.wanted({6, 7}) == -1


def test_a_member_keeps_its_round_and_what_is_replicated_when_its_leader_begins_anew() -> None:
    member = heard(made(6, 9), Answer(round=3, after=5, replicated=4))
    assert member.wanted({6, 9}) == 6
    heard(member, Answer(round=1, after=8, durable_step=2))
    assert member.answer == Answer(round=3, after=5, replicated=4, durable_step=2)
    assert member.wanted({6, 9}) == 6


@pytest.mark.parametrize("answer", [Answer(durable_step=5, lost_step=3), Answer(durable_step=3, lost_step=5)])
def test_a_member_tells_of_a_copy_on_disk_until_the_leader_has_answered_for_it(answer: Answer) -> None:
    member = made()
    for step in (4, 5, 6):
        member.wrote(written(step))
    assert [one.step for one in heard(member, answer).report.written] == [6]


def test_which_copies_in_memory_must_stay() -> None:
    member = made(3, 5, 6, 7, 8, 9)
    assert member.keep({7, 9, 8}) == {8, 9}
    heard(member, Answer(round=1, after=5, replicated=3))
    assert member.wanted({3, 6, 7, 8, 9}) == 6
    assert member.keep({3, 5, 6, 7, 8, 9}) == {3, 6, 8, 9}
    assert member.keep({5, 9}) == {5, 9}
    assert member.keep(()) == set()


def test_when_what_earlier_sessions_left_in_memory_may_go() -> None:
    assert not made().supersedes(replicate=False)
    assert not made(5, 5).supersedes(replicate=False)
    assert made(5, 6).supersedes(replicate=False)
    member = made(5, 6, 7)
    assert not member.supersedes(replicate=True)
    assert heard(member, Answer(replicated=0)).supersedes(replicate=True)


@pytest.mark.parametrize("error", ["", "no room"])
@pytest.mark.parametrize("counts", [True, False], ids=["lost before", "of an earlier generation"])
def test_a_copy_that_goes_by_name_ends_by_name(counts: bool, error: str) -> None:
    """Its step is lower than what is over, or must not count for this generation."""
    leader, member = Leader(["a", "b"], replicate=False), Member("a", "s")
    (lost,) = told_all(leader, written(5))
    leader.settled(lost, "a disk that was full")
    member.hear(leader.answer)
    for turn in range(2):  # an attempt after one that was lost by name, too
        again = replace(written(5), ends=member.ends(lost.name))
        member.wrote(again)
        (complete,) = told_all(leader, again)
        assert (leader.lacking, complete.ends) == (set(), turn)
        leader.settled(complete, error, counts=counts)
        member.hear(leader.answer)
        assert (member.pending, leader.answer.lost_step) == (set(), 5)
        assert leader.answer.durable_step == (5 if counts and not error else -1)
        assert told_all(leader, again) == ()
        assert not leader.waits


def told_all(leader: Leader, one: Written) -> tuple[Complete, ...]:
    """Return what is complete when all nodes have reported a copy."""
    return sum((leader.hear(Report(node, "s", written=(one,))) for node in "ab"), ())


def test_a_node_waits_until_it_was_told_how_a_copy_ended() -> None:
    """Not until it reports that it has heard so: by then its writer may have ended."""
    leader = Leader(["a", "b"], replicate=False)
    reports = [Report(node, "s", written=(written(5),)) for node in "ab"]
    assert not leader.hear(reports[0])
    assert (leader.waits, leader.lacking) == (True, {"b"})
    (found,) = leader.hear(reports[1])
    assert leader.lacking == set()
    leader.settled(found)
    for report in reports:
        assert leader.waits
        assert leader.hear(report) == ()
    assert not leader.waits
    leader.hear(Report("a", "s", written=(written(5), written(6))))
    assert (leader.waits, leader.lacking) == (True, {"b"})
