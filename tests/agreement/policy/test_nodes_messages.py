"""What nodes and the leader send each other about steps, between clocks that have nothing in common."""

from __future__ import annotations

import math

import pytest

from outlast.agreement.policy.nodes import (
    LeaderSteps,
    proposal_received,
    proposal_sent,
    report_sent,
    status_received,
)
from outlast.agreement.policy.steps import Proposal, Stage, Status, Want
from outlast.agreement.policy.votes import TIERS

SECONDS = {TIERS[0]: 0.0, TIERS[2]: 3.5}  # nothing was measured of the one between
HERE, THERE = 1000.0, 5.0


@pytest.mark.parametrize("stage", list(Stage))
def test_a_proposal_means_the_same_on_another_node(stage: Stage) -> None:
    slow, before = ((1, 500),), ((0, 700),)
    said = Proposal(7, stage, 3, 40, Want.SAVE | Want.HOLD, 1050.0, 1060.0, SECONDS, slow, before)
    sent = proposal_sent(said, HERE)
    assert sent is not None
    got = proposal_received(sent, THERE)
    assert got == Proposal(7, stage, 3, 40, Want.SAVE | Want.HOLD, 55.0, 65.0, SECONDS, slow, before)
    assert got.ticket == said.ticket


def test_a_proposal_without_an_end_has_none_on_any_clock() -> None:
    sent = proposal_sent(Proposal(1, Stage.PROPOSED, 1, 9), HERE)
    assert sent is not None
    got = proposal_received(sent, THERE)
    assert (got.ends, got.limit, got.seconds) == (math.inf, math.inf, {})
    assert proposal_sent(None, HERE) is None


def test_a_report_means_the_same_to_the_leader() -> None:
    status = Status("n1", 4, 3, 40, 7, True, Want.DUE, 1050.0, 1060.0, SECONDS, apart=True)
    said = Proposal(7, Stage.PROPOSED, 3, 40, ends=1070.0)
    sent = report_sent(status, said, (2, 5, "s"), HERE)
    assert (sent.term, sent.generation, sent.session) == (2, 5, "s")
    got = status_received("n1", sent, THERE)
    assert got == Status("n1", 4, 3, 40, 7, True, Want.DUE, 55.0, 65.0, SECONDS, apart=True)
    assert sent.said is not None
    assert proposal_received(sent.said, THERE).ends == 75.0


def test_a_leader_asks_again_until_every_node_has_reported() -> None:
    found = LeaderSteps(1, ("a", "b"))
    assert not found.busy, "nobody asks for anything"
    found.take(Status("a", 1, 1, 6), None)
    assert found.busy
    found.take(Status("b", 1, 1, 6), None)
    assert not found.busy


def test_a_leader_has_all_ranks_compute_the_same_product() -> None:
    found = LeaderSteps(1, ("a",))
    found.benchmark()
    assert found.busy
    found.take(Status("a", 1, 1, 6), None)
    assert found.current is not None
    assert (found.current.wants, found.current.step) == (Want.BENCHMARK, 8)
