"""A step that is awaited after a restart and rejected by another check has not passed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from outlast.config import RerunOptions
from outlast.ipc.exchange import SoloExchange
from outlast.numerics.policy.numerics import Finding
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Observation
from outlast.rerun.worker.rerun import RerunStateMachine, ResultRejected

COPIES = ("step-000000080.g1", "step-000000070.g1")


def machine(folder: Path, copy: str) -> RerunStateMachine:
    """Return that of a process which goes on from a copy."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = RerunStateMachine(model, optimizer, RerunOptions(), identity=lambda: "GPU-0")
    found.loaded(int(copy[5:14]), f"local/{copy}")
    found.begin(folder, SoloExchange(), lambda: COPIES)
    return found


def rejected(step: int, action: Action) -> Finding:
    return Finding(Check.NAN_IN_LOSS, action, step, (0,), "the loss of rank 0", math.nan, "it is nan", step)


def attempts(reruns: RerunStateMachine, step: int, finding: Finding | None) -> Finding | None:
    """Do a step until no other attempt is made, the result being the same each time; return what follows."""
    seen = Observation(step, (math.nan if finding else 1.0,), (1.0,))
    attempt = 0
    reruns.before(step, attempt, None)
    while reruns.again(seen, finding):
        attempt += 1
        reruns.before(step, attempt, None)
    return reruns.verdict(seen, finding)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Incidents of a process that asked for an older copy because of step 83."""
    found = attempts(machine(tmp_path, COPIES[0]), 83, rejected(83, Action.RERUN))
    assert found is not None
    assert "load another copy" in found.reason
    return tmp_path


def verdicts(folder: Path) -> list[str]:
    return [json.loads(path.read_text())["verdict"] for path in folder.iterdir()]


def test_a_step_that_passes_with_another_copy_says_that_the_first_was_bad(folder: Path) -> None:
    attempts(machine(folder, COPIES[1]), 83, None)
    assert verdicts(folder) == ["bad checkpoint"]


def test_a_step_that_another_check_rejects_has_not_passed(folder: Path) -> None:
    with pytest.raises(ResultRejected):
        attempts(machine(folder, COPIES[1]), 83, rejected(83, Action.SKIP))
    assert verdicts(folder) == ["inconclusive"]
