"""One account out of the logs of several nodes: by hand, on hosts whose clocks differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

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
    TimeoutsLearned,
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

    def step(self, at: float, step: int, source: str = "") -> Node:
        self.log.append(Progress(*self._head(at), step, source))
        return self

    def waits(self, at: float) -> Node:
        self.log.append(TimeoutsLearned(*self._head(at), {"step": 9.0}, "a test"))
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


def job(*nodes: Node) -> tuple[Record, ...]:
    return merged({node.name: node.log for node in nodes})


def account(*nodes: Node) -> Ledger:
    return fold(job(*nodes))


def lines(log: Iterable[Record], base: Node) -> list[str]:
    """Return for each record the seconds since the job began, its generation, its kind and what it says."""
    found = []
    for one in log:
        said = [str(getattr(one, field.name)) for field in fields(one)[3:]]
        found.append(
            f"{one.clock - base.clock(0.0):g} g{one.generation} {type(one).__name__} {' '.join(said)}"
        )
    return found


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


def test_the_merged_log_is_the_one_that_a_single_launcher_would_have_written() -> None:
    a, b, c, s = Node("a", "host"), Node("b", booted=90.0), Node("c", "host", wall=5.0), Node("s", booted=7.0)
    a.launch(0.0).start(2.0, 1, 4.0).step(10.0, 6).saved(12.0, 8)
    b.launch(0.5).start(2.5, 1, 5.0).step(10.5, 5).saved(11.5, 8)
    c.launch(1.0).start(2.25, 1, 4.5).step(10.25, 7)
    s.launch(0.25).waits(9.0).waits(9.5).judged(14.0, "b", b.clock(13.5), 2)
    a.start(15.0, 2, 17.0, 9).loaded(16.0, 8).step(20.0, 12)
    b.start(15.5, 2, 17.5, 10).loaded(16.5, 8).step(20.5, 11)
    c.start(15.25, 2, 17.25, 9).step(20.25, 11)
    a.start(30.0, 3, 33.0, 13).ended(40.0, 20)
    b.start(30.5, 3, 32.5, 13).ended(41.0, 21)
    c.start(31.0, 3, 32.0, 13).saved(39.0, 19).ended(40.5, 22)
    s.log.append(replace(s.judged(35.0, "c", 0.0, 9).log[-2], generation=3, reason="not answered"))
    del s.log[-3:-1]
    found = [one.partition(" newest ")[0] if "30 g2" in one else one for one in lines(job(a, b, c, s), a)]
    assert found == [
        "0 g0 RunStarted run a 1 host ('train.py',) 3 a test",
        "2.5 g1 GenerationStarted 3 (7,) zygote a test",
        "5.25 g1 FirstStep 1 {'spawned': 502.5, 'first_step': 505.0} ",
        "9 g0 TimeoutsLearned {'step': 9.0} a test",
        "9.5 g0 TimeoutsLearned {'step': 9.0} a test",
        "10 g1 Progress 1  -1",
        "10.5 g1 Progress 5  -1",
        "11.5 g1 Saved 8 step-8 1 0.5 a test",
        "14 g1 FaultSeen crash b 1 -1 513.5 killed signal 9 {} ",
        "14 g1 ActionTaken restart-in-job 2 newest restart 1 of 3 0.0",
        "15.5 g2 GenerationStarted 3 (7,) zygote a test",
        "16.5 g2 Loaded 8 step-8 1 0.25 a test () ",
        "17.75 g2 FirstStep 9 {'spawned': 515.5, 'first_step': 517.5} ",
        "20 g2 Progress 9  -1",
        "20.25 g2 Progress 10  -1",
        "20.5 g2 Progress 11  -1",
        "30 g2 ActionTaken restart-in-job 3",
        "31 g3 GenerationStarted 3 (7,) zygote a test",
        "33.25 g3 FirstStep 13 {'spawned': 531.0, 'first_step': 533.0} ",
        "35 g3 FaultSeen crash c 1 -1 0.0 not answered signal 9 {} ",
        "39 g3 Saved 19 step-19 1 0.5 a test",
        "41 g3 RunEnded 22 0 every rank finished",
    ]


@pytest.mark.parametrize(
    ("steps", "first", "told"),
    [
        # Of each node, in turns: its first step, and its progress. b comes after a.
        (
            {"a": [(7, "counted"), (50, "counted")], "b": [(5, "counted"), (40, "counted")]},
            "5 counted",
            ["5", "40"],
        ),
        (
            {"a": [(7, "counted"), (50, "counted")], "b": [(1, "announced"), (9, "announced")]},
            "1 announced",
            ["9"],
        ),
        (
            {"a": [(70, "counted"), (9, "announced")], "b": [(5, "counted"), (4, "counted")]},
            "5 counted",
            ["9"],
        ),
        (
            {"a": [(1, "session"), (8, "session")], "b": [(2, "announced"), (6, "announced")]},
            "1 session",
            ["6"],
        ),
        ({"a": [(-1, "session"), (-1, "session")], "b": [(-1, "session"), (3, "session")]}, "-1 session", []),
    ],
)
def test_steps_that_the_script_announced_on_any_node_are_those_of_the_job(
    steps: dict[str, list[tuple[int, str]]], first: str, told: list[str]
) -> None:
    nodes = [Node(name) for name in steps]
    for late, node in enumerate(nodes):
        (begin, source), later = steps[node.name]
        node.launch(0.0).start(1.0, 1, 2.0 + late, begin)
        node.log[-1] = replace(node.log[-1], source=source)
        node.step(5.0 + late, *later)
    log = job(*nodes)
    assert [f"{one.step} {one.source}" for one in log if isinstance(one, FirstStep)] == [first]
    assert [str(one.step) for one in log if isinstance(one, Progress)] == told


@pytest.mark.parametrize(
    ("node", "at", "since", "expected"),
    [
        ("b", 5.0, 93.0, 3.0),  # b's clock before its host was booted again
        ("b", 20.0, 26.0, 19.0),  # and after
        ("b", 13.0, 20.0, 13.0),  # in the instant at which its agent was started again
        ("b", 1.0, 90.5, 0.5),  # before b wrote anything
        ("b", 5.0, 99.0, 5.0),  # no fault is seen before it happens
        ("gone", 20.0, 517.0, 17.0),  # a node without a log: the leader's clock
        ("b", 20.0, 0.0, -500.0),  # it is not known when progress ended
        ("b", 7.5, 0.5, -89.5),
    ],
)
def test_the_end_of_progress_is_placed_by_the_clock_of_the_node_that_saw_it(
    node: str, at: float, since: float, expected: float
) -> None:
    a, b, again = Node("a"), Node("b", booted=90.0), Node("b", boot="again", booted=7.0)
    a.launch(0.0).start(1.0, 1, 2.0).judged(at, node, since, 2).ended(40.0, 9)
    b.launch(2.0)
    b.log += again.launch(13.0).log
    [fault] = [one for one in job(a, b) if isinstance(one, FaultSeen)]
    assert fault.since - a.clock(0.0) == expected


@pytest.mark.parametrize(
    ("since", "moved"), [(69.0, 89.0), (70.0, 90.0), (0.5 - 500.0, 20.5 - 500.0), (-500.0, -500.0)]
)
def test_a_leader_whose_clock_is_late_answers_no_fault_before_the_action_that_began_its_generation(
    since: float, moved: float
) -> None:
    a, b = Node("a", "host"), Node("b", "host")
    a.launch(0.0).start(1.0, 1, 2.0).judged(90.0, "b", 0.0, 2)
    b.launch(0.0).start(1.0, 1, 2.0).start(61.0, 2, 62.0).judged(70.0, "b", b.clock(since), 3)
    b.start(71.0, 3, 72.0).ended(80.0, 9)
    told = [one for one in job(a, b) if isinstance(one, (FaultSeen, ActionTaken, GenerationStarted))]
    assert [(type(one).__name__, one.generation, one.clock - 500.0) for one in told] == [
        ("GenerationStarted", 1, 1.0),
        ("FaultSeen", 1, 90.0),
        ("ActionTaken", 1, 90.0),
        ("GenerationStarted", 2, 90.0),
        ("FaultSeen", 2, 90.0),
        ("ActionTaken", 2, 90.0),
        ("GenerationStarted", 3, 90.0),
    ]
    assert [one.since - 500.0 for one in told if isinstance(one, FaultSeen)] == [-500.0, moved]


@pytest.mark.parametrize(("begins", "launches"), [(9.0, 1), (10.0, 1), (10.5, 2)])
def test_a_node_that_starts_after_the_end_of_all_others_starts_the_job_again(
    begins: float, launches: int
) -> None:
    a, b = Node("a"), Node("b")
    a.launch(0.0).start(1.0, 1, 2.0).step(10.0, 6)
    b.launch(begins)
    assert sum(isinstance(one, RunStarted) for one in job(a, b)) == launches
