"""Jobs that go on from a framework's own checkpoints, after a kill, a stop and a preemption, step by step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.frameworks import ENVIRONMENT, job, lines_of, reached, skip_without
from tests.support.launching import DEADLINE, running

pytestmark = pytest.mark.timeout(600)


class Way(NamedTuple):
    """A script, and how it saves."""

    script: str
    kind: str
    needs: str  # a package
    equal: bool = True  # it ends bit for bit as undisturbed: Lightning keeps no random states
    last: int = 12  # step
    interval: int = 3  # steps between two checkpoints
    fatal: int = 8  # the step at which rank 0 is killed
    disturbed: int = 8  # lines in the trace when rank 1 is stopped, or the job preempted
    silent: int = 10  # seconds that a rank may be silent
    agrees: bool = False  # when preempted, all ranks save and stop after the same step


MEGATRON = Way(
    "megatron_itself.py", "plain", "megatron", last=8, interval=2, fatal=6, disturbed=5, silent=30
)  # killed in a save; the first one starts a process, which takes long on a loaded host
WAYS = {
    "transformers": Way("hf_trainer.py", "plain", "transformers"),
    "transformers, announced": Way("hf_trainer.py", "callback", "transformers", agrees=True),
    "lightning": Way("lightning_trainer.py", "plain", "lightning", equal=False, last=16, agrees=True),
    "accelerate": Way("saves_itself.py", "accelerate", "accelerate"),
    "accelerate, announced": Way("saves_itself.py", "accelerate,announced", "accelerate", agrees=True),
    "deepspeed": Way("deepspeed_itself.py", "plain", "deepspeed", disturbed=7),
    "deepspeed, announced": Way("deepspeed_itself.py", "announced", "deepspeed", disturbed=7, agrees=True),
    "megatron-core": MEGATRON,
    "megatron-core, dcp.save": MEGATRON._replace(kind="dcp"),
    "torch.save": Way("saves_itself.py", "torch", "torch"),
    "torch.save, announced": Way("saves_itself.py", "torch,announced", "torch"),
}


SHORT = "torch.save, announced"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == SHORT else pytest.mark.long) for name in WAYS],
)
def way(request: pytest.FixtureRequest) -> Way:
    found = WAYS[request.param]
    skip_without(found.needs)
    return found


@pytest.fixture(scope="module")
def undisturbed(way: Way, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    with running(job(folder, way.script, way.kind), **ENVIRONMENT) as run:
        assert run.finish() == 0, run.console()
    return (folder / "done-0").read_text()


def ends_as(folder: Path, way: Way, undisturbed: str) -> bool:
    """Check that training went on after the newest checkpoint, once, and what it ended with.

    Returns:
        Whether steps were repeated.
    """
    told = [json.loads(line)["step"] for line in lines_of(folder / "steps-0")]
    if way.script == "lightning_trainer.py":  # it tells of every batch, and two make a step
        steps = [after for before, after in pairwise(told) if after != before]
        first = 0  # the first batch after a checkpoint completes no step
    else:
        steps, first = told, 1
    breaks = [at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]]
    assert len(breaks) <= 1, steps
    for at in breaks:
        complete = {each // way.interval * way.interval for each in (steps[at - 1], steps[at - 1] - 1)}
        assert steps[at] - first in complete, steps  # the save after the last step may have been cut
    assert sorted({*steps}) == list(range(1, way.last + 1)), steps
    found = json.loads((folder / "done-0").read_text())
    assert found["step"] == json.loads(undisturbed)["step"]
    assert (folder / "done-1").read_text() == (folder / "done-0").read_text()
    if way.equal:
        assert found == json.loads(undisturbed)
    return bool(breaks)


@pytest.mark.long
def test_a_killed_job(tmp_path: Path, way: Way, undisturbed: str) -> None:
    with running(job(tmp_path / "job", way.script, way.kind, fatal=way.fatal), **ENVIRONMENT) as run:
        assert run.finish() == 0, run.console()
    assert len(run.records("fault_seen")) == 1
    ends_as(tmp_path / "job", way, undisturbed)
    resumed = [one["resumed"] for one in run.records("progress") if one["resumed"] >= 0]
    assert resumed or not way.agrees
    if resumed:
        assert (resumed[0], resumed[-1] % way.interval) == (0, 0)
        command = [sys.executable, "-m", "outlast", "report", str(run.folder), "--json"]
        report = subprocess.run(command, capture_output=True, timeout=DEADLINE, check=True).stdout
        (incident,) = json.loads(report)["incidents"]
        assert incident["steps_lost"] == incident["step"] - resumed[-1] <= way.interval


def test_a_job_with_a_stopped_rank(tmp_path: Path, way: Way, undisturbed: str) -> None:
    options = ("--ft-rank-heartbeat-timeout", str(way.silent))
    run = job(tmp_path / "job", way.script, way.kind, pace=0.5, options=options)
    with running(run, **ENVIRONMENT):
        run.until(reached(tmp_path / "job" / "steps-0", way.disturbed))
        os.kill(run.pids()[1], signal.SIGSTOP)
        assert run.finish() == 0, run.console()
    assert [one["fault"] for one in run.records("fault_seen")] == ["hang"]
    ends_as(tmp_path / "job", way, undisturbed)


@pytest.mark.long
def test_a_preempted_job(tmp_path: Path, way: Way, undisturbed: str) -> None:
    """The launcher is told to end; the same command goes on."""
    run = job(tmp_path / "job", way.script, way.kind, pace=0.5)
    with running(run, **ENVIRONMENT):
        run.until(reached(tmp_path / "job" / "steps-0", way.disturbed))
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.console()
    stopped = {lines_of(tmp_path / "job" / f"steps-{rank}")[-1] for rank in (0, 1)}
    with running(run, **ENVIRONMENT):
        assert run.finish() == 0, run.console()
    repeated = ends_as(tmp_path / "job", way, undisturbed)
    if way.agrees:
        assert (len(stopped), repeated) == (1, False)
