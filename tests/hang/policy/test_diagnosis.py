"""Who is to blame, for a hang by the evidence about every rank, and for deaths by who ended first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.hang.policy.diagnosis import (
    BY_ORDER,
    BY_STACKS,
    BY_STATE,
    BY_STEPS,
    Death,
    RankEvidence,
    Verdict,
    blame_for_hang,
    cause_of,
    first_failed,
    is_waiting,
    looks_like_victim,
)
from outlast.hang.policy.rank_state import GroupState
from tests.hang.policy.builders import LOGS, READS, SITE, WAITS, group, rank

C10D = f"{SITE}/torch/distributed/distributed_c10d.py"


def blamed(*ranks: RankEvidence) -> tuple[int, tuple[int, ...]]:
    found = blame_for_hang(ranks)
    return found.rank, found.waiting


@pytest.mark.parametrize(
    ("waits", "frames"),
    [
        (True, WAITS[1:]),
        (True, (f"{C10D}:barrier", f"{SITE}/a.py:b", f"{SITE}/c.py:d")),
        (True, (f"{SITE}/torch/distributed/c10d_logger.py:wrapper",)),
        (True, (f"{SITE}/torch/nn/parallel/distributed.py:_sync_buffers",)),
        (True, (f"{SITE}/torch/distributed/_functional_collectives.py:wait_tensor",)),
        (True, (f"{SITE}/torch/distributed/rendezvous.py:_create_c10d_store",)),
        (True, (f"{SITE}/torch/distributed/algorithms/join.py:notify_join_context",)),
        (True, ("/src/outlast/ipc/exchange.py:gather",)),
        (True, (f"{SITE}/torch/_tensor.py:backward", f"{SITE}/torch/autograd/graph.py:_engine_run_backward")),
        (True, (f"{SITE}/torch/cuda/__init__.py:synchronize",)),
        (False, ()),
        (False, READS),
        (False, ("train.py:wait",)),
        (False, ("/usr/lib/python3.11/threading.py:wait",)),
        (False, (f"{SITE}/torch/distributed/checkpoint/filesystem.py:read_data",)),
        (False, (f"{SITE}/torch/nn/modules/linear.py:forward",)),
        (False, (WAITS[-1], "a.py:a", "b.py:b", "c.py:c")),
    ],
)
def test_a_rank_in_a_collective_waits(waits: bool, frames: tuple[str, ...]) -> None:
    assert is_waiting(("train.py:main", *frames) if frames else ()) is waits


SIGNS: list[tuple[dict[str, Any], str]] = [  # the strongest first
    ({"process_state": "T", "stack": ()}, BY_STATE),
    ({"process_state": "D", "stack": READS}, BY_STATE),
    ({"stack": READS}, BY_STACKS),
    ({"stack": ()}, BY_STATE),
    ({"step": 6}, BY_STEPS),
]


@pytest.mark.parametrize("sign", range(len(SIGNS)))
def test_the_odd_one_is_the_culprit_and_stronger_evidence_comes_first(sign: int) -> None:
    fields, basis = SIGNS[sign]
    found = blame_for_hang((rank(0), rank(1, **fields, sections=("step", "data")), rank(2)))
    assert (found.rank, found.waiting, found.basis) == (1, (0, 2), basis)
    assert "'data'" in found.reason
    stack = fields.get("stack", WAITS)
    assert stack == () or stack[-1] in found.reason
    for weaker, _ in SIGNS[sign + 1 :]:
        assert blame_for_hang((rank(0), rank(1, **weaker), rank(2, **fields))).rank == 2, weaker


CLAIMS = {"stack": ("train.py:main", "/src/outlast/checkpoint/save/buffers.py:claim"), "last_beat": 8.0}
STOPPED = {"process_state": "T", "last_beat": 8.0}
AWAY, GPU = {"stack": READS}, {"gpu": True, "stack": READS}
SPINS = {**GPU, "cpu_busy": True}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(
            [{}, {**AWAY, "last_beat": 9.0}, {**AWAY, "last_beat": 8.0}], (2, (0,)), id="silent first"
        ),
        pytest.param([{}, STOPPED, STOPPED, STOPPED], (1, (0,)), id="equally silent: the lowest"),
        pytest.param(
            [{}, {**AWAY, "last_beat": 9.0}, CLAIMS, CLAIMS], (1, (0, 2, 3)), id="waits for a buffer of it"
        ),
        pytest.param([{}, {}, CLAIMS], (2, (0, 1)), id="waits for a buffer of nobody"),
        pytest.param([{"process_state": "D"}, AWAY], (1, (0,)), id="in the kernel, in a collective"),
        pytest.param([{"step": 8}, {"step": 7}, {"step": 6}, {"step": 8}], (2, (0, 1, 3)), id="lowest step"),
        pytest.param([AWAY, {"stack": ()}], (1, (0,)), id="works"),
        pytest.param([AWAY, {"stack": ("train.py:main", "train.py:other")}], (-1, ()), id="nobody waits"),
        pytest.param([{"stack": ()}] * 2, (-1, ()), id="nobody answers"),
        pytest.param([{"process_state": "D"}, {}], (-1, ()), id="states without meaning"),
        # On GPUs a rank that waits in NCCL does so below a frame of the script, as that of loss.item().
        pytest.param([{**GPU, "stack": LOGS}] * 2 + [GPU], (2, (0, 1)), id="GPU: place"),
        pytest.param(
            [{**GPU, "stack": LOGS}] * 2 + [GPU, {**GPU, "stack": ("a.py:b",)}], (-1, ()), id="GPU: 2 places"
        ),
        pytest.param([{**GPU, "stack": LOGS}, GPU], (-1, ()), id="GPU: odd one of two"),
        pytest.param([GPU, SPINS], (0, (1,)), id="GPU: one rests"),
        pytest.param([SPINS, GPU, SPINS, SPINS], (1, (0, 2, 3)), id="GPU: one of four rests"),
        pytest.param([GPU, GPU], (-1, ()), id="GPU: both rest"),
        pytest.param([GPU, {**AWAY, "cpu_busy": True}], (-1, ()), id="other one has none and computes"),
        pytest.param([GPU] * 3 + [{**GPU, "stack": ()}], (3, (0, 1, 2)), id="GPU: no answer"),
        pytest.param(
            [GPU, {**GPU, "stack": LOGS}, {**GPU, "stack": ()}], (2, (0, 1)), id="GPU: no answer, 2 places"
        ),
        pytest.param([], (-1, ()), id="no evidence"),
        pytest.param([{}], (0, ()), id="alone"),
        pytest.param([{"process_state": "T", "stack": ()}], (0, ()), id="alone, stopped"),
        pytest.param([{"process_state": "D", **AWAY}], (0, ()), id="alone, in the kernel"),
    ],
)
def test_who_is_named(ranks: list[dict[str, Any]], expected: tuple[int, tuple[int, ...]]) -> None:
    evidence = [rank(number, **fields) for number, fields in enumerate(ranks)]
    assert blamed(*evidence) == expected


def test_ranks_that_share_a_sign_are_told_with_the_one_that_is_named() -> None:
    found = blame_for_hang(
        (rank(0), *(rank(number, process_state="T", last_beat=8.0) for number in (3, 1, 2)))
    )
    assert found.rank == 1
    assert "3, 2" in found.reason


@pytest.mark.parametrize("behind", [0, 1])
def test_the_order_of_collectives_names_the_rank_that_is_behind_and_where_it_is(behind: int) -> None:
    waits = rank(1 - behind, collectives=(group(7, 7, (0, 1)),), sections=("forward",))
    found = blame_for_hang(
        (waits, rank(behind, collectives=(group(6, 0, (0, 1)),), stack=READS, sections=("step", "data")))
    )
    assert (found.rank, found.waiting, found.basis) == (behind, (1 - behind,), BY_ORDER)
    assert "'data'" in found.reason
    assert found.reason.endswith(READS[-1])


INSIDE = {"collectives": (group(7, 7, (0, 1)),)}


@pytest.mark.parametrize(
    ("fields", "basis"),
    [
        (INSIDE, BY_ORDER),
        ({**INSIDE, **GPU}, BY_ORDER),
        ({**INSIDE, "stack": ()}, BY_ORDER),
        ({**INSIDE, **AWAY}, BY_STACKS),  # they have left it
        ({}, BY_STACKS),
        ({"process_state": "T"}, BY_STATE),
        ({"process_state": "D", **AWAY}, BY_STATE),
    ],
)
def test_ranks_that_are_all_alike_name_nobody(fields: dict[str, Any], basis: str) -> None:
    found = blame_for_hang([rank(number, **fields) for number in (0, 1)])
    assert (found.rank, found.basis) == (-1, basis)


def test_a_rank_whose_device_hangs_is_named_because_the_others_wait_in_the_vote() -> None:
    """Were a guard's numbers reduced on the device, all ranks would wait where they are read."""
    begin = ("train.py:main", "/src/outlast/numerics/worker/guard.py:_ends")
    reads = (*begin, *(f"/src/outlast/numerics/worker/numerics.py:{name}" for name in ("read", "_to_host")))
    votes = (*begin, *(f"/src/outlast/agreement/worker/vote.py:{name}" for name in ("tally", "end")))
    spinning = {"gpu": True, "cpu_busy": True, "process_state": "R"}
    found = [rank(number, stack=reads if number == 1 else votes, **spinning) for number in range(3)]
    assert blamed(*found) == (1, (0, 2))
    assert blamed(*(rank(number, stack=reads, **spinning) for number in range(3))) == (-1, ())


