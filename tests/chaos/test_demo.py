"""The demo must not pass when a fault went unseen, was blamed on the wrong rank, or could not be made."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from outlast.chaos import commands
from outlast.chaos.campaign import Conduct
from outlast.chaos.faults import Made
from outlast.errors import UsageError
from outlast.observe.policy.goodput import Incident
from outlast.recovery.policy.events import FaultSeen, Loaded, Quarantined, Record, RunStarted


def seen(kind: str, rank: int, clock: float = 11.0) -> FaultSeen:
    return FaultSeen(0.0, clock, 1, kind, "n", rank, 50, 10.0, "reason", "signature")


def launched(clock: float) -> RunStarted:
    return RunStarted(0.0, clock, 1, "r", "n", 1, "boot", ("train.py",), 4, "reason")


def quarantined(step: int) -> Quarantined:
    return Quarantined(0.0, 12.0, 2, step, f"step-{step:09d}.g1", "digest")


KILL = Made("rank_killed", 2, "detail", 10.0)
STOP = Made("rank_hung", 2, "detail", 10.0)
FLIP = Made("bit_flipped", -1, "step-000000080.g1/rank-00000.safetensors: bit 3 of byte 9", 10.0)
AGENT = Made("agent_killed", -1, "detail", 10.0)


@pytest.mark.parametrize(
    ("made", "records", "problems"),
    [
        (KILL, [seen("crash", 2)], 0),
        (STOP, [seen("hang", 2)], 0),
        (FLIP, [quarantined(80)], 0),
        (AGENT, [launched(12.0)], 0),
        (KILL, [], 1),
        (KILL, [seen("crash", 2, clock=9.0)], 1),
        (KILL, [seen("crash", 1)], 1),
        (STOP, [seen("crash", 2)], 1),
        (FLIP, [seen("crash", 2)], 1),
        (FLIP, [quarantined(60)], 1),
        (AGENT, [launched(1.0)], 1),
    ],
)
def test_an_injection_that_nothing_answers_is_a_problem(
    made: Made, records: list[Record], problems: int
) -> None:
    found = commands.unanswered(Conduct(made=[made], records=records))
    assert [made.fault in one for one in found] == [True] * problems


@pytest.mark.parametrize(("steps", "exists", "named"), [(100, False, "260"), (300, True, "")])
def test_what_cannot_be_shown_is_refused(tmp_path: Path, steps: int, exists: bool, named: str) -> None:
    folder = tmp_path if exists else tmp_path / "new"
    options = argparse.Namespace(steps=steps, dir=folder, seed=0, nproc_per_node=4)
    with pytest.raises(UsageError, match=named or str(folder)):
        commands.show(options)


def test_the_example_is_found_in_a_checkout() -> None:
    assert commands.example().name == "train_gpt.py"


def test_what_was_done_has_a_line_for_each_copy() -> None:
    copy = "step-000000100.g1"
    loaded = Loaded(0.0, 12.0, 2, 100, copy, 9, 0.1, "the newest", (f"memory/{copy}",))
    incident = Incident("crash", 1.0, "n", 2, 1, 80, "reason", "restart-in-job", "restart 1 of 3")
    lines = commands._answer(incident, [quarantined(120), loaded]).splitlines()
    assert ["120" in lines[1], "100" in lines[2], len(lines)] == [True, True, 3]
