"""Each step of bench/gpu.py runs on the CPU, so that mistakes in it are found where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("device", ["cpu"])
def test_every_step_runs_on_the_cpu(tmp_path: Path, device: str) -> None:
    out = tmp_path / "gpu.jsonl"
    command = [sys.executable, str(BENCH / "gpu.py"), "--device", device, "--out", str(out)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert told.returncode == 0, told.stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    steps = list(dict.fromkeys(line["step"] for line in lines))
    assert steps == ["machine", "copies", "digests", "guard", "abort", "end", "pair", "check"]
    assert [line["lived"] for line in lines if line["step"] == "pair"] == [True, True]
