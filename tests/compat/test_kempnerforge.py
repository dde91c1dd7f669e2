"""KempnerForge's ``kempnerforge.resilience`` under one import, with its signatures and types."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys

import pytest
import torch

from outlast import compat
from outlast.compat import kempnerforge

SIGNATURES = {  # kempnerforge/resilience at 5666d0d
    "NaNDetector": {"action": "warn", "max_consecutive": 5, "max_history": 100},
    "ShutdownHandler": {"timeout_sec": 600.0},
    "check_gpu_health": {"device": 0},
    "check_nccl_health": {"timeout_sec": 10.0},
    "get_slurm_info": {},
    "is_slurm_job": {},
    "is_slurm_requeue": {},
    "log_health_status": {"device": 0},
    "log_job_info": {},
    "resolve_resume_path": {"checkpoint_dir": inspect.Parameter.empty},
}


def test_it_has_every_name_and_no_other() -> None:
    assert set(kempnerforge.__all__) == {*SIGNATURES, "NaNState", "SLURMInfo"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_theirs(name: str) -> None:
    found = inspect.signature(getattr(kempnerforge, name)).parameters.values()
    given = {one.name: one.default for one in found if one.name != "options"}
    assert given == SIGNATURES[name]


def test_the_names_are_the_same_objects_as_in_compat() -> None:
    for name in set(kempnerforge.__all__) & set(compat.__all__):
        assert getattr(kempnerforge, name) is getattr(compat, name)


def test_an_index_of_an_array_is_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "05")
    info = kempnerforge.get_slurm_info()
    assert info is not None
    assert info.array_task_id == "05"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this node has a GPU")
def test_a_node_without_a_gpu_is_logged_as_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        health = kempnerforge.log_health_status(1)
    assert health["error"] == "CUDA is not available"
    assert caplog.messages == [
        "GPU 1 health: UNHEALTHY | cuda=False, device=False, compute=False, memory=False",
        "GPU 1 error: CUDA is not available",
    ]


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
