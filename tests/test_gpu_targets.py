"""On a machine without a GPU the commands for one say so and succeed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("command", [["-m", "tests.gpu"], ["bench/gpu.py", "--out", "gpu.jsonl"]])
def test_without_a_gpu_there_is_one_line(command: list[str]) -> None:
    told = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    (line,) = told.stdout.splitlines()
    assert line.startswith("no GPU: torch ")
    assert not (ROOT / "gpu.jsonl").exists()
