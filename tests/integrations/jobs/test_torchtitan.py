"""torchtitan's own train.py, killed in a save; it goes on from its newest whole checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from outlast.errors import ExitCode
from tests.support.frameworks import alone, job, lines_of, reached
from tests.support.launching import running, until

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="torchtitan: not installed; docs/how-to/torchtitan.md says how to install it",
    ),
    pytest.mark.timeout(600),  # torchtitan imports for long
]
SCRIPT = "torchtitan_trainer.py"


def found(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}-{rank}").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what torchtitan ends with, with its own checkpoint manager."""
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    with running(job(folder, SCRIPT, "plain")) as run:
        assert run.finish() == 0, run.console()
    return found(folder, "weights")


@pytest.mark.parametrize(
    ("ways", "resumed"), [("none", "6"), ("async", "6"), ("damaged", "3"), ("plain", "6")]
)
def test_a_killed_job_ends_bit_for_bit_as_if_it_had_not_been(
    tmp_path: Path, undisturbed: list[str], ways: str, resumed: str
) -> None:
    folder = tmp_path / "job"
    with running(job(folder, SCRIPT, ways, fatal=9)) as run:
        assert run.finish() == 0, run.console()
    assert len(run.records("fault_seen")) == 1
    assert found(folder, "resumed") == [resumed] * 2
    assert found(folder, "weights") == undisturbed
    saved = {one["step"] for one in run.records("script_saved")}
    assert saved == set() if ways == "plain" else saved >= {9, 12}


def test_a_preempted_job_goes_on_with_the_same_command(tmp_path: Path, undisturbed: list[str]) -> None:
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "none", pace=0.3)
    with running(run):
        until(reached(folder / "steps-0", 4), run.console)
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == int(ExitCode.PREEMPTED), run.console()
    steps = [lines_of(folder / f"steps-{rank}")[-1] for rank in (0, 1)]
    assert steps[0] == steps[1] != "12", "all ranks stop after the same step"
    with running(run):
        assert run.finish() == 0, run.console()
    assert found(folder, "resumed") == steps
    assert found(folder, "weights") == undisturbed


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "preempted"])
def test_torchtitans_own_checkpoints_are_gone_on_from(
    tmp_path: Path, undisturbed: list[str], stopped: bool
) -> None:
    """What was done since the last one is repeated, after the launcher was told to end, too."""
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "plain", pace=0.5, options=("--ft-rank-heartbeat-timeout", "30"))
    with running(run):
        until(reached(folder / "steps-0", 7), run.console)
        assert run.process is not None
        if stopped:
            os.kill(run.pids()[1], signal.SIGSTOP)
        else:
            run.process.send_signal(signal.SIGTERM)
        assert run.finish() == (0 if stopped else 128 + signal.SIGTERM), run.console()
    assert [one["fault"] for one in run.records("fault_seen")] == ["hang"] * stopped
    if not stopped:
        with running(run):
            assert run.finish() == 0, run.console()
    assert found(folder, "resumed") == ["6"] * 2
    assert found(folder, "weights") == undisturbed


def test_what_would_not_be_resumed_is_refused(tmp_path: Path) -> None:
    done = alone(tmp_path / "job", "torchtitan_refused.py", "none")
    assert done.returncode == 0, done.stdout + done.stderr
