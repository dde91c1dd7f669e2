"""Agents of several nodes on a simulated network and clock: the job goes on, and in one place only."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outlast.cluster.policy.election import Elector
from outlast.cluster.policy.events import Reset, SendMessage, Start, timing_for
from outlast.cluster.policy.messages import (
    MESSAGES,
    AppendEntries,
    Join,
    JoinRefused,
    Message,
    Record,
    Vote,
    VoteRequest,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.diagnosis import GUESSED, WAITS
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import StopRequested
from tests.cluster.builders import member, of_kind, only, spec
from tests.simulation.fencing import overlaps
from tests.simulation.fleet import Fleet

SEEDS = 200
FIRST = [0, *(pytest.param(at, marks=pytest.mark.long) for at in range(25, SEEDS, 25))]


def _running(fleet: Fleet, generation: int, nodes: int) -> bool:
    newest = fleet.generation()
    return newest > generation and fleet.steps.get(newest, 0) > 0 and len(fleet.active()) >= nodes


def _begun(count: int = 4, least: int = 2, most: int = 3, spares: int = 1) -> Fleet:
    fleet = Fleet(count, least, most, spares=spares)
    assert fleet.run_until(lambda: fleet.steps.get(1, 0) > 20, 30)
    fleet.run(fleet.now + 2)
    return fleet


def _victim(fleet: Fleet) -> str:
    """Return a node with ranks that does not coordinate."""
    return next(name for name in fleet.active() if name not in fleet.leaders())


def test_a_full_membership_starts_at_once_and_waits_for_nobody_else() -> None:
    fleet = Fleet(4, 2, 3, spares=1)
    assert fleet.run_until(lambda: len(fleet.active()) == 3, 2.0)
    assert fleet.leaders() == ("n0",)


def test_a_partial_membership_starts_after_its_grace() -> None:
    fleet = Fleet(2, 2, 3, spares=1)
    fleet.run(1000 + 25)
    assert not fleet.active()
    assert fleet.run_until(lambda: len(fleet.active()) == 2, 10)


@pytest.mark.parametrize(
    ("fault", "within"),
    [
        ("worker", 1.0),
        ("agent", 1.5),
        ("power", 6.0),
        ("cut", 6.0),
        ("stop", 6.0),
        ("leader", 5.0),
        ("leader's power", 6.0),
        ("leader cut", 6.0),
        ("leader stopped", 6.0),
    ],
)
def test_a_fault_costs_one_generation_and_a_spare_takes_the_place(fault: str, within: float) -> None:
    fleet = _begun()
    (leader,) = fleet.leaders()
    name = leader if fault.startswith("leader") else _victim(fleet)
    if fault == "worker":
        fleet.fail(name)
    elif fault in ("agent", "leader"):
        fleet.kill(name)
    elif "power" in fault:
        fleet.kill(name, power=True)
    elif "cut" in fault:
        fleet.cut(name)
    else:
        fleet.stop(name)
    assert fleet.run_until(lambda: _running(fleet, 1, 3), within), "\n".join(fleet.log)
    assert fleet.generation() == 2, "\n".join(fleet.log)
    if fault != "worker":
        assert name not in fleet.active()
    assert not overlaps(fleet.commits)


@pytest.mark.parametrize("who", ["a node", "the leader"])
def test_a_flap_shorter_than_the_timeout_restarts_nothing(who: str) -> None:
    fleet = _begun()
    name = fleet.leaders()[0] if who == "the leader" else _victim(fleet)
    fleet.cut(name)
    fleet.run(fleet.now + 2)
    fleet.heal()
    before = fleet.steps[1]
    assert fleet.run_until(lambda: fleet.steps[1] > before + 20, 10), "\n".join(fleet.log)
    assert fleet.generation() == 1
    assert len(fleet.commits) > 2


@pytest.mark.parametrize("how", ["cut", "stop"])
@pytest.mark.parametrize("who", ["a node", "the leader"])
def test_a_node_that_comes_back_is_a_spare_and_cannot_commit_what_it_ran(how: str, who: str) -> None:
    fleet = _begun()
    name = fleet.leaders()[0] if who == "the leader" else _victim(fleet)
    (fleet.cut if how == "cut" else fleet.stop)(name)
    assert fleet.run_until(lambda: _running(fleet, 1, 3), 8)
    fleet.run(fleet.now + 12)
    fleet.heal()
    if how == "stop":
        fleet.resume(name)
    fleet.run(fleet.now + 10)
    assert fleet.nodes[name].running == 2, "\n".join(fleet.log)
    assert not fleet.nodes[name].started
    assert len(fleet.leaders()) == 1
    assert not overlaps(fleet.commits)


def test_the_job_grows_again_at_a_safe_step_when_a_node_comes_back() -> None:
    fleet = _begun(count=3, spares=0)
    name = _victim(fleet)
    fleet.kill(name)
    assert fleet.run_until(lambda: _running(fleet, 1, 2), 3), "\n".join(fleet.log)
    fleet.start(name)
    assert fleet.run_until(lambda: _running(fleet, 2, 3), 10), "\n".join(fleet.log)


def test_the_job_does_not_grow_before_the_newcomer_could_begin_at_once() -> None:
    fleet = _begun(count=3, spares=0)
    name = _victim(fleet)
    fleet.kill(name)
    assert fleet.run_until(lambda: _running(fleet, 1, 2), 3)
    fleet.start(name, imports=8.0)
    fleet.run(fleet.now + 7.5)
    assert fleet.generation() == 2, "\n".join(fleet.log)
    assert fleet.run_until(lambda: _running(fleet, 2, 3), 4), "\n".join(fleet.log)


def test_the_founder_that_begins_anew_joins_the_job_that_goes_on_without_it() -> None:
    fleet = _begun()
    fleet.kill("n0")
    fleet.start("n0")
    assert fleet.run_until(lambda: _running(fleet, 1, 3), 15), "\n".join(fleet.log)
    fleet.run(fleet.now + 10)
    assert len(fleet.leaders()) == 1
    assert fleet.nodes["n0"].running == fleet.generation(), "\n".join(fleet.log)


def test_two_nodes_survive_the_leaders_agent_when_it_is_started_again() -> None:
    fleet = _begun(count=2, most=2, spares=0)
    youngest = fleet.generation()
    fleet.kill("n0")
    fleet.run(fleet.now + 1)
    fleet.start("n0")
    assert fleet.run_until(lambda: _running(fleet, youngest, 2), 30), "\n".join(fleet.log)
    assert not overlaps(fleet.commits)


@pytest.mark.parametrize("lost", [("n1", "n2"), ("n0", "n1"), ("n0", "n1", "n2")])
def test_a_job_that_lost_a_majority_of_its_agents_goes_on_when_they_are_started_again(
    lost: tuple[str, ...],
) -> None:
    fleet = _begun(count=3, least=1, spares=0)
    for name in lost:
        fleet.kill(name)
    fleet.run(fleet.now + 8)
    for name in lost:
        fleet.start(name)
    assert fleet.run_until(lambda: _running(fleet, 1, 3), 60), "\n".join(fleet.log)
    assert not overlaps(fleet.commits)


def test_an_agent_that_is_asked_by_others_that_have_begun_anew_does_so_once_no_majority_can_be() -> None:
    fleet = _begun(count=3, least=1, spares=0)
    for name in ("n1", "n2"):
        fleet.kill(name)
    fleet.run(fleet.now + 15)
    left = fleet.nodes["n0"].cluster_node
    assert left is not None
    said = {}
    for name in ("n1", "n2"):
        said[name] = left.handle(f"{name}#2", Join(member(name, "2", address=f"{name}:7"), 0, 0), fleet.now)
    assert not said["n1"]
    (order,) = said["n2"]
    assert isinstance(order, Reset)
    assert order.after >= 1


def test_every_agent_learns_how_the_job_ended() -> None:
    fleet = Fleet(4, 2, 3, spares=1, steps=30)
    assert fleet.run_until(lambda: all(node.ending for node in fleet.nodes.values()), 20)
    assert {node.ending.exit_code for node in fleet.nodes.values() if node.ending} == {0}
    leader = fleet.nodes[fleet.leaders()[0]].cluster_node
    assert leader is not None
    assert leader.settled()


def test_all_agents_end_though_the_leader_dies_when_one_other_knows_of_the_end() -> None:
    fleet = _begun(count=3, spares=0)

    def ended(name: str) -> bool:
        fleet.leave()
        return fleet.nodes[name].ending is not None

    fleet.cut("n2")
    fleet.tell("n0", StopRequested(15))
    assert fleet.run_until(lambda: ended("n1"), 1)
    assert not ended("n2")
    fleet.kill("n0")
    fleet.heal()
    assert fleet.run_until(lambda: ended("n2"), 10), "\n".join(fleet.log)
    assert fleet.run_until(lambda: ended("n2") and fleet.nodes["n1"].cluster_node is None, 2)


@pytest.mark.parametrize("nodes", [2, 100, 101, 500, 501, 1250])
@pytest.mark.parametrize("ping_timeout", [1.0, 2.0, 5.0, 60.0])
def test_a_node_is_asked_twice_at_least_before_its_silence_counts(nodes: int, ping_timeout: float) -> None:
    timing = timing_for(nodes, ping_timeout)
    assert 2 * timing.interval <= ping_timeout
    assert timing.lease >= 5 * timing.interval
    assert timing.lease < timing.promise < 1.5 * timing.lease, "no vote comes before a lease is over"
    assert timing.stagger <= timing.lease / 2, "several can try before the promise that follows is over"


def test_one_node_more_than_is_wanted_is_turned_away() -> None:
    fleet = Fleet(5, 2, 3, spares=1)
    assert fleet.run_until(lambda: any(node.turned_away for node in fleet.nodes.values()), 10)
    assert sum(bool(node.turned_away) for node in fleet.nodes.values()) == 1


def _do(fleet: Fleet, what: str, name: str, dice: random.Random) -> None:
    node = fleet.nodes[name]
    match what:
        case "cut":
            fleet.cut(name)
        case "cut two":
            fleet.cut(*dice.sample(list(fleet.nodes), 2))
        case "heal":
            fleet.heal()
        case "stop":
            fleet.stop(name)
        case "resume" if node.stopped:
            fleet.resume(name)
        case "kill" | "power" if node.cluster_node is not None:
            fleet.kill(name, power=what == "power")
        case "start" if node.cluster_node is None:
            fleet.start(name)
        case "fail" if node.started:
            fleet.fail(name)


def _torment(fleet: Fleet, dice: random.Random) -> None:
    """Let a few things happen to a job, at random moments; at the end everything is well again."""
    for _ in range(dice.randint(2, 6)):
        fleet.run(fleet.now + dice.uniform(0.1, 6.0))
        name = dice.choice(list(fleet.nodes))
        what = dice.choice(["cut", "cut two", "heal", "stop", "resume", "kill", "power", "start", "fail"])
        fleet.log.append(f"{fleet.now - 1000:7.2f} {what} {name}")
        _do(fleet, what, name, dice)
    fleet.heal()
    fleet.log.append(f"{fleet.now - 1000:7.2f} everything is well again")
    for name, node in fleet.nodes.items():
        if node.stopped:
            fleet.resume(name)
        if node.cluster_node is None or node.turned_away:
            fleet.start(name)


def _play(seed: int) -> Fleet:
    dice = random.Random(seed)
    fleet = Fleet(4, 2, 3, spares=1, seed=seed)
    fleet.run_until(lambda: fleet.steps.get(1, 0) > 5, 30)
    _torment(fleet, dice)
    return fleet


def _saves_again(fleet: Fleet) -> bool:
    count = len(fleet.commits)
    return fleet.run_until(lambda: len(fleet.commits) > count + 2, 60)


@pytest.mark.parametrize("first", FIRST)
def test_no_two_generations_ever_commit_at_once_and_the_job_comes_back(first: int) -> None:
    for seed in range(first, first + 25):
        fleet = _play(seed)
        assert not overlaps(fleet.commits), (seed, overlaps(fleet.commits))
        assert _saves_again(fleet), f"seed {seed}\n" + "\n".join(fleet.log)
        assert not overlaps(fleet.commits), (seed, overlaps(fleet.commits))


def test_a_node_that_missed_the_end_of_its_job_is_part_of_the_one_that_began_anew() -> None:
    fleet = _begun()
    fleet.cut("n3")
    fleet.run(fleet.now + 1)
    for name in ("n0", "n1", "n2"):
        fleet.kill(name, power=True)
    for name in ("n0", "n1", "n2"):
        fleet.start(name)
    assert fleet.run_until(lambda: _running(fleet, 1, 3), 60), fleet.log
    fleet.heal()
    newest = fleet.generation()
    assert fleet.run_until(lambda: fleet.nodes["n3"].running >= newest, 30), fleet.log


def _lose_the_first_node(seed: int) -> Fleet:
    """Cut the node off that has rank 0, with saves on their way to a disk that all reach."""
    fleet = Fleet(4, 2, 3, spares=1, seed=seed)
    fleet.run_until(lambda: fleet.steps.get(1, 0) > 100, 30)
    fleet.cut(fleet.active()[0])
    fleet.run(fleet.now + 14)
    return fleet


def test_what_a_node_had_on_its_way_to_disk_when_it_was_cut_off_is_not_committed() -> None:
    for seed in range(10):
        fleet = _lose_the_first_node(seed)
        assert fleet.generation() == 2
        assert not overlaps(fleet.commits), (seed, overlaps(fleet.commits))


def test_the_checker_notices_agents_that_commit_without_the_right_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(elector: Elector) -> tuple[int, float]:
        return 0 if elector.record is None else elector.record.generation, float("inf")

    monkeypatch.setattr(Elector, "rights", property(always))
    assert any(overlaps(_lose_the_first_node(seed).commits) for seed in range(10))


def _hangs(fleet: Fleet, name: str, *seen: tuple[str, str]) -> None:
    node = fleet.nodes[name]
    step = fleet.steps[node.running]
    words = "no heartbeat for 1.5 seconds"
    fleet.tell(name, Fault(FaultKind.HANG, name, 0, node.running, step, words, "hang", evidence=seen))


def test_ranks_that_wait_while_the_network_is_down_for_a_moment_are_not_taken_for_hung() -> None:
    fleet = _begun()
    fleet.cut(_victim(fleet))
    fleet.run(fleet.now + 1.5)
    _hangs(fleet, "n0", WAITS, GUESSED)
    fleet.run(fleet.now + 0.5)
    fleet.heal()
    fleet.run(fleet.now + 12)
    assert fleet.generation() == 1, "\n".join(fleet.log)


@pytest.mark.parametrize("seen", [(WAITS, GUESSED), (WAITS,), ()])
def test_ranks_that_wait_for_ever_are_restarted(seen: tuple[tuple[str, str], ...]) -> None:
    fleet = _begun()
    fleet.freeze()
    fleet.run(fleet.now + 1.5)
    _hangs(fleet, "n0", *seen)
    assert fleet.run_until(lambda: fleet.generation() == 2, 6.5 if GUESSED in seen else 1.5)


def test_the_rank_that_does_not_wait_is_blamed_before_those_that_do() -> None:
    fleet = _begun()
    fleet.freeze()
    _hangs(fleet, "n0", WAITS)
    _hangs(fleet, _victim(fleet))
    assert fleet.run_until(lambda: fleet.generation() == 2, 2)
    assert "after hang on n0" not in "\n".join(fleet.log)


class _Voter:
    """An agent that votes, and the messages that two jobs of its name write to it."""

    def __init__(self) -> None:
        terms, start = spec(2, 3), Start(False, ("f:1",))
        self.cluster_node = ClusterNode(member("w"), terms, FaultToleranceOptions(), start, (1000.0, 0.0))
        self.silence = 2 * timing_for(3, terms.ping_timeout).promise + 1.0
        self.now = 1000.0

    def ping(self, sender: str, session: str, record: Record, *, whole: bool = True) -> list[Message]:
        told = record if whole else None
        ping = AppendEntries(record.term, self.now, record.key, committed=False, record=told, session=session)
        return self._take(sender, ping)

    def asks(self, sender: str, session: str, term: int, key: tuple[int, int]) -> bool:
        request = VoteRequest(term, key, pre_vote=False, session=session)
        return any(isinstance(one, Vote) and one.granted for one in self._take(sender, request))

    def _take(self, sender: str, message: Message) -> list[Message]:
        orders = self.cluster_node.handle(sender, MESSAGES.read(MESSAGES.write(message)), self.now)
        return [one.message for one in orders if isinstance(one, SendMessage)]


def _record(term: int, version: int, *voters: str) -> Record:
    names = frozenset(voters)
    return Record(term, version, 1, names, names, "", (names,))


def test_a_voter_that_flaps_between_two_jobs_of_its_name_does_not_vote_twice_in_a_term() -> None:
    voter = _Voter()
    first = _record(1, 2, "f#1", "v#1", "w#1")
    voter.ping("f#1", "f#1", first)  # in nobody's knowledge in force: it may still leave this job
    voter.now += voter.silence
    assert voter.asks("v#1", "f#1", 2, first.key)
    voter.now += voter.silence
    voter.ping("f#2", "f#2", _record(1, 1, "f#2"))  # another job of this name
    assert voter.cluster_node.session == "f#2"
    voter.now += voter.silence
    voter.ping("v#1", "f#1", replace(first, term=2, version=1), whole=False)
    assert voter.cluster_node.session == "f#1"
    assert not voter.asks("f#1", "f#1", 2, first.key)
    voter.now += voter.silence
    assert not voter.asks("f#1", "f#1", 2, first.key)
    assert voter.asks("f#1", "f#1", 3, first.key)


def test_a_node_of_another_version_that_writes_other_fields_is_told_which_version_it_is() -> None:
    cluster_node = _begun().nodes["n0"].cluster_node
    assert cluster_node is not None
    join = MESSAGES.to_json(Join(member("n9", version="0"), 0, 0))
    del join["member"]["node_rank"], join["status"], join["asked"]
    join["member"]["new"] = 1
    said = of_kind(SendMessage, cluster_node.handle("n9#1", MESSAGES.from_json(join), 1040.0))
    assert " 0," in only(JoinRefused, (one.message for one in said)).reason
