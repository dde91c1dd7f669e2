"""Whether a silence beyond a timeout that nobody fixed is a hang."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outlast.hang.policy.diagnosis import LOOKS_ALONE, LOOKS_BEHIND, Case, RankEvidence, Verdict, rule
from outlast.hang.policy.rank_state import Call, Doing, Facts, GroupState, doing_of

PATIENCE = 300.0


def rank(number: int, doing: Doing, **fields: Any) -> RankEvidence:
    usual = {"alive": True, "process_state": "S", "cpu_busy": False, "stack": ("train.py:main",), "step": 7}
    return RankEvidence(number, **{**usual, "sections": (), "last_beat": 1.0, "doing": doing, **fields})


def judged(doing: Doing, waited: float, missed: bool, **fields: Any) -> bool:
    """Judge rank 1; rank 0 waits for it, or does the same."""
    other = rank(0, Doing.COLLECTIVE) if missed else rank(0, doing, **fields)
    verdict = Verdict(1, "x", (0,)) if missed else Verdict(-1, "cannot tell")
    return rule(Case(verdict, (other, rank(1, doing, **fields)), waited, PATIENCE)).convicted


@pytest.mark.parametrize(
    ("doing", "fields", "missed", "limit"),
    [
        (Doing.STOPPED, {}, True, 0.0),
        (Doing.STOPPED, {}, False, 300.0),  # the whole job is suspended
        (Doing.COMPUTES, {}, False, math.inf),  # an evaluation
        (Doing.COMPUTES, {}, True, 300.0),  # an endless loop, or one long call
        (Doing.COMPUTES, {"moved": True}, True, 1800.0),  # an evaluation of one rank
        (Doing.STORAGE, {"steady": 9}, True, 1800.0),
        (Doing.STORAGE, {"steady": 9}, False, 1800.0),
        (Doing.NETWORK, {"steady": 9}, True, 1800.0),
        (Doing.LOADER, {"steady": 9}, True, 1800.0),
        (Doing.CHILD, {"steady": 9}, True, 1800.0),
        (Doing.DEBUGGED, {"steady": 9}, True, 1800.0),
        (Doing.SLEEPS, {"steady": LOOKS_BEHIND}, True, 10.0),  # it may try something again
        (Doing.SLEEPS, {"steady": LOOKS_BEHIND - 1}, True, 300.0),
        (Doing.SLEEPS, {"steady": 99}, False, 1800.0),
        (Doing.NOTHING, {"steady": LOOKS_BEHIND}, True, 0.0),
        (Doing.NOTHING, {"steady": LOOKS_ALONE}, False, 0.0),  # deadlocked
        (Doing.NOTHING, {"steady": LOOKS_ALONE, "moved": True}, False, 1800.0),
        (Doing.NOTHING, {"steady": LOOKS_ALONE - 1}, False, 1800.0),
        (Doing.COLLECTIVE, {"steady": LOOKS_BEHIND}, False, 0.0),  # a link is down, or they do not match
    ],
)
def test_how_long_a_silence_may_be(doing: Doing, fields: dict[str, Any], missed: bool, limit: float) -> None:
    if limit:
        assert not judged(doing, min(limit, 1e9) - 0.1, missed, **fields)
    if limit < math.inf:
        assert judged(doing, limit, missed, **fields)


@pytest.mark.parametrize(("missed", "looks"), [(True, 2), (False, 4)])
def test_an_idle_rank_is_hung_at_the_second_look_if_it_is_waited_for_and_else_at_the_fourth(
    missed: bool, looks: int
) -> None:
    assert [judged(Doing.NOTHING, 5.0, missed, steady=looks - before) for before in (1, 0)] == [False, True]


def test_only_the_rank_that_waits_for_nothing_is_asked_what_it_does() -> None:
    evidence = (rank(0, Doing.COLLECTIVE), rank(1, Doing.STORAGE), rank(2, Doing.COMPUTES))
    ruling = rule(Case(Verdict(1, "x", (0,)), evidence, 12.0, PATIENCE))
    assert not ruling.convicted
    assert ruling.reason == (
        "rank 1 waits for storage: a disk or file system is slow: the hang timeout is extended to 1800 s of"
        " silence"
    )


def test_one_rank_that_computes_speaks_for_all_of_which_none_is_named() -> None:
    evidence = (rank(0, Doing.COMPUTES), rank(1, Doing.NOTHING, steady=9), rank(2, Doing.SLEEPS))
    assert not rule(Case(Verdict(-1, "cannot tell"), evidence, 1e6, PATIENCE)).convicted


@pytest.mark.parametrize("known", [True, False])
def test_ranks_that_wait_for_another_node_leave_the_verdict_to_it_for_a_while(known: bool) -> None:
    groups = (GroupState("0", (0, 1, 2, 3), 7, 7),) if known else None
    evidence = [rank(number, Doing.COLLECTIVE, steady=9, collectives=groups) for number in (0, 1)]
    case = Case(Verdict(-1, "cannot tell"), evidence, PATIENCE - 1, PATIENCE, spread=True)
    assert not rule(case).convicted
    assert rule(Case(case.verdict, evidence, PATIENCE, PATIENCE, spread=True)).convicted
    assert rule(Case(case.verdict, evidence, 5.0, PATIENCE, spread=known)).convicted is not known


@pytest.mark.parametrize("waited", [1.5, 20.0, 299.0, 1000.0])
def test_looks_become_rarer_but_not_too_rare(waited: float) -> None:
    ruling = rule(
        Case(Verdict(1, "x", (0,)), (rank(0, Doing.COLLECTIVE), rank(1, Doing.STORAGE)), waited, PATIENCE)
    )
    assert 0.5 <= ruling.look_in <= 30.0


@pytest.mark.parametrize(
    ("waited", "look_in"),
    [
        (0.4, 0.5),
        (20.0, 10.0),
        (1000.0, 30.0),
        (1790.0, 10.0),  # when the time that it is allowed ends
        (1799.9, 0.5),
    ],
)
def test_the_next_look_is_after_half_the_silence_so_far_or_when_it_counts(
    waited: float, look_in: float
) -> None:
    evidence = (rank(0, Doing.COLLECTIVE), rank(1, Doing.STORAGE))
    assert rule(Case(Verdict(1, "x", (0,)), evidence, waited, PATIENCE)).look_in == pytest.approx(look_in)


def test_a_rank_that_did_nothing_since_the_last_look_is_looked_at_again_soon() -> None:
    def look_in(**fields: Any) -> float:
        evidence = (rank(0, Doing.COLLECTIVE), rank(1, Doing.SLEEPS, **fields))
        return rule(Case(Verdict(1, "x", (0,)), evidence, 20.0, PATIENCE)).look_in

    assert (look_in(), look_in(steady=LOOKS_BEHIND - 1)) == (10.0, 1.0)


@pytest.mark.parametrize(("waited", "look_in"), [(0.6, 0.5), (10.0, 5.0), (100.0, 30.0)])
def test_ranks_that_wait_for_another_node_are_looked_at_again_after_half_the_silence(
    waited: float, look_in: float
) -> None:
    evidence = (rank(0, Doing.COLLECTIVE, steady=9),)
    assert rule(Case(Verdict(7, "x", (0,)), evidence, waited, PATIENCE, joint=True)).look_in == look_in
    assert rule(Case(Verdict(7, "x", (0,)), evidence, waited, PATIENCE)).convicted, "nobody else decides"


def test_what_another_node_decides_counts_from_the_timeout_on() -> None:
    evidence = (rank(0, Doing.COLLECTIVE, steady=9),)
    case = Case(Verdict(7, "x", (0,)), evidence, 1809.0, PATIENCE, joint=True, limit=10.0)
    assert not rule(case).convicted
    assert rule(replace(case, waited=1810.0)).convicted


@pytest.mark.parametrize(("ranks", "more"), [(4, ""), (6, " (and 2 more)")])
def test_of_many_ranks_that_get_more_time_some_are_named(ranks: int, more: str) -> None:
    evidence = [rank(number, Doing.COMPUTES) for number in range(ranks)]
    evidence.append(rank(ranks, Doing.SLEEPS))
    reason = rule(Case(Verdict(-1, "cannot tell"), evidence, 12.0, PATIENCE)).reason
    assert reason == (
        f"rank 0 computes; rank 1 computes; rank 2 computes; rank 3 computes{more}: "
        "the hang timeout is extended while it does"
    )


def test_a_rank_that_is_not_known_to_be_waited_for_may_compute() -> None:
    """One that waits in a collective of its own says nothing; on a GPU a wait has no state of its own."""
    computes = rank(1, Doing.COMPUTES)
    for other, waiting, missed in (
        (rank(0, Doing.COLLECTIVE), (), False),
        (rank(0, Doing.NOTHING), (0,), False),
        (rank(0, Doing.NOTHING, gpu=True), (0,), True),
    ):
        case = Case(Verdict(1, "x", waiting), (other, computes), PATIENCE, PATIENCE)
        assert rule(case).convicted is missed


def test_ranks_that_wait_in_a_collective_of_this_node_are_judged_here() -> None:
    here = (GroupState("0", (0, 1), 7, 7), GroupState("1", (0, 1, 2, 3), 4))
    evidence = [rank(number, Doing.COLLECTIVE, steady=LOOKS_BEHIND, collectives=here) for number in (0, 1)]
    assert rule(Case(Verdict(-1, "cannot tell"), evidence, 5.0, PATIENCE, spread=True)).convicted


def test_a_rank_of_this_node_that_does_not_wait_itself_is_judged_here() -> None:
    evidence = (rank(0, Doing.NOTHING, steady=LOOKS_ALONE),)
    assert rule(Case(Verdict(0, "x"), evidence, 5.0, PATIENCE, spread=True)).convicted


def test_what_a_busy_rank_is_allowed_counts_from_the_timeout_on() -> None:
    """Else a rank that evaluates alone is convicted as soon as the default of 300 s is over."""
    evidence = (rank(0, Doing.COMPUTES), rank(1, Doing.COLLECTIVE))
    case = Case(Verdict(0, "x", (1,)), evidence, 300.0, PATIENCE, limit=300.0)
    assert not rule(case).convicted
    assert not rule(replace(case, waited=599.0)).convicted
    assert rule(replace(case, waited=600.0)).convicted


def test_a_gpu_rank_that_waits_for_nobody_computes() -> None:
    done = (GroupState("0", (0, 1), 7),)
    fields = {"gpu": True, "cpu_busy": True, "steady": 99}
    verdict = Verdict(-1, "cannot tell")
    pending = (GroupState("0", (0, 1), 7, 7),)
    for changes, computes in (
        ({"collectives": done}, True),
        ({"collectives": None}, False),
        ({"collectives": pending}, False),
        ({"collectives": done, "cpu_busy": False}, False),
        ({"collectives": done, "gpu": False}, False),
        ({"collectives": done, "doing": Doing.SLEEPS}, False),
    ):
        one = replace(rank(0, Doing.NOTHING, **fields), **changes)
        assert rule(Case(verdict, (one,), 1e6, PATIENCE)).convicted is not computes


def test_a_job_that_goes_on_rank_by_rank_after_a_suspension_is_not_hung() -> None:
    still, running = rank(0, Doing.STOPPED), rank(1, Doing.COLLECTIVE)
    verdict = Verdict(0, "is stopped", (1,))
    assert rule(Case(verdict, (still, running), 6.0, PATIENCE)).convicted
    assert not rule(Case(verdict, (still, replace(running, continued=True)), 6.0, PATIENCE)).convicted


def test_without_evidence_a_silence_is_a_hang() -> None:
    assert rule(Case(Verdict(-1, "no rank could be examined"), (), 5.0, PATIENCE)).convicted


SITE = "/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        (Facts(("S",)), Doing.NOTHING),
        (Facts(("S", "T")), Doing.STOPPED),
        (Facts(("T", "T"), share=0.01), Doing.LIMITED),
        (Facts(("t",)), Doing.DEBUGGED),
        (Facts(("S",), traced=True), Doing.DEBUGGED),
        (Facts(("R",), share=0.9), Doing.COMPUTES),
        (Facts(("R",), share=0.3), Doing.NOTHING),
        (Facts(("R",), share=0.9, gpu=True), Doing.NOTHING),
        (Facts(("R",), share=0.9, gpu=True, waiting=True), Doing.COLLECTIVE),
        (Facts(("S", "D")), Doing.STORAGE),
        (Facts(("D",), waiting=True), Doing.COLLECTIVE),
        (Facts(("S",), kernel="rpc_wait_bit_killable"), Doing.STORAGE),
        (Facts(("S",), call=Call.FILE), Doing.STORAGE),
        (Facts(("S",), stack=("train.py:main", f"{SITE}/torch/serialization.py:save")), Doing.STORAGE),
        (Facts(("S",), stack=("a.py:b", "/src/outlast/checkpoint/save/buffers.py:claim")), Doing.STORAGE),
        (Facts(("S",), io=1), Doing.STORAGE),
        (Facts(("S",), call=Call.SOCKET), Doing.NETWORK),
        (Facts(("S",), stack=("a.py:b", "/usr/lib/python3.11/ssl.py:read")), Doing.NETWORK),
        (Facts(("S",), call=Call.CHILD), Doing.CHILD),
        (Facts(("S",), stack=("a.py:b", "/usr/lib/python3.11/subprocess.py:wait")), Doing.CHILD),
        (
            Facts(("S",), stack=("a.py:b", f"{SITE}/torch/utils/data/dataloader.py:_try_get_data")),
            Doing.LOADER,
        ),
        (Facts(("S",), stack=("a.py:b", "/usr/lib/python3.11/pdb.py:interaction")), Doing.DEBUGGED),
        (Facts(("S",), call=Call.SLEEP), Doing.SLEEPS),
        (Facts(("S",), others=(("t.py:run", "/usr/lib/python3.11/socket.py:readinto"),)), Doing.NETWORK),
        (
            Facts(("S",), others=(("t.py:run", "/outlast/checkpoint/save/staging.py:_run"),)),
            Doing.NOTHING,
        ),
    ],
)
def test_what_a_rank_does(facts: Facts, doing: Doing) -> None:
    assert doing_of(facts) is doing


@pytest.mark.parametrize(
    ("library", "frames", "doing"),
    [
        (f"{SITE}/torch/serialization.py:save", 2, Doing.STORAGE),
        (f"{SITE}/requests/api.py:get", 3, Doing.NETWORK),
        (f"{SITE}/torch/utils/data/dataloader.py:_try_get_data", 6, Doing.LOADER),
        (f"{SITE}/torch/multiprocessing/spawn.py:join", 6, Doing.CHILD),
        ("/usr/lib/python3.11/pdb.py:interaction", 6, Doing.DEBUGGED),
    ],
)
def test_a_library_that_called_the_script_back_says_nothing(library: str, frames: int, doing: Doing) -> None:
    """It is looked for in the innermost frames only: below a training loop that it runs, say."""
    for inside, expected in ((frames - 1, doing), (frames, Doing.NOTHING)):
        stack = ("train.py:main", library, *("train.py:step",) * inside)
        assert doing_of(Facts(("S",), stack=stack)) is expected


@pytest.mark.parametrize("library", [f"{SITE}/torch/serialization.py:save", f"{SITE}/requests/api.py:get"])
def test_another_thread_counts_while_it_is_in_the_library_itself(library: str) -> None:
    inside, outside = ("t.py:run", library), ("t.py:run", library, "t.py:hook")
    assert doing_of(Facts(("S",), others=(outside, inside))) is not Doing.NOTHING
    assert doing_of(Facts(("S",), others=(outside,))) is Doing.NOTHING
