"""A scheduler of another package gives a real job its nodes, and gets it back into its queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.launching import DEADLINE
from tests.support.plugging import documented, install
from tests.support.ports import free_port

SCRIPT = "import os, sys; print(os.environ['RANK'], os.environ['OUTLAST_NODE']); sys.exit({code})"


def allocation(folder: Path, code: int) -> list[subprocess.Popen[str]]:
    """Start the same command on two nodes of a farm."""
    first, ends = f"127.0.0.1:{free_port()}", str(time.time() + 3600)
    farm = {"FARM_JOB": "j1", "FARM_NODES": "2", "FARM_FIRST": first, "FARM_ENDS": ends}
    command = [
        sys.executable,
        "-m",
        "outlast",
        "run",
        "--scheduler=farm",
        "--run-dir=run",
        "--max-restarts=0",
    ]
    command += ["--no-python", sys.executable, "-c", SCRIPT.format(code=code)]
    sites = filter(None, (folder / "site", os.environ.get("PYTHONPATH")))
    here = {**os.environ, **farm, "PYTHONPATH": os.pathsep.join(map(str, sites))}
    how = {"cwd": folder, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, env={**here, "FARM_RANK": rank}, **how) for rank in ("0", "1")]


def ended(nodes: list[subprocess.Popen[str]]) -> tuple[int, str]:
    """Return how node 0 ended and what it said."""
    said = [node.communicate(timeout=DEADLINE)[1] for node in nodes]
    return nodes[0].returncode, said[0]


def test_nodes_come_from_a_registered_scheduler_and_it_gets_the_job_back(tmp_path: Path) -> None:
    install(tmp_path / "site", "outlast.schedulers", "farm", documented("add-a-scheduler.md", "Farm"), "Farm")
    code, said = ended(allocation(tmp_path, code=1))
    assert code == 0, said  # what requeue() returned
    asked = tmp_path / "requeue-j1"
    assert "exit code 1" in asked.read_text(), said
    asked.unlink()
    code, said = ended(allocation(tmp_path, code=0))
    assert code == 0, said
    assert not asked.exists()
    assert json.loads((tmp_path / "run" / "farm.json").read_text())["requeues"] == 1
    nodes = {path.name for path in (tmp_path / "run" / "nodes").iterdir()}
    assert nodes == {"farm0", "farm1"}


def test_a_process_outside_of_the_scheduler_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast", "run", "--scheduler=slurm", "train.py"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=outside, check=False)
    assert (done.returncode, "--scheduler=slurm" in done.stderr) == (2, True)
