"""KempnerForge's ``kempnerforge.resilience`` under one import, with its signatures and types."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outlast import compat
from outlast.compat import kempnerforge
from outlast.errors import UsageError


def test_the_names_are_the_same_objects_as_in_compat() -> None:
    for name in set(kempnerforge.__all__) & set(compat.__all__):
        assert getattr(kempnerforge, name) is getattr(compat, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this node has a GPU")
def test_a_node_without_a_gpu_is_logged_as_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        health = kempnerforge.log_health_status(1)
    assert health["error"]
    assert "cuda=False, device=False, compute=False, memory=False" in caplog.text


def test_a_handler_can_be_registered_before_torch_is_imported() -> None:
    program = (
        "import sys\n"
        "from outlast.compat.kempnerforge import ShutdownHandler\n"
        "ShutdownHandler(timeout_sec=5).register()\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr


VARIABLES = {"SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "gpt", "SLURM_JOB_NODELIST": "node[1-2]"}
VARIABLES |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_PARTITION": "gpu"}
AGAIN = {"SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "05"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "9"}, compat.SLURMInfo("9", "", "", 1, 1, 0, "", None)),
        (VARIABLES, compat.SLURMInfo("123", "gpt", "node[1-2]", 2, 4, 0, "gpu", None)),
        (VARIABLES | AGAIN, compat.SLURMInfo("123", "gpt", "node[1-2]", 2, 4, 2, "gpu", "05")),
    ],
    ids=["outside", "only an id", "first", "requeued"],
)
def test_a_job_of_slurm_is_described(
    variables: dict[str, str],
    expected: compat.SLURMInfo | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert kempnerforge.get_slurm_info() == expected
    assert compat.is_slurm_job() == bool(variables)
    assert compat.is_slurm_requeue() == ("SLURM_RESTART_COUNT" in variables)
    with caplog.at_level(logging.INFO):
        compat.log_job_info()
    if expected is not None:
        assert f"id={expected.job_id}, name={expected.job_name}, nodes={expected.num_nodes}" in caplog.text


def test_a_wrong_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "many")
    with pytest.raises(UsageError, match="SLURM_RESTART_COUNT='many'"):
        compat.get_slurm_info()


def test_resume_paths_of_kempnerforge(tmp_path: Path) -> None:
    assert compat.resolve_resume_path(str(tmp_path / "absent")) is None
    for step in (9, 10, 100):
        (tmp_path / f"step_{step}").mkdir()
    (tmp_path / "step_x").mkdir()
    assert compat.resolve_resume_path(str(tmp_path)) is None, "none of them was finished"
    for step in (9, 10):
        (tmp_path / f"step_{step}" / ".metadata").touch()
    assert compat.resolve_resume_path(str(tmp_path)) == tmp_path / "step_10"
    (tmp_path / "latest").symlink_to("step_9")
    assert compat.resolve_resume_path(str(tmp_path)) == tmp_path / "step_9"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_100")
    assert compat.resolve_resume_path(str(tmp_path)) == tmp_path / "step_10"
    (tmp_path / "checkpoints" / "step-000000120.g1").mkdir(parents=True)  # of ours, without a COMMIT
    assert compat.resolve_resume_path(str(tmp_path / "checkpoints")) is None
