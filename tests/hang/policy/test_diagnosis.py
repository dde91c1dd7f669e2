from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.hang.policy.diagnosis import (
    BY_ORDER,
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

SITE = "/venv/lib/python3.11/site-packages"
WAITS = ("train.py:main", "train.py:step", f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce")
READS = ("train.py:main", "data.py:read_batch")


def rank(number: int, **fields: Any) -> RankEvidence:
    usual = {
        "alive": True,
        "process_state": "S",
        "cpu_busy": False,
        "stack": WAITS,
        "step": 7,
        "sections": (),
        "last_beat": 100.0 + number,
    }
    return RankEvidence(number, **{**usual, **fields})


def verdict(*ranks: RankEvidence) -> Verdict:
    return blame_for_hang(ranks)


@pytest.mark.parametrize(
    "stack",
    [
        WAITS,
        (
            "train.py:main",
            f"{SITE}/torch/distributed/distributed_c10d.py:barrier",
            f"{SITE}/a.py:b",
            f"{SITE}/c.py:d",
        ),
        ("train.py:main", f"{SITE}/torch/distributed/c10d_logger.py:wrapper"),
        ("train.py:main", f"{SITE}/torch/nn/parallel/distributed.py:_sync_buffers"),
        ("train.py:main", f"{SITE}/torch/distributed/_functional_collectives.py:wait_tensor"),
        ("train.py:main", f"{SITE}/torch/distributed/rendezvous.py:_create_c10d_store"),
        ("train.py:main", f"{SITE}/torch/distributed/algorithms/join.py:notify_join_context"),
        ("train.py:main", "/src/outlast/ipc/exchange.py:gather"),
        (
            "train.py:main",
            f"{SITE}/torch/_tensor.py:backward",
            f"{SITE}/torch/autograd/graph.py:_engine_run_backward",
        ),
        ("train.py:main", f"{SITE}/torch/cuda/__init__.py:synchronize"),
    ],
)
def test_a_rank_in_a_collective_waits(stack: tuple[str, ...]) -> None:
    assert is_waiting(stack)


@pytest.mark.parametrize(
    "stack",
    [
        (),
        READS,
        ("train.py:wait",),
        ("/usr/lib/python3.11/threading.py:wait",),
        (f"{SITE}/torch/distributed/checkpoint/filesystem.py:read_data",),
        (f"{SITE}/torch/nn/modules/linear.py:forward",),
        (WAITS[-1], "a.py:a", "b.py:b", "c.py:c"),
    ],
)
def test_a_rank_elsewhere_does_not(stack: tuple[str, ...]) -> None:
    assert not is_waiting(stack)


# Hangs: one piece of evidence each, then their order


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"process_state": "T"}, f"rank 1 is stopped (process state T), at {WAITS[-1]}"),
        (
            {"process_state": "D", "stack": READS},
            "rank 1 is stuck in the kernel (process state D), at data.py:read_batch",
        ),
        (
            {"stack": READS, "sections": ("step", "data")},
            "rank 1 is not in the collective that the others wait in, in section 'data', at"
            " data.py:read_batch",
        ),
        (
            {"stack": (), "sections": ("step",)},
            "rank 1 does not answer (process state 'S'), in section 'step'",
        ),
        ({"step": 6}, f"rank 1 is behind, at step 6, at {WAITS[-1]}"),
    ],
)
def test_the_odd_one_is_the_culprit_and_the_others_wait(fields: dict[str, Any], reason: str) -> None:
    assert verdict(rank(0), rank(1, **fields), rank(2)) == Verdict(1, reason, (0, 2))


SIGNS: list[dict[str, Any]] = [
    {"process_state": "T", "stack": ()},
    {"process_state": "D", "stack": READS},
    {"stack": READS},
    {"stack": ()},
    {"step": 6},
]


@pytest.mark.parametrize("stronger", range(len(SIGNS) - 1))
def test_stronger_evidence_comes_first(stronger: int) -> None:
    for weaker in range(stronger + 1, len(SIGNS)):
        found = verdict(rank(0), rank(1, **SIGNS[weaker]), rank(2, **SIGNS[stronger]))
        assert found.rank == 2, (stronger, weaker, found)


