"""What a leader decides about its job, event by event."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.cluster.policy.events import Judged, Looked, Proposal
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import Role
from outlast.cluster.policy.messages import Assignment, Ending
from outlast.cluster.policy.plan import PLANS, JobPlan
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.hang.policy.diagnosis import RankEvidence
from outlast.parallelism.policy.degrees import Layout
from outlast.recovery.policy.events import FaultKind, RecoveryAction
from tests.cluster.builders import ABLE, Job, of_kind, only, spec, written

ONCE_A_DAY = FaultToleranceOptions(max_restarts=9, max_restarts_per_day=1)
RARE: dict[str, Any] = {"interval": 1e6}  # it does not look for silent nodes
PAIR: dict[str, Any] = {"wanted": spec(2, 2, **RARE)}
SPARE: dict[str, Any] = {"wanted": spec(2, 2, 1, **RARE)}
REENTERS: dict[str, Any] = {**PAIR, "status": ABLE}

SCRIPTS: dict[str, tuple[dict[str, Any], str]] = {
    # How it begins, grows and ends.
    "it begins with the store of the first node": (
        {"started": False},
        """0 join n1 -> plan 0:  at 0; 0 join n0 ->; 0 beat n1 ->; 0 beat n0 -> plan 1: n0 n1 at 5001
        1 beat n0 ->""",
    ),
    "a part begins nothing while another job may run": (
        {"started": False, "wanted": spec(1, 2, grace=1.0)},
        "0 join n0; 0 beat n0; 0 wait 4; 3.75 tick ->; 4 tick -> plan 1: n0 at 5001",
    ),
    "who joins is told to all within a second and not each anew": (
        {"wanted": spec(1, 2, 3)},
        """1 left n2 n3 n4; 9 tick; 9 beat n0 n1; 10 join n2 incarnation=2 -> plan 1: n0 n1 at 5001
        10.01 join n3 incarnation=2 ->; 10.01 join n4 incarnation=2 ->; 10.02 tick ->
        10.02 due -> 10.25; 10.5 tick -> plan 1: n0 n1 at 5001; 11.5 tick ->""",
    ),
    "nobody is told anew while the next generation is formed": (
        {"wanted": spec(2, 2, 1)},
        "5 crash n0; 5.1 left n2 ->",
    ),
    "a node too many": ({}, "1 join n7 -> rejects n7"),
    "a node that is used no more": (
        {"wanted": spec(2, 2, 1)},
        "5 unfit n2 -> excludes n2, plan 1: n0 n1 at 5001",
    ),
    "every rank has finished": (
        {},
        "5 finished n0 ->; 6 finished n1 -> stop, over 0; 7 crash n0 ->; 7 left n1 ->; 1000 tick ->",
    ),
    "it has shrunk, and those that are left have finished": (
        {"wanted": spec(1, 2)},
        """5 left n1 -> shrink, ends n0 for 2; 6 answers -> plan 2: n0 at 5002
        7 finished n0 -> stop, over 0""",
    ),
    "a request to stop": ({}, "5 stop n1 15 -> stop, over 143; 6 tick ->"),
    "too few nodes": (
        {"started": False, "wanted": spec(2, 2, join_timeout=60.0, ping_timeout=1000.0)},
        "0 join n0; 5 tick ->; 59 tick ->; 60 tick -> over 1; 61 tick ->",
    ),
    "it grows after a save once every node could begin": (
        {"wanted": spec(1, 2, **RARE)},
        """1 left n1 -> shrink, ends n0 for 2; 1 answers -> plan 2: n0 at 5002
        2 join n1 incarnation=2 -> plan 2: n0 at 5002; 3 saved n0 40 -> saved 40
        4 beat n1 incarnation=2 ->; 4.2 loaded n0 30 ->; 4.5 saved n0 45 g=1 -> saved 45
        5 saved n0 50 -> saved 50, ends n0 n1 for 3; 5.1 beat n0 ended=2 store=5003 ->
        5.2 beat n1 incarnation=2 ended=2 -> plan 3: n0 n1 at 5003; 6 saved n0 60 -> saved 60""",
    ),
    "not with a node that has gone again": (
        {"wanted": spec(1, 2, **RARE)},
        "5 left n1; 6 answers; 7 join n1 incarnation=2; 8 left n1; 9 saved n0 40 -> saved 40",
    ),
    # Nodes that are lost, and stores.
    "a lost node is replaced by a spare": (
        {"wanted": spec(2, 2, 1)},
        """5 left n1 -> replace-node, ends n0 n2 for 2; 5.1 answers n0 ->
        5.2 answers n2 -> plan 2: n0 n2 at 5002""",
    ),
    "a lost node that is needed": ({"wanted": spec(2, 2)}, "5 left n1 -> restart-in-job, ends n0 for 2"),
    "a lost node that can be done without": ({"wanted": spec(1, 2)}, "5 left n1 -> shrink, ends n0 for 2"),
    "a spare before a smaller job": (
        {"wanted": spec(1, 2, 1)},
        "5 left n1 -> replace-node, ends n0 n2 for 2",
    ),
    "one node and a spare": ({"wanted": spec(1, 1, 1)}, "5 left n0 -> replace-node, ends n1 for 2"),
    "the last node": ({"wanted": spec(1, 1)}, "5 left n0 -> restart-in-job, ends  for 2"),
    "it does not shrink while a spare is there": (
        {"wanted": spec(1, 2, 2, **RARE), "options": FaultToleranceOptions(max_restarts=1)},
        """5 left n1 -> replace-node, ends n0 n2 n3 for 2; 6 answers -> plan 2: n0 n2 at 5002
        7 steps n0 n2 5 ->; 8 left n2 -> stop, over 1""",
    ),
    "ranks end before the next generation": (
        {},
        """5 crash n0 -> restart-in-job, ends n0 n1 for 2; 5.1 beat n0 n1 store=5002 ->
        5.2 answers -> plan 2: n0 n1 at 5002""",
    ),
    "a store that its node has lost": (
        PAIR,
        """1 beat n0 store=5002; 2 beat n0 store=0; 2 crash n0; 2 beat n0 n1 store=0 ended=1 ->
        3 beat n0 store=5003 ended=1 -> plan 2: n0 n1 at 5003""",
    ),
    "another store at the same port": (
        PAIR,
        "2 crash n0; 2 beat n0 n1 ended=1 ->; 3 beat n0 serial=2 ended=1 -> plan 2: n0 n1 at 5001",
    ),
    "the store of an agent that has gone": (
        PAIR,
        """1 beat n0 store=5002; 5 left n0; 6 join n0 incarnation=2; 7 beat n1 ended=1
        8 beat n0 incarnation=2 store=5009 ended=1 -> plan 2: n0 n1 at 5009""",
    ),
    "silence": (
        {"status": ABLE},
        """1.1 look n0; 1.1 tick ->; 1.1 due -> 1.30; 4.8 look n0 ->
        5.3 look n0 -> restart-in-job, ends n0 for 2""",
    ),
    "a node that is heard has longer to end its ranks": (
        {"wanted": spec(1, 2)},
        """1 crash n0 -> restart-in-job, ends n0 n1 for 2; 1 answers n0; 60 look n0 n1 ->
        62 look n0 n1 -> plan 2: n0 at 5002""",
    ),
    "once it has ended them, as long as it is heard": (
        {"wanted": spec(1, 2)},
        """1 crash n0 -> restart-in-job, ends n0 n1 for 2; 1 answers n0 n1 -> plan 2: n0 n1 at 5002
        60 look n0 n1 ->; 62 look n0 n1 ->""",
    ),
    # What a fault waits for.
    "a crash": (PAIR, "10 crash n1 -> restart-in-job, ends n0 n1 for 2"),
    "a named hang": (PAIR, "10 hang n0 rank=0 -> restart-in-job, ends n0 n1 for 2"),
    "an error that does not re-enter": (
        PAIR,
        "10 error n0 -> restart-in-job, ends n0 n1 for 2",
    ),
    "a victim waits for its culprit": (
        PAIR,
        """10 victim n0 ->; 10 due -> 10.30; 10.29 tick ->
        10.3 tick -> restart-in-job, ends n0 n1 for 2""",
    ),
    "the culprit comes": (
        PAIR,
        "10 victim n0 ->; 10.1 crash n1 -> restart-in-job, ends n0 n1 for 2; 11 tick ->",
    ),
    "a second victim": (
        PAIR,
        "10 victim n0 ->; 10.2 victim n1 ->; 10.3 tick -> restart-in-job, ends n0 n1 for 2",
    ),
    "a victim, and a status": (REENTERS, "10 victim n0 ->; 10.1 beat n1 ->"),
    "a victim, and steps": (
        PAIR,
        "10 victim n0 ->; 10.1 steps n0 n1 8 ->; 10.3 tick -> restart-in-job, ends n0 n1 for 2",
    ),
    "a victim of an older generation": (
        PAIR,
        "10 victim n0 g=0 -> none; 10 due -> never",
    ),
    "a victim, and a fault of an older one": (
        PAIR,
        "10 victim n0 ->; 10.1 crash n1 g=0 -> none; 10.3 tick -> restart-in-job, ends n0 n1 for 2",
    ),
    "a hang without a name": (
        PAIR,
        "10 hang n0 ->; 10 due -> 11.00; 10.99 tick ->; 11 tick -> restart-in-job, ends n0 n1 for 2",
    ),
    "a rank that waits": (PAIR, "10 hang n0 rank=0 waits=1 ->; 10 due -> 11.00"),
    "a guessed hang": (
        PAIR,
        """10 hang n0 waits=1 guessed=1 ->; 10 due -> 16.00; 15.9 tick ->
        16 tick -> restart-in-job, ends n0 n1 for 2""",
    ),
    "ranks that all go on do not hang": (
        PAIR,
        "10 hang n0 ->; 10.5 steps n0 n1 7; 10.5 steps n0 8; 10.5 steps n1 8; 20 tick ->",
    ),
    "steps of an older generation": (
        PAIR,
        "10 hang n0; 10.1 steps n0 n1 9 g=0; 11 tick -> restart-in-job, ends n0 n1 for 2",
    ),
    "an error outlives a guessed hang that is over": (
        PAIR,
        """0.4 steps n0 n1 10; 1 hang n0 10 waits=1 guessed=1 ->; 2 steps n1 11; 2.2 victim n1 11 ->
        2.4 steps n0 11 ->; 2.5 tick -> restart-in-job, ends n0 n1 for 2""",
    ),
    # Ranks that can enter their function again.
    "ranks are called to the barrier": (
        REENTERS,
        """1 raise n0 -> restart-in-process, ends n0 n1 for 2 at the barrier; 1.1 answers n0 ->
        1.1 beat n1 ->; 1.2 answers n1 -> plan 2: n0 n1 at 5002 by the barrier; 1.2 due -> never
        60 tick ->""",
    ),
    "one node cannot enter": (
        REENTERS,
        """0.5 beat n1 able=no; 1 raise n0 ->; 1.1 beat n1 able=no ->; 1.49 tick ->
        1.5 tick -> restart-in-job, ends n0 n1 for 2; 1.6 answers -> plan 2: n0 n1 at 5002""",
    ),
    "its ranks have just entered": (
        REENTERS,
        """0.5 beat n1 able=no; 1 raise n0 ->
        1.1 beat n1 able=yes -> restart-in-process, ends n0 n1 for 2 at the barrier
        1.2 answers -> plan 2: n0 n1 at 5002 by the barrier""",
    ),
    "another fault ends the wait": (
        REENTERS,
        "0.5 beat n1 able=no; 1 raise n0 ->; 1.1 raise n1 -> restart-in-job, ends n0 n1 for 2",
    ),
    "nodes that do not answer in time": (
        REENTERS,
        """1 raise n0 -> restart-in-process, ends n0 n1 for 2 at the barrier; 1 due -> 26.00
        1.1 crash n1 g=1 -> none; 1.1 answers n0 ->; 25.9 tick ->
        26 tick -> restart-in-job, ends n0 n1 for 2; 26 due -> never
        26.1 answers n1 -> plan 2: n0 n1 at 5002""",
    ),
    "ranks of a smaller job are new processes": (
        {"wanted": spec(1, 2, **RARE), "status": ABLE},
        """10 raise n0 -> restart-in-process, ends n0 n1 for 2 at the barrier; 10.1 left n1 ->
        10.2 answers -> plan 2: n0 at 5002; 10.2 due -> never""",
    ),
    # Budgets.
    "a budget for a day": (
        {"wanted": spec(**RARE), "options": ONCE_A_DAY},
        """10 crash n0 5 -> restart-in-job, ends n0 n1 for 2; 11 answers; 12 saved n0 40
        86420 crash n0 50 -> restart-in-job, ends n0 n1 for 3; 86421 answers
        86430 crash n0 60 -> stop, over 1""",
    ),
    "the budget of the day at the barrier": (
        {"wanted": spec(**RARE), "options": ONCE_A_DAY, "status": ABLE},
        """1 beat n0 n1 able=no; 10 crash n0 5 -> restart-in-job, ends n0 n1 for 2; 11 answers able=no
        12 saved n0 40; 13 beat n0 n1
        86420 raise n0 50 -> restart-in-process, ends n0 n1 for 3 at the barrier
        86445 tick -> restart-in-job, ends n0 n1 for 3""",
    ),
    "the budget of the day for failing nodes": (
        {"wanted": spec(2, 2, 2, **RARE), "options": ONCE_A_DAY},
        """10 left n1 -> replace-node, ends n0 n2 n3 for 2; 11 answers; 20 failing n0 ->
        21 saved n0 40 -> saved 40; 86420 failing n0 -> holds
        86421 held -> replace-node n0, ends n0 n2 n3 for 3, excludes n0""",
    ),
    "replicas that differ, twice": (
        SPARE,
        """1 differ n0 rank=1 -> restart-in-job, ends n0 n1 n2 for 2; 2 answers
        3 differ n0 rank=1 -> replace-node n1, ends n0 n1 n2 for 3, excludes n1""",
    ),
    "replicas that differ, and nobody knows which": (
        SPARE,
        """1 differ n0 rank=-1 -> restart-in-job, ends n0 n1 n2 for 2; 2 answers
        3 differ n0 rank=-1 -> stop, over 93""",
    ),
    # A failing node, which a spare replaces after the next save.
    "after the save, not before": (
        SPARE,
        """5 failing n1 40 -> holds; 5 held ->; 6 failing n1 40 ->; 7 saved n0 39 -> saved 39
        8 saved n0 42 -> saved 42, replace-node n1, ends n0 n1 n2 for 2, excludes n1
        9 failing n1 40 g=1 ->""",
    ),
    "at the step at which ranks wait": (
        SPARE,
        """5 failing n1 40; 6 saved n0 41 -> saved 41; 7 held 43 ->; 7.5 saved n0 42 -> saved 42
        8 saved n0 43 -> saved 43, replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "a save that came meanwhile, where ranks cannot wait": (
        SPARE,
        """5 failing n1 40; 6 saved n0 41 -> saved 41
        7 held -> replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "the script's own at the agreed step": (
        SPARE,
        """5 failing n1 40; 6 own n0 104 agreed=2 -> saved 104; 7 held 3 ->; 7.5 own n0 104 agreed=2 ->
        8 own n0 106 agreed=3 -> saved 106, replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "the script's own of an earlier loop": (
        SPARE,
        """4 own n0 500 agreed=500; 5 failing n1 40; 7 held 12 ->
        8 own n0 512 agreed=12 -> saved 512, replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "the script's own, where ranks cannot wait": (
        SPARE,
        """5 failing n1 40; 5 held ->; 6 own n0 39 -> saved 39
        8 own n0 40 -> saved 40, replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "nodes hear of the script's own": ({}, "5 own n0 40 -> saved 40; 6 own n0 40 ->"),
    "a save that was rolled back": (
        SPARE,
        """5 failing n1 40; 6 saved n0 60 -> saved 60; 6.5 loaded n0 30; 7 held 42 ->
        8 saved n0 42 -> replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "without a spare it goes on": (
        PAIR,
        "5 failing n1 40 ->; 5 held ->; 8 saved n0 42 -> saved 42",
    ),
    "a spare that is dying, too": (
        SPARE,
        """4 beat n2 risk=XID ->; 5 failing n1 40 ->; 8 saved n0 42 -> saved 42; 9 beat n2
        9.5 failing n1 40 -> holds; 9.5 held -> replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "a spare that falls ill meanwhile": (
        SPARE,
        "5 failing n1 40; 5 held; 6 beat n2 risk=XID; 8 saved n0 42 -> saved 42, none, releases",
    ),
    "a spare that has gone meanwhile": (
        SPARE,
        "5 failing n1 40; 5 held; 6 left n2; 8 saved n0 42 -> saved 42, none, releases",
    ),
    "a node that is kept hides no other fault": (
        SPARE,
        """5 failing n1 40; 5 held; 6 left n2; 7 hang n0 41 ->
        7.5 saved n0 41 -> saved 41, none, releases; 8 tick -> restart-in-job, ends n0 n1 for 2""",
    ),
    "a save that does not come": (
        SPARE,
        """5 failing n1 40; 5 held; 5 due -> 605.00; 604.9 tick ->
        605 tick -> replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "a save that cannot come": (
        SPARE,
        """5 failing n1 40; 6 held 12 ->
        7 nosave n0 -> replace-node n1, ends n0 n1 n2 for 2, excludes n1; 8 nosave n0 g=1 ->""",
    ),
    "a save after one that could not come": (
        SPARE,
        """4 nosave n0; 4.5 saved n0 30; 5 failing n1 40; 6 held 42 ->
        7 saved n0 42 -> saved 42, replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "a save of an older generation": (
        SPARE,
        """5 failing n1 40; 6 saved n0 60 g=0 -> saved 60; 7 held ->
        8 saved n0 40 -> replace-node n1, ends n0 n1 n2 for 2, excludes n1""",
    ),
    "a node that failed in an earlier generation": (
        SPARE,
        """5 failing n1 40; 6 crash n0 -> restart-in-job, ends n0 n1 n2 for 2
        6 answers -> plan 2: n0 n1 at 5002; 7 held 30 ->; 7 due -> never; 605 tick ->""",
    ),
    "a failing node that a fault kept is replaced in the next generation": (
        SPARE,
        """5 failing n1 40; 6 crash n0; 6 answers -> plan 2: n0 n1 at 5002; 7 started n0 n1 -> holds
        7.5 held 31; 8 saved n0 31 -> saved 31, replace-node n1, ends n0 n1 n2 for 3, excludes n1""",
    ),
    "a save of the generation before": (
        SPARE,
        """4 saved n0 60; 6 crash n0; 6 answers; 7 failing n1 40 -> holds; 8 held ->
        9 saved n0 41 -> replace-node n1, ends n0 n1 n2 for 3, excludes n1""",
    ),
    "two nodes that fail": (
        SPARE,
        """1 failing n0 10 -> holds; 1.1 held 12 ->; 1.2 failing n1 10 ->; 1.3 saved n0 11 -> saved 11
        1.4 saved n0 12 -> saved 12, replace-node n0, ends n0 n1 n2 for 2, excludes n0""",
    ),
}


@pytest.mark.parametrize(("given", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_what_a_leader_decides(given: dict[str, Any], script: str) -> None:
    assert Job(**given).play(script) == written(script)


def plan_of(outcomes: list[Any]) -> JobPlan:
    return PLANS.read(PLANS.write(of_kind(Proposal, outcomes)[-1].plan))


def begun(**given: Any) -> tuple[Job, JobPlan]:
    """Return a job that has begun, and its plan."""
    job = Job(started=False, **given)
    names = list(job.status)
    said = [*job.happens(0.0, "join", names), *job.happens(0.0, "beat", names)]
    return job, plan_of(said)


def test_a_plan_says_where_ranks_meet_and_in_which_layout() -> None:
    job, plan = begun(wanted=spec(layouts=(Layout(dp=2),)))
    assert (plan.port, plan.reenter, plan.hung_again, plan.end) == (5001, False, False, None)
    assert plan.layout == Layout(dp=2).text
    assert job.lead.roles() == {"n0": Role.ACTIVE, "n1": Role.ACTIVE}


def test_a_node_may_say_what_devices_it_has_before_there_is_a_plan() -> None:
    job = Job(started=False)
    job.happens(0.0, "join", ["n0"])
    assert job.happens(0.0, "beat", ["n0", "device=H100", "store=0"]) == []


def test_a_later_launch_goes_on_after_the_last_generation_and_the_last_save() -> None:
    job = Job()
    job.happens(1.0, "saved", ["n0", "40"])
    again = Job(started=False)
    assert again.lead.recall(_stored(job), 0, 2.0)
    assert (again.lead.generation, again.lead.saved, again.lead.began) == (2, 40, False)
    again.happens(3.0, "join", ["n0", "n1"])
    proposal = only(Proposal, again.happens(3.0, "beat", ["n0"]))
    assert (proposal.generation, proposal.plan.why) == (2, ""), "nothing ended the generation before it"


def _stored(job: Job) -> Any:
    return json.loads(json.dumps(job.lead.job_state()))


@pytest.mark.parametrize(
    ("spent", "after", "now", "told"),
    [
        ({}, 0, 2.0, 1),
        ({"fast": 3}, 0, 2.0, 2),
        ({"fast": 3}, 2, 2.0, 1),  # its agent only began anew
        ({"fast": 0, "times": [0.0] * 20}, 0, 86399.0, 2),
        ({"fast": 0, "times": [0.0] * 20}, 0, 86400.0, 1),
    ],
)
def test_a_launch_that_begins_without_a_restart_says_so(
    spent: dict[str, Any], after: int, now: float, told: int
) -> None:
    job = Job()
    job.happens(1.0, "crash", ["n0"])
    state = _stored(job)
    state["escalation"]["spent"]["restart-in-job"].update(spent)
    said = Job(started=False).lead.recall(state, after, now)
    assert len(said) == told
    assert ("--max-restarts" in f"{said}" or "--ft-max-restarts-per-day" in f"{said}") is (told == 2)


def test_the_first_generation_is_younger_than_any_that_is_known_to_have_been() -> None:
    job = Job(started=False)
    assert job.lead.recall(None, 3, 2.0) == []
    assert (job.lead.generation, job.lead.saved) == (4, -1)
    job.lead.after(8)
    job.happens(2.0, "join", ["n0", "n1"])
    assert only(Proposal, job.happens(2.0, "beat", ["n0"])).generation == 9
    job.lead.after(20)
    assert job.lead.generation == 9, "it has begun"
    malformed = Job(started=False)
    assert len(malformed.lead.recall({"generation": "x"}, 6, 2.0)) == 1
    assert malformed.lead.generation == 7


def test_a_lost_node_is_a_fault_with_what_is_known_of_its_generation() -> None:
    job = Job()
    for name, step in (("n0", "7"), ("n1", "6")):
        job.happens(3.0, "steps", [name, step, "counted=1"])
    job.happens(4.0, "beat", ["n0", "n1"])
    fault = only(Judged, job.happens(9.0, "left", ["n1"])).fault
    assert fault is not None
    assert (fault.kind, fault.node, fault.rank, fault.step) == (FaultKind.LOST, "n1", -1, 6)
    assert (fault.since, fault.trained, fault.counted) == (4.0, 4.0, True)


@pytest.mark.parametrize(("heard", "trained"), [(9.0, 5.0), (4.5, 0.5), (3.0, 0.0)])
def test_a_generation_trains_from_when_the_last_node_has_started(heard: float, trained: float) -> None:
    job, _ = begun()
    for name, generation, now in (("n0", 1, 1.0), ("n1", 0, 2.0), ("n1", 1, 4.0)):
        job.happens(now, "started", [name, f"g={generation}"])
    job.happens(heard, "beat", ["n0", "n1"])
    fault = only(Judged, job.happens(9.5, "left", ["n1"])).fault
    assert fault is not None
    assert fault.trained == trained


def test_what_was_known_of_a_generation_is_forgotten_with_it() -> None:
    job = Job(**SPARE)
    job.happens(3.0, "steps", ["n0", "n1", "7", "counted=1"])
    job.happens(5.0, "crash", ["n0"])
    job.happens(6.0, "answers", [])
    fault = only(Judged, job.happens(9.0, "left", ["n1"])).fault
    assert fault is not None
    assert (fault.generation, fault.step, fault.trained, fault.counted) == (2, -1, 0.0, False)


def test_replicas_that_differ_are_laid_to_the_node_of_the_rank_that_is_wrong_whoever_tells() -> None:
    fault = only(Judged, Job(**PAIR).happens(1.0, "differ", ["n0", "rank=1"])).fault
    assert fault is not None
    assert (fault.node, fault.rank) == ("n1", 1)


@pytest.mark.parametrize("rank", ["rank=-1", "rank=0"])
def test_what_was_reported_before_a_victims_error_is_blamed_when_that_is_due(rank: str) -> None:
    job = Job(**PAIR)
    job.happens(1.0, "hang", ["n0", "10", rank, "waits=1", "guessed=1"])
    job.happens(2.0, "victim", ["n1", "10"])
    fault = only(Judged, job.happens(2.3, "tick", [])).fault
    assert fault is not None
    assert fault.kind is FaultKind.HANG


def test_every_node_is_told_that_a_hang_came_back_whichever_node_found_it() -> None:
    job, told = Job(**PAIR), []
    for number in (1, 2):
        job.happens(float(number), "hang", [f"n{number - 1}", "9", "rank=0"])
        plan = plan_of(job.happens(number + 0.5, "answers", []))
        mine = [plan.assignment(number + 1, name) for name in ("n0", "n1")]
        told.append([isinstance(one, Assignment) and one.hung_again for one in mine])
    assert told == [[False, False], [True, True]]


# What nodes see of silent ranks.


def looks(lead: JobController, name: str, now: float, generation: int = 1) -> None:
    seen = RankEvidence(int(name[1:]), True, "S", False, ("train.py:main",), 7, ("step",), 1.0)
    assert lead.handle(Looked(name, Seen(generation, (seen,), 1.0)), now) == []


def test_what_two_nodes_saw_of_silent_ranks_is_judged_together() -> None:
    lead = Job(**PAIR).lead
    looks(lead, "n0", 10.0)
    assert lead.deadline == 10.0
    assert lead.tick(10.0) == [], "one node alone knows no more than it knew"
    looks(lead, "n1", 10.5)
    blamed = only(Blamed, lead.tick(lead.deadline))
    assert (blamed.names, blamed.generation) == (("n0", "n1"), 1)
    assert lead.tick(11.5) == [], "nothing new was seen"


def test_what_was_seen_before_a_restart_is_forgotten() -> None:
    job = Job(**PAIR)
    looks(job.lead, "n0", 10.0)
    job.happens(10.1, "crash", ["n0"])
    looks(job.lead, "n1", 10.2)
    assert of_kind(Blamed, job.lead.tick(20.0)) == [], "no generation runs"
    job.happens(21.0, "answers", [])
    for generation, blames in ((1, 0), (2, 1)):
        looks(job.lead, "n0", 22.0, generation)
        looks(job.lead, "n1", 22.0, generation)
        assert len(of_kind(Blamed, job.lead.tick(22.0 + generation))) == blames


# Another leader.


def taken_over(plan: JobPlan, heard: dict[str, float] | None = None) -> Job:
    other = Job(spec(2, 2, 1), started=False)
    other.lead.take_over(plan, heard or {}, 100.0)
    return other


def test_a_successor_goes_on_with_the_plan_in_force() -> None:
    job = Job(spec(2, 2, 1), status=ABLE)
    job.happens(1.0, "saved", ["n0", "40"])
    job.happens(5.0, "raise", ["n0", "41"])
    plan = plan_of(job.happens(6.0, "answers", []))
    other = taken_over(plan)
    lead = other.lead
    assert (lead.generation, lead.saved, lead.began, lead.ending) == (2, 40, True, None)
    assert lead.plan is not None
    assert lead.plan.nodes == ("n0", "n1")
    again = plan_of(other.happens(100.5, "join", ["n2", "incarnation=2"]))
    assert (again.port, again.seats, again.reason, again.reenter) == (5002, plan.seats, plan.reason, True)
    assert again.why == plan.why != ""
    assert other.play("101 started n0 g=2 ->; 102 crash n0 ->") == [
        "101 started n0 g=2 ->",
        "102 crash n0 -> restart-in-job, ends n0 n1 n2 for 3",
    ]


@pytest.mark.parametrize(
    "script",
    [
        "100.5 hang n0 ->; 100.6 steps n0 8; 100.7 steps n1 8; 110 tick ->",
        "101 finished n0 ->; 101 finished n1 -> stop, over 0",
    ],
    ids=["ranks that go on", "ranks that finish"],
)
def test_a_successor_waits_for_every_node(script: str) -> None:
    _, plan = begun(wanted=spec(2, 2, 1))
    other = taken_over(plan)
    other.lead.tick(100.4)
    assert other.play(script) == written(script)


def test_a_successor_judges_what_nodes_see_of_silent_ranks() -> None:
    _, plan = begun(wanted=spec(2, 2, 1))
    lead = taken_over(plan).lead
    for name in ("n0", "n1"):
        looks(lead, name, 100.1)
    assert only(Blamed, lead.tick(100.1)).names == ("n0", "n1")


def test_a_successor_knows_that_a_node_was_silent_before() -> None:
    _, plan = begun(wanted=spec(2, 2, 1))
    other = taken_over(plan, {"n1": 97.0})
    said = other.happens(102.2, "look", ["n0", "n2"])
    fault = only(Judged, said).fault
    assert fault is not None
    assert (fault.node, fault.counted, fault.trained) == ("n1", False, 0.0)


def test_a_successor_of_a_leader_that_ended_the_job_ends_it_too() -> None:
    job = Job(spec(2, 2, 1))
    other = taken_over(plan_of(job.happens(5.0, "stop", ["n1", "2"])))
    assert other.lead.ending == job.lead.ending
    assert isinstance(other.lead.ending, Ending)
    assert other.lead.tick(200.0) == []


def test_a_successor_forms_the_generation_that_was_being_formed() -> None:
    job, other = Job(spec(3, 3), started=False), Job(spec(3, 3), started=False)
    job.happens(0.0, "join", ["n0"])
    plan = plan_of(job.happens(5.0, "join", ["n9"]))
    said = other.lead.take_over(plan, {}, 100.0)
    assert [one.names for one in said if hasattr(one, "names")] == [("n0", "n9")]
    assert (other.lead.plan, other.lead.began) == (None, False)


@pytest.mark.parametrize("job", [{}, {"generation": 0}, []])
def test_a_malformed_plan_is_not_taken_over(job: Any) -> None:
    _, plan = begun(wanted=spec(2, 2, 1))
    other = Job(spec(2, 2, 1), started=False)
    with pytest.raises((KeyError, TypeError, ValueError)):
        other.lead.take_over(replace(plan, job=job), {}, 100.0)
    assert not other.lead.began


# Faults that wait to be answered: none of a rank that has ended is forgotten, in any order of events.

PATIENCE = 1.0  # seconds; a victim's error waits 0.3 s, a node's status 0.5 s
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hang", "named", "victim", "error", "raise", "failing", "steps", "saved", "beat"]),
        st.sampled_from(["n0", "n1"]),
        st.integers(0, 20),  # tenths of a second until the next event
    ),
    max_size=14,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_the_end_of_a_rank_is_answered_soon_in_any_order_of_events(steps: list[tuple[str, str, int]]) -> None:
    job, now, done = Job(spec(2, 2, 1)), 1.0, {"n0": 10, "n1": 10}
    since: float | None = None  # the first end of a rank
    for what, node, pause in [*steps, ("beat", "n0", 20)]:
        done[node] += what == "steps"
        if what in ("victim", "error", "raise"):
            since = now if since is None else since
        named = [f"rank={node[1:]}"] if what == "named" else []
        words = [node, str(done[node]), *named, "waits=1", "guessed=1"]
        said = job.happens(now, "hang" if what == "named" else what, words)
        until = now + pause / 10
        while True:
            if any(one.action.kind is not RecoveryAction.NONE for one in of_kind(Judged, said)):
                return
            assert since is None or now < since + PATIENCE, "forgotten"
            if now >= until:
                break
            now = min(until, max(now + 0.001, job.lead.deadline))
            said = [*job.happens(now, "beat", list(job.status)), *job.lead.tick(now)]
    assert since is None