def test_a_single_odd_rank_is_named_whatever_the_others_are_and_the_verdict_is_whole() -> None:
    named: Counter[int] = Counter()

    @settings(max_examples=300)
    @given(
        st.lists(st.sampled_from([{}, *(fields for fields, _ in SIGNS)]), min_size=1, max_size=6),
        st.randoms(use_true_random=False),
    )
    def check(fields: list[dict[str, Any]], shuffle: Any) -> None:
        ranks = [rank(number, **one) for number, one in enumerate(fields)]
        found = blame_for_hang(ranks)
        shuffle.shuffle(ranks)
        assert blame_for_hang(ranks).rank == found.rank, "the order of the evidence does not matter"
        assert found.rank in {-1, *range(len(ranks))}
        assert found.rank not in found.waiting
        assert found.reason
        odd = [number for number, one in enumerate(fields) if one]
        if len(odd) == 1:
            assert found.rank == odd[0]
        named[found.rank >= 0] += 1

    check()
    assert min(named[True], named[False]) > 2, named


# Ranks on GPUs spin at a line of the script, and their hosts have run ahead.


def enqueued(ranks: int, entered: int, pending: int = 0, odd: int = 0) -> tuple[GroupState, ...]:
    """Return how far a rank is; ``odd`` is the number of a collective that only this rank enters."""
    names = [(number, "broadcast" if number == odd else "all_reduce") for number in range(1, entered + 1)]
    told = [one for one in names if one[0] == pending] + names[-8:]  # as a rank answers
    return (GroupState("0", tuple(range(ranks)), entered, pending, tuple(told)),)


