"""Whether a silence beyond a timeout that nobody fixed is a hang."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outlast.hang.policy.diagnosis import Case, Verdict, rule
from outlast.hang.policy.rank_state import Call, Doing, Facts, doing_of
from tests.hang.policy.builders import SITE, group, rank

PATIENCE = 300.0
SILENCES = (0.0, 9.9, 10.0, 299.9, 300.0, 599.9, 600.0, 1799.9, 1800.0, 1e9)
NAMED, NOBODY = Verdict(1, "x", (0,)), Verdict(-1, "x")
IN_COLLECTIVE = rank(0, Doing.COLLECTIVE)


def hung_after(verdict: Verdict, *evidence: Any, **fields: Any) -> float:
    """Return the shortest silence that is a hang."""
    case = Case(verdict, evidence, 0.0, PATIENCE, **fields)
    return next((one for one in SILENCES if rule(replace(case, waited=one)).convicted), math.inf)


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
        (Doing.SLEEPS, {"steady": 2}, True, 10.0),  # it may try something again
        (Doing.SLEEPS, {"steady": 1}, True, 300.0),
        (Doing.SLEEPS, {"steady": 99}, False, 1800.0),
        (Doing.NOTHING, {"steady": 2}, True, 0.0),
        (Doing.NOTHING, {"steady": 1}, True, 300.0),
        (Doing.NOTHING, {"steady": 4}, False, 0.0),  # deadlocked
        (Doing.NOTHING, {"steady": 4, "moved": True}, False, 1800.0),
        (Doing.NOTHING, {"steady": 3}, False, 1800.0),
        (Doing.COLLECTIVE, {"steady": 2}, True, 0.0),  # it is in another one than all others
        (Doing.COLLECTIVE, {"steady": 2}, False, 0.0),  # a link is down, or they do not match
    ],
)
def test_how_long_a_silence_may_be(doing: Doing, fields: dict[str, Any], missed: bool, limit: float) -> None:
    one = rank(1, doing, **fields)
    if not missed:
        assert hung_after(NOBODY, rank(0, doing, **fields), one) == limit
        return
    assert hung_after(NAMED, IN_COLLECTIVE, one) == limit
    assert hung_after(NAMED, one, spread=True, joint=True) == limit, "a rank of another node waits for it"


COMPUTES, HERE, AWAY = rank(1, Doing.COMPUTES), group(7, 7, (0, 1)), group(7, 7, (0, 1, 2, 3))
RANKS = [rank(number, Doing.COLLECTIVE, steady=9) for number in (0, 1)]
STILL, AWAITS = rank(0, Doing.STOPPED), rank(1, Doing.COLLECTIVE)


def within(*groups: Any) -> list[Any]:
    return [replace(one, collectives=groups) for one in RANKS]


@pytest.mark.parametrize(
    ("verdict", "evidence", "fields", "limit"),
    [
        pytest.param(NOBODY, [], {}, 0.0, id="no evidence"),
        pytest.param(Verdict(1, "x"), [IN_COLLECTIVE, COMPUTES], {}, math.inf, id="waits elsewhere"),
        pytest.param(NAMED, [rank(0), COMPUTES], {}, math.inf, id="idle rank is no proof of a wait"),
        pytest.param(NAMED, [rank(0, gpu=True), COMPUTES], {}, 300.0, id="wait on a GPU shows nothing"),
        pytest.param(
            NAMED, [IN_COLLECTIVE, rank(1, Doing.STORAGE), replace(COMPUTES, rank=2)], {}, 1800.0, id="named"
        ),
        pytest.param(NOBODY, [rank(0, steady=9), COMPUTES], {}, math.inf, id="one computes, nobody named"),
        pytest.param(NAMED, [IN_COLLECTIVE, COMPUTES], {"limit": 300.0}, 600.0, id="after the timeout"),
        pytest.param(Verdict(0, "x", (1,)), [STILL, AWAITS], {}, 0.0, id="stopped"),
        pytest.param(
            Verdict(0, "x", (1,)),
            [STILL, replace(AWAITS, continued=True)],
            {},
            300.0,
            id="continued one by one",
        ),
        pytest.param(NOBODY, RANKS, {"spread": True}, 300.0, id="other nodes"),
        pytest.param(NOBODY, RANKS, {}, 0.0, id="no other node"),
        pytest.param(NOBODY, within(AWAY), {"spread": True}, 300.0, id="group of other nodes"),
        pytest.param(
            NOBODY, within(HERE, replace(AWAY, pending=0)), {"spread": True}, 0.0, id="group of this node"
        ),
        pytest.param(Verdict(0, "x"), [rank(0, steady=4)], {"spread": True}, 0.0, id="does not wait itself"),
        pytest.param(NAMED, RANKS[:1], {"spread": True, "joint": True}, 1800.0, id="named on another node"),
    ],
)
def test_whose_silence_counts(
    verdict: Verdict, evidence: list[Any], fields: dict[str, Any], limit: float
) -> None:
    assert hung_after(verdict, *evidence, **fields) == limit


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, math.inf),
        ({"collectives": None}, 0.0),
        ({"collectives": (HERE,)}, 0.0),
        ({"cpu_busy": False}, 0.0),
        ({"gpu": False}, 0.0),
        ({"doing": Doing.SLEEPS}, 1800.0),
    ],
)
def test_a_gpu_rank_that_spins_and_waits_for_nobody_computes(changes: dict[str, Any], limit: float) -> None:
    usual = {"gpu": True, "cpu_busy": True, "steady": 99, "collectives": (group(7, 0, (0, 1)),)}
    assert hung_after(NOBODY, rank(0, **{**usual, **changes})) == limit


@pytest.mark.parametrize(
    ("doing", "steady", "waited", "look_in"),
    [
        (Doing.STORAGE, 0, 0.4, 0.5),
        (Doing.STORAGE, 0, 20.0, 10.0),
        (Doing.STORAGE, 0, 1000.0, 30.0),
        (Doing.STORAGE, 0, 1790.0, 10.0),  # when the time that it is allowed ends
        (Doing.STORAGE, 0, 1799.9, 0.5),
        (Doing.SLEEPS, 0, 20.0, 10.0),
        (Doing.SLEEPS, 1, 20.0, 1.0),  # it did nothing since the last look
    ],
)
def test_the_next_look_is_after_half_the_silence_or_when_it_counts(
    doing: Doing, steady: int, waited: float, look_in: float
) -> None:
    ruling = rule(Case(NAMED, (IN_COLLECTIVE, rank(1, doing, steady=steady)), waited, PATIENCE))
    assert ruling.look_in == pytest.approx(look_in)
    assert doing.value in ruling.reason
    assert not ruling.convicted


def test_whoever_has_less_time_does_not_delay_the_look_at_one_that_did_nothing() -> None:
    evidence = (IN_COLLECTIVE, rank(1, Doing.SLEEPS, steady=1))
    assert rule(Case(NOBODY, evidence, 20.0, PATIENCE)).look_in == 1.0


@pytest.mark.parametrize(("waited", "look_in"), [(0.6, 0.5), (10.0, 5.0), (100.0, 30.0)])
def test_ranks_that_wait_for_another_node_are_looked_at_after_half_the_silence(
    waited: float, look_in: float
) -> None:
    ruling = rule(Case(NAMED, RANKS[:1], waited, PATIENCE, joint=True))
    assert (ruling.convicted, ruling.look_in) == (False, look_in)


SAVE = f"{SITE}/torch/serialization.py:save"
GET = f"{SITE}/requests/api.py:get"
LOAD = f"{SITE}/torch/utils/data/dataloader.py:_try_get_data"
DEBUG = "/usr/lib/python3.11/pdb.py:interaction"
SOCKET = "/usr/lib/python3.11/socket.py:readinto"


def facts(state: str = "S", *stack: str, **fields: Any) -> Facts:
    return Facts(tuple(state), stack=("a.py:b", *stack) if stack else (), **fields)


def thread(*stack: str) -> Facts:
    return Facts(("S",), others=(("t.py:run", *stack),))


@pytest.mark.parametrize(
    ("seen", "doing"),
    [
        (facts(), Doing.NOTHING),
        (facts("ST"), Doing.STOPPED),
        (facts("TT", share=0.01), Doing.LIMITED),
        (facts("t"), Doing.DEBUGGED),
        (facts(traced=True), Doing.DEBUGGED),
        (facts("R", share=0.9), Doing.COMPUTES),
        (facts("R", share=0.3), Doing.NOTHING),
        (facts("R", share=0.9, gpu=True), Doing.NOTHING),
        (facts("R", share=0.9, gpu=True, waiting=True), Doing.COLLECTIVE),
        (facts("SD"), Doing.STORAGE),
        (facts("D", waiting=True), Doing.COLLECTIVE),
        (facts(kernel="rpc_wait_bit_killable"), Doing.STORAGE),
        (facts(call=Call.FILE), Doing.STORAGE),
        (facts("S", SAVE), Doing.STORAGE),
        (facts("S", "/src/outlast/checkpoint/save/buffers.py:claim"), Doing.STORAGE),
        (facts(io=1), Doing.STORAGE),
        (facts(call=Call.SOCKET), Doing.NETWORK),
        (facts("S", "/usr/lib/python3.11/ssl.py:read"), Doing.NETWORK),
        (facts(call=Call.CHILD), Doing.CHILD),
        (facts("S", "/usr/lib/python3.11/subprocess.py:wait"), Doing.CHILD),
        (facts("S", LOAD), Doing.LOADER),
        (facts("S", DEBUG), Doing.DEBUGGED),
        (facts(call=Call.SLEEP), Doing.SLEEPS),
        (thread(SOCKET), Doing.NETWORK),
        (thread(SAVE), Doing.STORAGE),
        (thread(SAVE, "t.py:hook"), Doing.NOTHING),
        (thread(GET, "t.py:hook"), Doing.NOTHING),
        (thread("/outlast/checkpoint/save/staging.py:_run"), Doing.NOTHING),
    ],
)
def test_what_a_rank_does(seen: Facts, doing: Doing) -> None:
    assert doing_of(seen) is doing


@pytest.mark.parametrize(
    ("library", "frames", "doing"),
    [
        (SAVE, 2, Doing.STORAGE),
        (GET, 3, Doing.NETWORK),
        (LOAD, 6, Doing.LOADER),
        (f"{SITE}/torch/multiprocessing/spawn.py:join", 6, Doing.CHILD),
        (DEBUG, 6, Doing.DEBUGGED),
    ],
)
def test_a_library_that_called_the_script_back_proves_nothing(
    library: str, frames: int, doing: Doing
) -> None:
    assert doing_of(facts("S", library, *("train.py:step",) * (frames - 1))) is doing
    assert doing_of(facts("S", library, *("train.py:step",) * frames)) is Doing.NOTHING
