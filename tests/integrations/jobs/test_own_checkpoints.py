"""Jobs that go on from a framework's own checkpoints, after a kill, a stop and a preemption, step by step."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from outlast.errors import ExitCode
from tests.support.frameworks import job, lines_of, needs, reached
from tests.support.launching import running, until

pytestmark = [pytest.mark.timeout(600), needs("transformers", "accelerate", "lightning")]
WAYS = {  # script, way; whether it ends bit for bit as undisturbed: Lightning keeps no random states
    "transformers": ("hf_trainer.py", "plain", True),
    "transformers, announced": ("hf_trainer.py", "callback", True),
    "lightning": ("lightning_trainer.py", "plain", False),
    "accelerate": ("saves_itself.py", "accelerate", True),
    "accelerate, announced": ("saves_itself.py", "accelerate,announced", True),
    "torch.save": ("saves_itself.py", "torch", True),
    "torch.save, announced": ("saves_itself.py", "torch,announced", True),
}
SAVED = 3  # steps between two checkpoints
LAST = {"hf_trainer.py": 12, "lightning_trainer.py": 16, "saves_itself.py": 12}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def undisturbed(way: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    script, kind, _ = WAYS[way]
    with running(job(folder, script, kind)) as run:
        assert run.finish() == 0, run.console()
    return (folder / "done-0").read_text()


def ends_as(folder: Path, way: str, undisturbed: str) -> None:
    """Check that training went on after the newest checkpoint, once, and what it ended with."""
    script, _, equal = WAYS[way]
    told = [json.loads(line)["step"] for line in lines_of(folder / "steps-0")]
    if script == "lightning_trainer.py":  # it tells of every batch, and two make a step
        steps = [after for before, after in pairwise(told) if after != before]
        first = 0  # the first batch after a checkpoint completes no step
    else:
        steps, first = told, 1
    breaks = [at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]]
    assert len(breaks) <= 1, steps
    for at in breaks:
        complete = {steps[at - 1] // SAVED * SAVED, (steps[at - 1] - 1) // SAVED * SAVED}
        assert steps[at] - first in complete, steps  # the save after the last step may have been cut
    assert sorted({*steps}) == list(range(1, LAST[script] + 1)), steps
    found = json.loads((folder / "done-0").read_text())
    assert found["step"] == json.loads(undisturbed)["step"]
    assert (folder / "done-1").read_text() == (folder / "done-0").read_text()
    if equal:
        assert found == json.loads(undisturbed)


def test_a_killed_job(tmp_path: Path, way: str, undisturbed: str) -> None:
    script, kind, _ = WAYS[way]
    with running(job(tmp_path / "job", script, kind, fatal=8)) as run:
        assert run.finish() == 0, run.console()
    assert len(run.records("fault_seen")) == 1
    ends_as(tmp_path / "job", way, undisturbed)


def test_a_job_with_a_stopped_rank(tmp_path: Path, way: str, undisturbed: str) -> None:
    script, kind, _ = WAYS[way]
    options = ("--ft-rank-heartbeat-timeout", "10")
    with running(job(tmp_path / "job", script, kind, pace=0.5, options=options)) as run:
        until(reached(tmp_path / "job" / "steps-0", 8), run.console)
        os.kill(run.pids()[1], signal.SIGSTOP)
        assert run.finish() == 0, run.console()
    assert [one["fault"] for one in run.records("fault_seen")] == ["hang"]
    ends_as(tmp_path / "job", way, undisturbed)


def test_a_preempted_job(tmp_path: Path, way: str, undisturbed: str) -> None:
    """The launcher is told to end; the same command goes on."""
    script, kind, _ = WAYS[way]
    run = job(tmp_path / "job", script, kind, pace=0.5)
    with running(run):
        until(reached(tmp_path / "job" / "steps-0", 8), run.console)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() in (128 + signal.SIGTERM, int(ExitCode.PREEMPTED)), run.console()
    with running(run):
        assert run.finish() == 0, run.console()
    ends_as(tmp_path / "job", way, undisturbed)
