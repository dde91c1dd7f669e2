"""The how-to for users of the weighted score: its configurations are valid, its commands do what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import settings
from tests.source_tree import ROOT

PAGE = (ROOT / "docs/how-to/act-on-failing-gpus.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ outlast (.*)$", PAGE, re.MULTILINE)
SIMULATED = re.findall(r'telemetry = "(simulate:[^"]+)"', PAGE)
TRAIN = """
import time
import outlast

for step in range(1, 60):
    outlast.progress(step)
    time.sleep(0.05)
"""


def outlast(command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *shlex.split(command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("table", TABLES)
def test_its_configurations_are_valid(tmp_path: Path, table: str) -> None:
    (tmp_path / "config.toml").write_text(table)
    assert settings.load_config(tmp_path / "config.toml", {}).health.mode == "act"


def test_its_commands_do_what_it_says(tmp_path: Path) -> None:
    run, make, show = COMMANDS
    outlast(make, tmp_path)
    assert "power cap" in outlast(show, tmp_path)
    (source,) = SIMULATED  # in the place of devices; and fewer ranks, read more often
    quick = TABLES[0].replace('"auto"', f'"{source}"').replace("_interval = 10.0", "_interval = 0.2")
    (tmp_path / "weighted.toml").write_text(quick)
    (tmp_path / "train.py").write_text(TRAIN)
    outlast(run.replace("--nproc-per-node 8", "--nproc-per-node 2 --run-dir r"), tmp_path)
    metrics = tmp_path / "r" / "gpu_logs" / "gpu_metrics.csv"
    devices = {line.split(",")[1] for line in metrics.read_text().splitlines()[1:]}
    assert devices == {str(number) for number in range(8)}
    assert len(outlast(f"health --telemetry replay:{metrics}", tmp_path).splitlines()) >= 3
