"""Hangs as ranks with GPUs show them: they spin at a line of the script, and their hosts have run ahead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.hang.policy.diagnosis import BY_ORDER, BY_STATE, RankEvidence, Verdict, blame_for_hang
from outlast.hang.policy.rank_state import GroupState

AT_ITEM = ("train.py:main", "train.py:log_loss")
ELSEWHERE = {"late": ("train.py:main", "data.py:read_batch"), "deadlock": ("train.py:main", "pool.py:submit")}
GROUP = "0"


def state(ranks: int, entered: int, pending: int = 0, odd: int = 0) -> tuple[GroupState, ...]:
    """Return how far a rank is; ``odd`` is the number of a collective that only this rank enters."""
    names = [(number, "broadcast" if number == odd else "all_reduce") for number in range(1, entered + 1)]
    told = [one for one in names if one[0] == pending] + names[-8:]  # as a rank answers
    return (GroupState(GROUP, tuple(range(ranks)), entered, pending, tuple(told)),)


def spinning(rank: int, collectives: tuple[GroupState, ...] | None, **fields: Any) -> RankEvidence:
    usual: dict[str, Any] = {"alive": True, "process_state": "R", "cpu_busy": True, "stack": AT_ITEM}
    usual |= {"step": 7, "sections": ("step",), "last_beat": 100.0, "gpu": True}
    return RankEvidence(rank, collectives=collectives, **{**usual, **fields})


@st.composite
def hangs(draw: st.DrawFn, kind: str) -> tuple[int, Verdict]:
    """Draw a hang of a kind; return the culprit and the verdict."""
    ranks = draw(st.integers(3, 16))
    culprit = draw(st.integers(0, ranks - 1))
    stuck = draw(st.integers(2, 40))  # number of the collective that does not end
    evidence = []
    for rank in range(ranks):
        ahead = draw(st.integers(0, 8))  # collectives that the host has enqueued behind it
        last_beat = draw(st.floats(90, 110))
        others = spinning(rank, state(ranks, stuck + ahead, stuck), last_beat=last_beat)
        if rank != culprit:
            evidence.append(others)
        elif kind == "ahead":
            mine = state(ranks, stuck + ahead + 1, stuck, odd=stuck)
            evidence.append(spinning(rank, mine, last_beat=last_beat))
        elif kind == "stopped":
            evidence.append(
                spinning(rank, None, process_state="T", stack=(), cpu_busy=False, last_beat=last_beat)
            )
        else:
            fields = {"process_state": "S", "cpu_busy": draw(st.booleans()), "last_beat": last_beat}
            behind = state(ranks, draw(st.integers(1, stuck - 1)))
            evidence.append(spinning(rank, behind, stack=ELSEWHERE[kind], **fields))
    return culprit, blame_for_hang(evidence)


@pytest.mark.parametrize("kind", ["late", "ahead", "deadlock", "stopped"])
@given(data=st.data())
def test_the_culprit_is_named_whatever_the_others_have_enqueued(kind: str, data: st.DataObject) -> None:
    culprit, found = data.draw(hangs(kind))
    assert found.rank == culprit, found
    assert found.basis == (BY_STATE if kind == "stopped" else BY_ORDER)
    assert culprit not in found.waiting
