"""The agreement's part of a page, read while it is written."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from outlast.agreement.policy.steps import Proposal, Stage, Status, Want
from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader
from outlast.ipc.step_words import AgentWords

FIRST = Proposal(1, Stage.PROPOSED, 1, 7, Want.SAVE)
SECOND = Proposal(2, Stage.COMMITTED, 3, 90, Want.STOP | Want.PREEMPTED, 50.0, 60.0, {"local": 2.0})


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[HeartbeatReader]:
    one = HeartbeatReader(tmp_path / "page", rank=3, generation=1, spawned=time.monotonic())
    yield one
    one.close()


def test_a_proposal_is_read_whole_or_not_at_all(reader: HeartbeatReader) -> None:
    words = HeartbeatPage.open(reader.path).agreement
    assert words.read() is None
    reader.agreement.say(FIRST)
    found: list[Proposal | None] = []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is AgentWords.say.__code__:
            found.append(words.read())
            return look
        return None

    sys.settrace(look)  # a look at every line of the writer
    try:
        reader.agreement.say(SECOND)
    finally:
        sys.settrace(None)
    assert len(found) > 4
    assert {None if one is None else one.number for one in found} <= {None, 1, 2}
    assert all(one in (None, FIRST, SECOND) for one in found)
    assert words.read() == SECOND


def test_the_ticket_changes_with_all_that_the_agent_says(reader: HeartbeatReader) -> None:
    words = HeartbeatPage.open(reader.path).agreement
    tickets = [words.ticket]
    for number in (1, 2, 3):
        for stage in Stage:
            reader.agreement.say(Proposal(number, stage, 1, 7))
            tickets.append(words.ticket)
    assert tickets[0] == 0
    assert sorted(set(tickets)) == tickets


def test_a_status_is_what_the_rank_has_written(reader: HeartbeatReader) -> None:
    page = HeartbeatPage.open(reader.path)
    words = page.agreement
    assert reader.agreement.read() == Status(3, 1, 0, 0, ends=math.inf, limit=math.inf)
    served = [words.served]
    reader.agreement.serve()
    assert [*served, words.served] == [False, True]
    words.begin(5, 40)
    words.go_on(41)
    words.terms(50.0, 60.0, {"memory": 0.0})
    words.want(Want.DUE | Want.STOP)
    words.answer(4, passed=True)
    found = Status(3, 2, 5, 41, 4, True, Want.DUE | Want.STOP, 50.0, 60.0, {"memory": 0.0})
    assert reader.agreement.read() == found
    assert words.round == 5
    page.heartbeat(42)
    assert reader.agreement.read().step == 41, "a step that was completed is not one that was left"
