"""Faults that wait to be answered: none of a rank that has ended is forgotten, in any order of events."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.cluster.policy.events import Heartbeat, Judged, LeadOutcome, NodeEvent
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import JobSpec, Joined, Member
from outlast.cluster.policy.messages import NodeStatus
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.diagnosis import GUESSED, WAITS
from outlast.recovery.policy.events import Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import AllStarted, CommitSeen, StepsDone

NODES = ("n0", "n1", "n2")
PATIENCE = 1.0  # seconds; a victim's error waits 0.3 s, a node's status 0.5 s
VICTIM = "RuntimeError: Connection closed by peer"


def running() -> JobController:
    lead = JobController(JobSpec("run", "1", "", 1, 2, 2, 1), FaultToleranceOptions(), 0.0, 0.0)
    for name in NODES:
        lead.handle(Joined(Member(name, f"{name}:1", 1, "run", "1", "", incarnation="1")), 0.0)
        beat(lead, 0.0, name)
    for name in NODES[:2]:
        lead.handle(NodeEvent(name, 1, AllStarted(1)), 0.1)
    return lead


def beat(lead: JobController, now: float, *names: str, able: bool | None = None) -> list[LeadOutcome]:
    status = NodeStatus(5001, able)
    return [one for name in names for one in lead.handle(Heartbeat(name, "1", status, 0), now)]


def answered(said: Iterable[LeadOutcome]) -> list[Judged]:
    return [one for one in said if isinstance(one, Judged) and one.action.kind is not RecoveryAction.NONE]


def hang(node: str, step: int, rank: int = -1, generation: int = 1) -> Fault:
    evidence = (WAITS, GUESSED)
    return Fault(FaultKind.HANG, node, rank, generation, step, "silent", "hang in step", evidence=evidence)


def error(node: str, step: int, text: str = VICTIM, able: bool | None = None, generation: int = 1) -> Fault:
    rank = int(node[1:])
    return Fault(FaultKind.ERROR, node, rank, generation, step, text, text, exit_code=1, reenters=able)


def failing(node: str, step: int, generation: int = 1) -> Fault:
    return Fault(FaultKind.FAILING, node, -1, generation, step, "XID 79", f"{node} is failing")


Step = tuple[str, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hang", "named", "victim", "error", "able", "failing", "steps", "saved", "beat"]),
        st.sampled_from(NODES[:2]),
        st.integers(0, 20),  # tenths of a second until the next event
    ),
    max_size=14,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_the_end_of_a_rank_is_answered_soon_in_any_order_of_events(steps: list[Step]) -> None:
    lead, now, done = running(), 1.0, dict.fromkeys(NODES[:2], 10)
    since: float | None = None  # the first end of a rank
    for what, node, pause in [*steps, ("beat", "n0", 20)]:
        step = done[node]
        match what:
            case "hang" | "named":
                event = hang(node, step, int(node[1:]) if what == "named" else -1)
                said = lead.handle(NodeEvent(node, 1, event), now)
            case "victim" | "error" | "able":
                text = VICTIM if what == "victim" else "RuntimeError: boom"
                ended = error(node, step, text, able=what == "able" or None)
                said = lead.handle(NodeEvent(node, 1, ended), now)
                since = now if since is None else since
            case "failing":
                said = lead.handle(NodeEvent(node, 1, failing(node, step)), now)
            case "steps":
                done[node] += 1
                said = lead.handle(NodeEvent(node, 1, StepsDone(done[node])), now)
            case "saved":
                said = lead.handle(NodeEvent(node, 1, CommitSeen(step, f"step-{step:09d}.g1")), now)
            case _:
                said = beat(lead, now, node)
        until = now + pause / 10
        while True:
            if answered(said):
                return
            assert since is None or now < since + PATIENCE, "forgotten"
            if now >= until:
                break
            now = min(until, max(now + 0.001, lead.deadline))
            said = [*beat(lead, now, *NODES), *lead.tick(now)]
    assert since is None


def test_the_error_of_a_rank_outlives_a_guessed_hang_that_is_over() -> None:
    lead = running()
    for name in NODES[:2]:
        lead.handle(NodeEvent(name, 1, StepsDone(10)), 0.2)
    assert answered(lead.handle(NodeEvent("n0", 1, hang("n0", 10)), 1.0)) == []
    lead.handle(NodeEvent("n1", 1, StepsDone(11)), 2.0)
    assert answered(lead.handle(NodeEvent("n1", 1, error("n1", 11)), 2.2)) == []
    lead.handle(NodeEvent("n0", 1, StepsDone(11)), 2.4)
    (judged,) = answered(lead.tick(2.5))
    assert (judged.fault and judged.fault.kind, judged.action.kind) == (
        FaultKind.ERROR,
        RecoveryAction.RESTART_IN_JOB,
    )


@pytest.mark.parametrize("rank", [-1, 0])
def test_what_was_reported_before_a_victims_error_is_blamed_when_that_is_due(rank: int) -> None:
    lead = running()
    lead.handle(NodeEvent("n0", 1, hang("n0", 10, rank)), 1.0)
    lead.handle(NodeEvent("n1", 1, error("n1", 10)), 2.0)
    (judged,) = answered(lead.tick(2.3))
    assert judged.fault is not None
    assert judged.fault.kind is FaultKind.HANG


def test_two_nodes_that_fail_save_once_and_are_both_kept_in_mind() -> None:
    lead = running()
    lead.handle(NodeEvent("n0", 1, failing("n0", 10)), 1.0)
    assert lead.held(12, 1.1) == []
    lead.handle(NodeEvent("n1", 1, failing("n1", 10)), 1.2)
    assert answered(lead.handle(NodeEvent("n0", 1, CommitSeen(11, "step-000000011.g1")), 1.3)) == []
    said = lead.handle(NodeEvent("n0", 1, CommitSeen(12, "step-000000012.g1")), 1.4)
    (judged,) = answered(said)
    assert (judged.action.kind, judged.action.exclude) == (RecoveryAction.REPLACE_NODE, "n0")