def test_who_was_silent_first_decides_between_ranks_that_share_a_sign() -> None:
    found = verdict(rank(0), rank(1, stack=READS, last_beat=9.0), rank(2, stack=READS, last_beat=8.0))
    assert found == Verdict(
        2,
        "rank 2 is not in the collective that the others wait in, at data.py:read_batch; so is rank 1, silent"
        " since later",
        (0,),
    )
    three = verdict(rank(0), *(rank(number, process_state="T", last_beat=8.0) for number in (3, 1, 2)))
    assert three.rank == 1
    assert three.reason.endswith("; so are ranks 3, 2, silent since later")


def test_a_rank_that_waits_for_a_buffer_is_not_to_blame_for_one_that_stages_nothing() -> None:
    claims = {"stack": ("train.py:main", "/src/outlast/checkpoint/save/buffers.py:claim"), "last_beat": 8.0}
    ranks = (rank(0), rank(1, stack=READS, last_beat=9.0), rank(2, **claims), rank(3, **claims))
    words = "rank 1 is not in the collective that the others wait in, at data.py:read_batch"
    assert verdict(*ranks) == Verdict(1, words, (0, 2, 3))
    assert verdict(rank(0), rank(1), rank(2, **claims)).rank == 2, "nobody else holds it up"


def test_a_rank_that_waits_in_the_kernel_in_a_collective_is_none_the_worse() -> None:
    assert verdict(rank(0, process_state="D"), rank(1, stack=READS)).rank == 1


def test_only_the_ranks_at_the_lowest_step_are_behind() -> None:
    assert verdict(rank(0, step=8), rank(1, step=7), rank(2, step=6), rank(3, step=8)).rank == 2


def test_without_anybody_in_a_collective_being_elsewhere_proves_nothing() -> None:
    ranks = (rank(0, stack=READS), rank(1, stack=("train.py:other",)))
    assert verdict(*ranks) == Verdict(
        -1, "undetermined: the evidence of all ranks is the same; see the stacks"
    )


def test_a_rank_that_works_is_not_to_blame_for_one_that_does_not_answer() -> None:
    assert verdict(rank(0, stack=READS), rank(1, stack=())).rank == 1


def test_when_nobody_answers_that_says_nothing_about_anybody() -> None:
    assert verdict(rank(0, stack=()), rank(1, stack=())).rank == -1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "every rank waits in a collective; not all in the same one, or a link is down"),
        ({"process_state": "T"}, "every rank is stopped (process state T)"),
        ({"process_state": "D", "stack": READS}, "every rank is stuck in the kernel (state D)"),
        ({"stack": READS}, "the evidence of all ranks is the same; see the stacks"),
    ],
)
def test_when_all_are_alike_nobody_is_named(fields: dict[str, Any], reason: str) -> None:
    alike = [rank(number, **fields) for number in range(3)]
    assert blame_for_hang(alike) == Verdict(-1, f"undetermined: {reason}")


def at(entered: int, pending: int, *ranks: int) -> tuple[GroupState, ...]:
    """Return how far a rank is in a group."""
    return (GroupState("0", ranks, entered, pending),)


@pytest.mark.parametrize("behind", [0, 1])
def test_the_order_of_collectives_names_the_rank_that_is_behind_and_where_it_is(behind: int) -> None:
    waits = rank(1 - behind, collectives=at(7, 7, 0, 1), sections=("forward",))
    found = verdict(waits, rank(behind, collectives=at(6, 0, 0, 1), stack=READS, sections=("step", "data")))
    assert (found.rank, found.waiting, found.basis) == (behind, (1 - behind,), BY_ORDER)
    assert found.reason.startswith(f"rank {behind} is behind in the order of collectives: ")
    assert found.reason.endswith(f"rank {1 - behind} waits in number 7, in section 'data', at {READS[-1]}")


