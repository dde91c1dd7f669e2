"""Which handlers of Lightning stay: those of the signals that nothing of ours heeds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outlast import settings
from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.settings import WorkerContext
from tests.support.frameworks import needs
from tests.support.launching import SCRIPTS

pytestmark = needs("lightning")


@pytest.mark.parametrize(
    ("preemption", "stay"),
    [
        ({"enable_exit_handler": False}, ["SIGTERM", "SIGUSR1"]),
        ({"exit_signals": ["SIGTERM"]}, ["SIGUSR1"]),
        ({}, []),
    ],
)
def test_lightnings_handlers_of_other_signals_stay(
    tmp_path: Path, preemption: dict[str, Any], stay: list[str]
) -> None:
    page = HeartbeatReader(tmp_path / "page", rank=0, generation=1, spawned=time.monotonic())
    context = WorkerContext(
        generation=1,
        heartbeat_path=str(page.path),
        control_path=str(tmp_path / "control"),
        preemption=preemption,
    )
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    slurm |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "lightning_signals.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **settings.worker_variables(context), **slurm, "OMP_NUM_THREADS": "1"},
    )
    page.close()
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^handles (\w+)$", done.stderr, re.MULTILINE) == stay, done.stderr
