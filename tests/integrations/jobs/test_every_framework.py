"""A rank is stopped (SIGSTOP), or a job preempted, with each framework: it ends bit for bit as without."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outlast.errors import ExitCode
from tests.support.frameworks import ENVIRONMENT, job, skip_without
from tests.support.launching import Run, running, until

pytestmark = pytest.mark.timeout(600)  # some frameworks import for long
SCRIPTS = {
    "transformers": ("hf_trainer.py", "outlast", "done"),
    "lightning": ("lightning_trainer.py", "stored", "done"),
    "accelerate": ("accelerate_resumed.py", "plain", "done"),
    "deepspeed": ("deepspeed_resumed.py", "zero2", "done"),
    "torchtitan": ("torchtitan_trainer.py", "none", "weights"),
    "megatron": ("megatron_core.py", "none", "weights"),
    "torch": ("dcp_training.py", "none", "weights"),
}
PREEMPTED_ELSEWHERE = {"transformers", "accelerate", "deepspeed", "torchtitan"}  # in test_<framework>*.py


@pytest.fixture(scope="module", params=SCRIPTS)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    skip_without(name)
    return name


@pytest.fixture(scope="module")
def undisturbed(framework: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    script, way, _ = SCRIPTS[framework]
    with running(job(folder, script, way), **ENVIRONMENT) as run:
        assert run.finish() == 0, run.console()
    return results(folder, framework)


def results(folder: Path, framework: str) -> list[str]:
    return [(folder / f"{SCRIPTS[framework][2]}-{rank}").read_text() for rank in (0, 1)]


def saved(run: Run) -> int:
    """Return the pid of rank 1 once there is a checkpoint."""
    until(lambda: run.records("saved") or run.records("script_saved"), run.console)
    return run.pids()[1]


def test_a_job_with_a_stopped_rank_ends_as_without(
    tmp_path: Path, framework: str, undisturbed: list[str]
) -> None:
    script, way, _ = SCRIPTS[framework]
    options = ("--ft-rank-heartbeat-timeout", "10")
    with running(job(tmp_path / "job", script, way, pace=0.5, options=options), **ENVIRONMENT) as run:
        os.kill(saved(run), signal.SIGSTOP)
        assert run.finish() == 0, run.console()
    assert "hang" in [one["fault"] for one in run.records("fault_seen")]
    assert results(tmp_path / "job", framework) == undisturbed


def test_a_preempted_job_ends_as_without(tmp_path: Path, framework: str, undisturbed: list[str]) -> None:
    if framework in PREEMPTED_ELSEWHERE:
        pytest.skip(f"{framework}: its own tests have it")
    script, way, _ = SCRIPTS[framework]
    run = job(tmp_path / "job", script, way, pace=0.5)
    with running(run, **ENVIRONMENT):
        os.kill(saved(run), signal.SIGTERM)
        assert run.finish() == int(ExitCode.PREEMPTED), run.console()
    with running(run, **ENVIRONMENT):
        assert run.finish() == 0, run.console()
    assert results(tmp_path / "job", framework) == undisturbed