@pytest.mark.parametrize("fields", [{}, {"gpu": True, "stack": READS}, {"stack": ()}])
def test_ranks_that_have_all_entered_a_collective_and_may_wait_in_it_name_nobody(
    fields: dict[str, Any],
) -> None:
    found = verdict(*(rank(number, collectives=at(7, 7, 0, 1), **fields) for number in (0, 1)))
    assert found.rank == -1
    assert found.reason.startswith("undetermined: every rank has entered number 7 of group 0")
    assert found.reason.endswith("a link is down?")


def test_ranks_that_were_seen_outside_of_a_collective_do_not_wait_in_it() -> None:
    found = verdict(*(rank(number, collectives=at(7, 7, 0, 1), stack=READS) for number in (0, 1)))
    assert found.reason == "undetermined: the evidence of all ranks is the same; see the stacks"


def test_states_that_differ_without_meaning_anything_do_not_name_a_rank() -> None:
    assert verdict(rank(0, process_state="D"), rank(1)).reason.startswith("undetermined: every rank waits")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, f"rank 4 is silent, and there is no other rank, at {WAITS[-1]}"),
        ({"process_state": "T", "stack": ()}, "rank 4 is stopped (process state T)"),
        (
            {"process_state": "D", "stack": READS},
            "rank 4 is stuck in the kernel (process state D), at data.py:read_batch",
        ),
        (
            {"stack": (), "sections": ("a", "b")},
            "rank 4 is silent, and there is no other rank, in section 'b'",
        ),
    ],
)
def test_a_single_rank_is_to_blame(fields: dict[str, Any], reason: str) -> None:
    assert verdict(rank(4, **fields)) == Verdict(4, reason)


def test_without_evidence_there_is_no_verdict() -> None:
    assert verdict() == Verdict(-1, "no rank could be examined")


def test_a_single_odd_rank_is_named_whatever_the_others_are_and_the_verdict_is_whole() -> None:
    named: Counter[int] = Counter()
    looks = st.sampled_from([{}, *SIGNS])

    @settings(max_examples=300)
    @given(st.lists(looks, min_size=1, max_size=6), st.randoms(use_true_random=False))
    def check(fields: list[dict[str, Any]], shuffle: Any) -> None:
        ranks = [rank(number, **one) for number, one in enumerate(fields)]
        found = blame_for_hang(ranks)
        shuffle.shuffle(ranks)
        assert blame_for_hang(ranks).rank == found.rank, "the order of the evidence does not matter"
        assert found.rank in {-1, *range(len(ranks))}
        assert found.rank not in found.waiting
        assert found.reason.startswith((f"rank {found.rank} ", "undetermined: "))
        odd = [number for number, one in enumerate(fields) if one]
        if len(odd) == 1:
            assert found.rank == odd[0]
        named[found.rank >= 0] += 1

    check()
    assert min(named[True], named[False]) > 2, named


# Deaths

# The first seven were heard under torch 2.13 with gloo, from ranks whose peer or store had gone.
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


@pytest.mark.parametrize("message", HEARD)
def test_what_ranks_say_when_another_one_has_gone(message: str) -> None:
    assert looks_like_victim(message)


@pytest.mark.parametrize(
    "message",
    [
        None,
        "",
        "RuntimeError: boom",
        "ValueError: math domain error",
        "torch.OutOfMemoryError: CUDA out of memory",
        "TimeoutError: the licence server timed out",
    ],
)
def test_what_they_say_otherwise(message: str | None) -> None:
    assert not looks_like_victim(message)


def test_a_victim_may_name_the_rank_that_failed() -> None:
    named = "PeerFailed: this rank ends because another one failed: rank 12: RuntimeError: boom"
    assert looks_like_victim(named)
    assert cause_of(named) == 12
    assert [cause_of(message) for message in (None, "", "RuntimeError: boom", HEARD[0])] == [None] * 4


def test_the_earliest_death_is_the_cause() -> None:
    deaths = [Death(0, 5.0, -9), Death(1, 4.0, 1, "RuntimeError: boom"), Death(2, 4.5, -9)]
    assert first_failed(deaths) == Verdict(1, "it ended first")


def test_equal_times_go_by_rank() -> None:
    assert first_failed([Death(2, 5.0, -9), Death(1, 5.0, -9)]).rank == 1


