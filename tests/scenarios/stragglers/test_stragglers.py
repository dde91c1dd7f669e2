"""A rank that becomes slow in the middle of a real job is named, with what it is slow at."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS
from tests.support.ports import free_port

SLOW = 2
PATIENCE = 200.0  # seconds; less than the limit of a test, so that what a job printed is shown
LEAVING = 60.0
NODE_UNFIT = 69


def command(
    folder: Path, *words: str, config: str = "", nodes: Sequence[str] = ("--nproc-per-node=4",)
) -> list[str]:
    """Return the command that runs four ranks, or those of a node."""
    options = [*nodes, "--run-dir", str(folder / "run")]
    if config:
        (folder / "outlast.toml").write_text(config)
        options += ["--config", str(folder / "outlast.toml")]
    return [sys.executable, "-m", "outlast", "run", *options, str(SCRIPTS / "slowing.py"), *words]


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return what the event logs of all nodes hold."""
    found = []
    for log in (folder / "run").rglob("events.jsonl"):
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [one for one in found if one["kind"] in kinds]


def named(folder: Path) -> list[dict[str, Any]]:
    return [one for one in records(folder, "straggler_seen") if one["state"] == "on"]


def ran(folder: Path, *words: str, expected: int, config: str) -> None:
    """Run four ranks to their end."""
    line = command(folder, *words, config=config)
    done = subprocess.run(line, timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stdout + done.stderr


def first_named(folder: Path, *commands: list[str]) -> dict[str, Any]:
    """Run these agents until a rank is named, and return the record of the first one."""
    with (folder / "output").open("w") as output, contextlib.ExitStack() as jobs:
        running = [subprocess.Popen(one, stdout=output, stderr=output) for one in commands]
        for job in running:
            jobs.callback(job.wait, LEAVING)
            jobs.callback(job.send_signal, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while not (found := named(folder)) and time.monotonic() < deadline:
            if all(job.poll() is not None for job in running):
                break
            time.sleep(0.2)
    assert found, (folder / "output").read_text()
    assert found[0]["step"] > 50
    return found[0]


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("session", "compute"),
        *(
            pytest.param(how, part, marks=pytest.mark.long)
            for how in ("session", "plain")
            for part in ("compute", "communication", "data")
            if (how, part) != ("session", "compute")
        ),
    ],
)
def test_a_rank_that_becomes_slow_is_named(tmp_path: Path, how: str, part: str) -> None:
    found = first_named(tmp_path, command(tmp_path, how, str(SLOW), "50", "1000000", part))
    assert (found["rank"], found["activity"]) == (SLOW, part), found
    told = subprocess.run(
        [sys.executable, "-m", "outlast", "stragglers", str(tmp_path / "run"), "--json"],
        timeout=LEAVING,
        capture_output=True,
        text=True,
        check=True,
    )
    (slow, *_) = json.loads(told.stdout)["stragglers"]
    assert (slow["rank"], slow["activity"]) == (SLOW, part)


@pytest.mark.long
@pytest.mark.parametrize("part", ["compute", "communication"])
def test_a_rank_of_the_second_node_that_becomes_slow_is_named_with_its_node(
    tmp_path: Path, part: str
) -> None:
    where = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ("--nnodes=2", "--nproc-per-node=2", where, "--rdzv-id=slow")
    agents = [
        command(tmp_path, "plain", str(SLOW), "50", "1000000", part, nodes=(*options, f"--node-name=n{node}"))
        for node in range(2)
    ]
    found = first_named(tmp_path, *agents)
    assert (found["rank"], found["node"], found["activity"]) == (SLOW, "n1", part), found


@pytest.mark.long
def test_a_job_that_is_to_stop_for_a_slow_rank_stops_after_a_save(tmp_path: Path) -> None:
    config = '[stragglers]\naction = "stop"\n[checkpoints]\nsave_interval = 20\n'
    ran(tmp_path, "session", str(SLOW), "50", "2000", "compute", expected=NODE_UNFIT, config=config)
    assert any(one["rank"] == SLOW for one in named(tmp_path))


@pytest.mark.long
def test_nothing_is_timed_where_that_is_off(tmp_path: Path) -> None:
    ran(tmp_path, "plain", "-1", "0", "40", "none", expected=0, config="[stragglers]\nenabled = false\n")
    assert records(tmp_path, "generation_started")
    assert not records(tmp_path, "straggler_seen", "step_times")
