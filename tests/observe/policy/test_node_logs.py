"""One account out of the logs of several nodes: by hand, on hosts whose clocks differ."""

from __future__ import annotations

import pytest

from outlast.observe.policy.goodput import AGENT_DEATH, Category, Ledger, fold
from outlast.observe.policy.node_logs import merged
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Note,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    TrustChanged,
)


class Node:
    """Writes a node's log; seconds are those since the job began."""

    def __init__(self, name: str, boot: str = "", booted: float = 500.0, wall: float = 0.0) -> None:
        self.name, self._boot, self._booted, self._wall = name, boot or f"boot of {name}", booted, wall
        self.log: list[Record] = []
        self.generation = 0

    def clock(self, at: float) -> float:
        return at + self._booted

    def _head(self, at: float) -> tuple[float, float, int]:
        return (1e6 + at + self._wall, self.clock(at), self.generation)

    def launch(self, at: float, pid: int = 1) -> Node:
        self.generation = 0
        about = ("run", self.name, pid, self._boot, ("train.py",), 3, "a test")
        self.log.append(RunStarted(*self._head(at), *about))
        return self

    def start(self, at: float, generation: int, first_step: float = 0.0, step: int = 1) -> Node:
        self.generation = generation
        self.log.append(GenerationStarted(*self._head(at), 3, (7,), "zygote", "a test"))
        if first_step:
            marks = {"spawned": self.clock(at), "first_step": self.clock(first_step)}
            self.log.append(FirstStep(*self._head(first_step + 0.25), step, marks))
        return self

    def step(self, at: float, step: int) -> Node:
        self.log.append(Progress(*self._head(at), step))
        return self

    def saved(self, at: float, step: int) -> Node:
        self.log.append(Saved(*self._head(at), step, f"step-{step}", 1, 0.5, "a test"))
        return self

    def loaded(self, at: float, step: int) -> Node:
        self.log.append(Loaded(*self._head(at), step, f"step-{step}", 1, 0.25, "a test"))
        return self

    def judged(self, at: float, node: str, since: float, following: int) -> Node:
        fault = ("crash", node, 1, -1, since, "killed", "signal 9")
        self.log.append(FaultSeen(*self._head(at), *fault))
        self.log.append(ActionTaken(*self._head(at), "restart-in-job", following, "newest", "restart 1 of 3"))
        return self

    def ended(self, at: float, step: int, code: int = 0) -> Node:
        self.log.append(RunEnded(*self._head(at), step, code, "every rank finished"))
        return self


def account(*nodes: Node) -> Ledger:
    return fold(merged({node.name: node.log for node in nodes}))


def test_each_thing_is_told_once_and_the_slowest_node_counts() -> None:
    a, b = Node("a", booted=500.0), Node("b", booted=90000.0, wall=0.0)
    a.launch(0.0).start(2.0, 1, 4.0).step(10.0, 6).saved(12.0, 8)
    b.launch(1.0).start(2.5, 1, 5.0).step(10.5, 5)
    a.judged(14.0, "b", b.clock(13.5), 2)
    a.start(14.5, 2, 17.0, step=9).loaded(16.0, 8).step(20.0, 12).ended(21.0, 20)
    b.start(14.5, 2, 17.5, step=9).loaded(16.5, 8).step(20.0, 11).ended(21.5, 20)
    [loaded] = [one for one in merged({"a": a.log, "b": b.log}) if isinstance(one, Loaded)]
    assert loaded.clock == a.clock(16.5)
    ledger = account(a, b)
    assert (ledger.launches, ledger.generations, ledger.wall) == (1, 2, 21.5)
    assert ledger.end is not None
    assert (ledger.end.exit_code, ledger.end.step) == (0, 20)
    [incident] = ledger.incidents
    assert (incident.kind, incident.node, incident.generation, incident.step) == ("crash", "b", 1, 8)
    assert (incident.detected_after, incident.running_again_after) == (0.5, 17.5 - 13.5)
    assert ledger.seconds[Category.STARTING] == 5.0
    assert ledger.seconds[Category.SAVING] == 0.5
    assert ledger.seconds[Category.LOADING] == 0.25
    assert sum(ledger.seconds.values()) == ledger.wall