@st.composite
def hangs(draw: st.DrawFn, kind: str) -> tuple[int, Verdict]:
    """Draw a hang of a kind; return the culprit and the verdict."""
    ranks = draw(st.integers(3, 16))
    culprit = draw(st.integers(0, ranks - 1))
    stuck = draw(st.integers(2, 40))  # number of the collective that does not end
    evidence = []
    for number in range(ranks):
        ahead = draw(st.integers(0, 8))  # collectives that the host has enqueued behind it
        fields: dict[str, Any] = {"process_state": "R", **SPINS, "stack": LOGS}
        fields |= {
            "last_beat": draw(st.floats(90, 110)),
            "collectives": enqueued(ranks, stuck + ahead, stuck),
        }
        if number == culprit and kind == "ahead":
            fields["collectives"] = enqueued(ranks, stuck + ahead + 1, stuck, odd=stuck)
        elif number == culprit and kind == "stopped":
            fields |= {"collectives": None, "process_state": "T", "stack": (), "cpu_busy": False}
        elif number == culprit:
            fields |= {"process_state": "S", "cpu_busy": draw(st.booleans()), "stack": READS}
            fields["collectives"] = enqueued(ranks, draw(st.integers(1, stuck - 1)))
        evidence.append(rank(number, **fields))
    return culprit, blame_for_hang(evidence)


@pytest.mark.parametrize("kind", ["late", "ahead", "stopped"])
@given(data=st.data())
def test_on_gpus_the_culprit_is_named_whatever_the_others_have_enqueued(
    kind: str, data: st.DataObject
) -> None:
    culprit, found = data.draw(hangs(kind))
    assert found.rank == culprit, found
    assert found.basis == (BY_STATE if kind == "stopped" else BY_ORDER)
    assert culprit not in found.waiting


# Deaths. The first seven were heard under torch 2.13 with gloo, from ranks whose peer or store had gone.
# The next two stand in that torch's library, the three after them are NCCL's as its users report them.
HEARD = [
    "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:63151: Connection reset by peer.",
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:25500.",
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation",
    "DistNetworkError: Broken pipe\nException raised from sendBytes at c10d/Utils.hpp:758",
    "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting",
    "RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms",
    "DistStoreError: wait timeout after 1000ms, keys: /default_pg/0//nokey1",
    "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "DistNetworkError: The client socket has timed out after 1000ms while trying to connect to (h, 29500).",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "DistBackendError: ncclRemoteError: A call failed possibly due to a network error",
    "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "ExchangeFailed: inventory: rank 2 did not answer within 600 s",
]
PEER = "PeerFailed: this rank ends because another one failed: rank 12: RuntimeError: boom"
OTHERWISE = [
    None,
    "",
    "RuntimeError: boom",
    "ValueError: math domain error",
    "torch.OutOfMemoryError: CUDA out of memory",
    "TimeoutError: the licence server timed out",
]


@pytest.mark.parametrize(
    ("message", "victim", "cause"),
    [(PEER, True, 12), *((one, True, None) for one in HEARD), *((one, False, None) for one in OTHERWISE)],
)
def test_what_ranks_raise_when_another_one_has_gone(
    message: str | None, victim: bool, cause: int | None
) -> None:
    assert (looks_like_victim(message), cause_of(message)) == (victim, cause)


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([(0, 5.0, None), (1, 4.0, "RuntimeError: boom"), (2, 4.5, None)], (1, ())),
        ([(2, 5.0, None), (1, 5.0, None)], (1, ())),
        ([(0, 5.0, HEARD[0]), (1, 5.2, None), (2, 5.1, HEARD[1])], (1, (0, 2))),
        ([(0, 5.0, HEARD[0]), (1, 4.9, HEARD[3])], (1, ())),
    ],
    ids=["the earliest", "equal times: by rank", "not a victim", "victims alone: the earliest"],
)
def test_the_first_death_that_is_no_consequence_is_the_cause(
    deaths: list[tuple[int, float, str | None]], expected: tuple[int, tuple[int, ...]]
) -> None:
    found = first_failed([Death(number, at, -9, message) for number, at, message in deaths])
    assert (found.rank, found.waiting) == expected