def test_a_victim_that_was_heard_first_is_not_the_cause() -> None:
    deaths = [Death(0, 5.0, 1, HEARD[0]), Death(1, 5.2, -9), Death(2, 5.1, 1, HEARD[1])]
    assert first_failed(deaths) == Verdict(1, "ranks 0, 2 failed because of it", (0, 2))
    assert first_failed(deaths[:2]) == Verdict(1, "rank 0 failed because of it", (0,))


def test_among_victims_alone_the_earliest_is_named_with_a_proviso() -> None:
    deaths = [Death(0, 5.0, 1, HEARD[0]), Death(1, 4.9, 1, HEARD[3])]
    assert first_failed(deaths) == Verdict(
        1, "every error looks like the consequence of another one; the earliest is named"
    )


def test_on_gpus_the_rank_at_another_line_of_the_program_is_named_though_no_stack_shows_a_wait() -> None:
    """A rank that waits in NCCL does so below a frame of the script, such as that of ``loss.item()``."""
    at_item = ("train.py:main", "train.py:log_loss")
    ranks = [rank(number, gpu=True, stack=at_item, cpu_busy=True) for number in range(4)]
    ranks[2] = rank(2, gpu=True, stack=READS)
    assert verdict(*ranks).rank == 2
    assert "is not in the collective of the other ranks" in verdict(*ranks).reason
    ranks[3] = rank(3, gpu=True, stack=("train.py:main", "train.py:validate"))
    assert verdict(*ranks).rank == -1, "two different places tell nothing"


def test_a_rank_whose_device_hangs_is_named_because_the_others_wait_in_the_vote() -> None:
    """Were a guard's numbers reduced on the device, all ranks would wait where they are read."""
    begin = ("train.py:main", "/src/outlast/numerics/worker/guard.py:_ends")
    reads = (*begin, *(f"/src/outlast/numerics/worker/numerics.py:{name}" for name in ("read", "_to_host")))
    votes = (*begin, *(f"/src/outlast/agreement/worker/vote.py:{name}" for name in ("tally", "end")))
    spinning = {"gpu": True, "cpu_busy": True, "process_state": "R"}
    ranks = [rank(number, stack=votes, **spinning) for number in range(3)]
    found = verdict(ranks[0], rank(1, stack=reads, **spinning), ranks[2])
    assert (found.rank, found.waiting) == (1, (0, 2))
    assert verdict(*(rank(number, stack=reads, **spinning) for number in range(3))).rank == -1


def test_of_two_ranks_on_gpus_neither_is_the_odd_one_and_of_three_one_is() -> None:
    two = [rank(0, gpu=True, stack=READS), rank(1, gpu=True, stack=("train.py:main", "train.py:log_loss"))]
    assert verdict(*two).rank == -1
    assert verdict(*two, rank(2, gpu=True, stack=READS)).rank == 1


def test_a_rank_that_sleeps_in_the_function_in_which_the_others_wait_for_their_gpus_is_named() -> None:
    """All are in one function: the innermost frames are equal, since what waits is below Python."""
    spinning = [rank(number, gpu=True, stack=READS, cpu_busy=True) for number in (0, 2, 3)]
    idle = rank(1, gpu=True, stack=READS)
    assert verdict(idle, *spinning).rank == 1
    assert set(verdict(idle, *spinning).waiting) == {0, 2, 3}
    assert verdict(idle, spinning[0]).rank == 1
    for others in ([rank(0, gpu=True, stack=READS)], [rank(0, stack=READS, cpu_busy=True)]):
        assert verdict(idle, *others).rank == -1, (
            "both do the same; or the other one computes, and waits for nobody"
        )


def test_among_ranks_on_gpus_at_the_same_line_the_one_that_does_not_answer_is_the_odd_one() -> None:
    alike = [rank(number, gpu=True, stack=READS) for number in range(3)]
    assert verdict(*alike, rank(3, gpu=True, stack=())).reason.startswith("rank 3 does not answer")
    two = [rank(0, gpu=True, stack=READS), rank(1, gpu=True, stack=("train.py:main", "train.py:log_loss"))]
    assert verdict(*two, rank(2, gpu=True, stack=())).rank == 2, "of the two each is as odd as the other"
