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


KILL = Made("rank_killed", 2, "SIGKILL to process 17", 10.0)
STOP = Made("rank_hung", 2, "SIGSTOP to process 17", 10.0)
FLIP = Made("bit_flipped", -1, "step-000000080.g1/rank-00000.safetensors: bit 3 of byte 9", 10.0)
AGENT = Made("agent_killed", -1, "SIGKILL to agent 16", 10.0)
BAD_COPY = Quarantined(0.0, 12.0, 2, 80, "step-000000080.g1", "digest")


@pytest.mark.parametrize(
    ("made", "record"),
    [(KILL, seen("crash", 2)), (STOP, seen("hang", 2)), (FLIP, BAD_COPY), (AGENT, launched(12.0))],
)
def test_an_answered_injection_is_no_problem(made: Made, record: Record) -> None:
    assert commands.unanswered(Conduct(made=[made], records=[record])) == []


@pytest.mark.parametrize(
    ("made", "records", "said"),
    [
        (KILL, [], "no fault was seen"),
        (KILL, [seen("crash", 2, clock=9.0)], "no fault was seen"),
        (KILL, [seen("crash", 1)], "seen as crash of rank 1"),
        (STOP, [seen("crash", 2)], "seen as crash of rank 2"),
        (FLIP, [seen("crash", 2)], "was not quarantined"),
        (FLIP, [Quarantined(0.0, 12.0, 2, 60, "step-000000060.g1", "digest")], "was not quarantined"),
        (AGENT, [launched(1.0)], "no second launch"),
    ],
)
def test_an_injection_that_nothing_answers_is_a_problem(made: Made, records: list[Record], said: str) -> None:
    problems = commands.unanswered(Conduct(made=[made], records=records))
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.parametrize(
    ("steps", "exists", "said"), [(100, False, "at least 260"), (300, True, "exists already")]
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, steps: int, exists: bool, said: str) -> None:
    folder = tmp_path if exists else tmp_path / "new"
    options = argparse.Namespace(steps=steps, dir=folder, seed=0, nproc_per_node=4)
    with pytest.raises(UsageError, match=said):
        commands.show(options)


def test_the_example_is_found_in_a_checkout() -> None:
    assert commands.example().name == "train_gpt.py"


def test_what_was_done_fits_beside_the_figures_on_a_screen_of_80_columns() -> None:
    name = "step-000000080.g1"
    loaded = Loaded(
        0.0, 12.0, 2, 100, "step-000000100.g1", 9, 0.1, "the newest", ("memory/step-000000100.g1",)
    )
    quarantined = Quarantined(0.0, 12.0, 2, 120, name, "digest")
    incident = Incident("crash", 1.0, "n", 2, 1, 80, "reason", "restart-in-job", "restart 1 of 3")
    lines = commands._answer(incident, [quarantined, loaded]).splitlines()
    assert lines == ["all ranks restarted", "bad copy of step 120 quarantined", "step 100 loaded from memory"]
    assert max(map(len, lines)) <= 33