def test_what_two_leaders_wrote_of_one_fault_is_one_incident() -> None:
    a, b = Node("a", boot="same"), Node("b", boot="same")
    for node in (a, b):
        node.launch(0.0).start(1.0, 1, 2.0)
        node.judged(5.0 + (node is b), "a", node.clock(4.5), 2).start(7.0, 2, 8.0)
        node.log.append(TrustChanged(*node._head(8.5), 3, "local/step-3", "proven", "a test"))
    ledger = account(a, b)
    assert len(ledger.incidents) == 1
    assert ledger.incidents[0].running_again_after == 3.5
    assert len(ledger.trust) == 1


@pytest.mark.parametrize("off", [-30.0, 0.0, 30.0])
def test_clocks_that_are_set_wrongly_put_no_generation_before_its_action(off: float) -> None:
    a, b = Node("a"), Node("b", booted=7.0, wall=off)
    a.launch(0.0).start(1.0, 1, 2.0).judged(60.0, "b", 0.0, 2).start(61.0, 2, 62.0).ended(100.0, 9)
    b.launch(0.0).start(1.0, 1, 2.0).start(61.0, 2, 62.0).saved(65.0, 20).ended(100.0, 9)
    log = merged({"a": a.log, "b": b.log})
    action = next(one for one in log if isinstance(one, ActionTaken))
    second = [one for one in log if one.generation == 2 and not isinstance(one, ActionTaken)]
    assert all(one.clock >= action.clock for one in second)
    ledger = fold(log)
    assert len(ledger.incidents) == 1
    assert ledger.incidents[0].running_again_after is not None
    assert sum(ledger.seconds.values()) == ledger.wall


def test_a_generation_in_which_one_node_made_no_step_never_ran() -> None:
    a, b = Node("a"), Node("b")
    a.launch(0.0).start(1.0, 1, 2.0).judged(5.0, "b", 0.0, 2).start(6.0, 2, 7.0)
    b.launch(0.0).start(1.0, 1, 2.0).start(6.0, 2)
    ledger = account(a, b)
    assert [one.running_again_after for one in ledger.incidents] == [None]
    assert ledger.end is None


def test_a_spare_that_coordinates_says_nothing_of_its_own_generation() -> None:
    a, b = Node("a"), Node("spare")
    a.launch(0.0).start(1.0, 1, 2.0).start(11.0, 2, 12.0).ended(20.0, 9)
    b.launch(0.0).judged(10.0, "a", 0.0, 2).ended(20.0, -1)
    ledger = account(a, b)
    assert [(one.generation, one.running_again_after) for one in ledger.incidents] == [(1, 2.0)]
    assert ledger.end is not None
    assert ledger.end.step == 9


def test_a_node_that_comes_back_is_no_other_launch_and_growing_is_no_incident() -> None:
    a, b = Node("a"), Node("b")
    a.launch(0.0).start(1.0, 1, 2.0).judged(10.0, "b", 0.0, 2).start(10.5, 2, 11.0)
    a.saved(30.0, 40).start(31.0, 3, 33.0, step=41).loaded(32.0, 40).ended(50.0, 90)
    b.launch(0.0).start(1.0, 1, 2.0).step(9.0, 7)
    b.launch(20.0, pid=2).start(31.5, 3, 34.0, step=41).ended(50.0, 90)
    ledger = account(a, b)
    assert (ledger.launches, ledger.generations, len(ledger.incidents)) == (1, 3, 1)
    assert ledger.seconds[Category.RECOVERING] == (11.0 - 10.0) + (34.0 - 31.0) - 0.25


def test_a_job_that_was_killed_as_a_whole_died_once() -> None:
    a, b = Node("a"), Node("b")
    for node in (a, b):
        node.launch(0.0).start(1.0, 1, 2.0).step(9.0, 7)
        node.launch(30.0, pid=2).start(31.0, 2, 32.0).ended(40.0, 9)
    ledger = account(a, b)
    assert ledger.launches == 2
    assert [one.kind for one in ledger.incidents] == [AGENT_DEATH]
    assert ledger.seconds[Category.DOWN] == 30.0 - 9.0


def test_a_job_in_which_one_node_has_not_ended_goes_on() -> None:
    a, b = Node("a"), Node("late")
    a.launch(0.0).start(1.0, 1, 2.0).step(9.0, 7)
    b.launch(3.0).ended(4.0, -1, code=93)
    b.log.append(Note(*b._head(4.0), "turned away"))
    assert account(a, b).end is None
    assert account() == fold(())
