"""A device dies, by simulated telemetry: the job is saved before, and the node is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents
from tests.support.launching import SCRIPTS, Run, running
from tests.support.ranks import lines

HEALTH = """\
[health]
telemetry = "simulate:{scenario}"
telemetry_interval = 0.5
mode = "{mode}"
"""
ACT = "save_cost = 0.01\n"


def settings(folder: Path, scenario: str, mode: str = "act") -> Path:
    path = folder / f"{mode}.toml"
    path.write_text(HEALTH.format(scenario=scenario, mode=mode) + (ACT if mode == "act" else ""))
    return path


def run(folder: Path, config: Path) -> list[dict[str, Any]]:
    """Train 2 ranks on one node without planned saves; return the records of the event log."""
    (folder / "trace").mkdir()
    command = [
        *(sys.executable, "-m", "outlast", "run", "--standalone", "--nproc-per-node", "2"),
        *("--run-dir", str(folder / "run"), "--config", str(config)),
        *(str(SCRIPTS / "agreeing.py"), str(folder / "trace"), "400", "100000"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return lines(folder / "run" / "events.jsonl")


def notes(records: list[dict[str, Any]], *words: str) -> list[str]:
    reasons = [one["reason"] for one in records if one["kind"] == "note"]
    return [one for one in reasons if all(word in one for word in words)]


@pytest.mark.timeout(420)
def test_an_xid_saves_the_job_between_two_planned_saves(tmp_path: Path) -> None:
    records = run(tmp_path, settings(tmp_path, "xid,device=1,after=1"))
    assert notes(records, "GPU-simulated-1", "79")
    assert notes(records, "100.00%", "0.01 s"), "the risk, and what a save costs"
    steps = [one["step"] for one in records if one["kind"] == "saved"]
    assert steps[0] < 400
    assert steps[-1] == 400


@pytest.mark.timeout(420)
def test_observing_saves_nothing(tmp_path: Path) -> None:
    records = run(tmp_path, settings(tmp_path, "xid,device=1,after=1", "observe"))
    assert notes(records, "100.00%")
    assert [one["step"] for one in records if one["kind"] == "saved"] == [400]


def test_a_framework_that_saves_by_its_own_means_is_asked_again_when_there_is_more_to_lose(
    tmp_path: Path,
) -> None:
    options = ("--nproc-per-node", "1", "--config", str(settings(tmp_path, "xid,device=0,after=1")))
    with running(Run(tmp_path / "run", "announced_job.py", str(tmp_path), "100000", options=options)) as job:
        job.until(lambda: len(job.records("script_saved")) > 1, "a second save")
        assert job.process is not None
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 143, job.console()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Agents:
            found = Agents(tmp_path / "job", *args, **options)
            stack.callback(found.stop)
            return found

        yield make


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_failing_node_is_replaced_by_a_healthy_spare_after_the_save(
    tmp_path: Path, job: Callable[..., Agents]
) -> None:
    kernel_log = tmp_path / "kernel.log"
    kernel_log.touch()
    dying = settings(tmp_path, "xid,device=0,after=1").rename(tmp_path / "dying.toml")
    config = settings(tmp_path, "healthy")
    config.write_text(f'{config.read_text()}kernel_log = "{kernel_log}"\n')
    found = job("2:2", spares=2, script=("agreeing.py", "100000", "100000"))
    found.start("n1")
    found.start("n2", options=("--config", os.fspath(config)))
    found.until_runs(2)
    found.start("n3", options=("--config", os.fspath(dying)))
    at_risk = lambda one: "n3" in one["reason"] and "XID 79" in one["reason"]  # noqa: E731
    heard = lambda: [one for name in ("n1", "n2") for one in found.records(name, "note") if at_risk(one)]  # noqa: E731
    found.until(heard, "a spare that is at risk")
    found.start("n4")
    found.until_said("n4", "spare")
    kernel_log.write_text("NVRM: Xid (PCI:0000:10:00): 79, pid=7, name=python, GPU has fallen off the bus.\n")
    assert found.until_runs(2, after=1) == 2
    resumed = found.until(lambda: found.records("n1", "loaded"), "a checkpoint that is loaded")
    assert resumed[-1]["step"] > 0
    actions = [one for name in ("n1", "n2") for one in found.records(name, "action_taken")]
    assert [one["action"] for one in actions] == ["replace-node"]
    started = {name: len(found.records(name, "generation_started")) for name in ("n1", "n2", "n3", "n4")}
    assert (started["n3"], started["n4"]) == (0, 1), "a spare that is at risk is passed over"

    def in_the_ledger() -> list[str]:
        entries = [one for path in (found.run / "ledger").glob("*.jsonl") for one in lines(path)]
        return [one["kind"] for one in entries if one["what"] == "fault" and one["node"] == "n2"]

    assert found.until(in_the_ledger, "an entry in the node ledger") == ["failing"]


@pytest.mark.long
def test_a_failing_node_is_replaced_after_a_save_that_a_framework_makes_by_its_own_means(
    tmp_path: Path, job: Callable[..., Agents]
) -> None:
    kernel_log = tmp_path / "kernel.log"
    kernel_log.touch()
    config = settings(tmp_path, "healthy")
    config.write_text(f'{config.read_text()}kernel_log = "{kernel_log}"\n')
    found = job("2:2", spares=1, script=("announced_job.py", "100000"))
    found.start("n1")
    found.start("n2", options=("--config", os.fspath(config)))
    found.until_runs(2)
    found.start("n3")
    found.until_said("n3", "spare")
    kernel_log.write_text("NVRM: Xid (PCI:0000:10:00): 79, pid=7, name=python, GPU has fallen off the bus.\n")
    assert found.until_runs(2, after=1) == 2, "long before the leader gives up to wait for a save"
    actions = [one["action"] for name in ("n1", "n2") for one in found.records(name, "action_taken")]
    assert actions == ["replace-node"]
    saved = [one["step"] for name in ("n1", "n2") for one in found.records(name, "script_saved")]
    assert saved[-1] == int((found.trace / "began.g2").read_text())
