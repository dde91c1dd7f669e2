"""torchtitan's own checkpoints, after a stop and a preemption; and what its trainer refuses."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from tests.support.frameworks import alone, job, reached
from tests.support.launching import running

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


@pytest.mark.long
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "preempted"])
def test_torchtitans_own_checkpoints_are_gone_on_from(
    tmp_path: Path, undisturbed: list[str], stopped: bool
) -> None:
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "plain", pace=0.5, options=("--ft-rank-heartbeat-timeout", "30"))
    with running(run):
        run.until(reached(folder / "steps-0", 7))
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
