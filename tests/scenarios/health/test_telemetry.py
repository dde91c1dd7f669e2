"""Telemetry of a run: the agent records it, survives its end in every form, and leaves nothing behind."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Run, is_gone, running, until
from tests.support.nvml_library import StandIn
from tests.support.processes import child_running

# The table of the weighted score that a job keeps.
METRICS = """\
timestamp,gpu_id,gpu_name,driver_version,temperature,power_draw,gpu_utilization,memory_utilization,memory_used,\
memory_total,errors,failure_risk
2026-01-02T03:04:05+00:00,2,GPU-c,,93,,,,,,0,0.0000
"""
QUICK = "telemetry_interval = 0.2\ncall_timeout = 0.5\nrecord_interval = 0.2\n"


SCRIPT = """
import time, outlast
for step in range(1, 100_000):
    outlast.progress(step)
    time.sleep(0.05)
"""


# Opens descriptors that the command inherits, more than select() takes.
CROWDED = """
import os, resource, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, most[0]), most[1]))
for number in range(3, 1100):
    os.dup2(0, number)
os.execv(sys.executable, [sys.executable, "-m", "outlast", *sys.argv[1:]])
"""


def configured(tmp_path: Path, health: str) -> tuple[str, ...]:
    config = tmp_path / "outlast.toml"
    config.write_text(f"[health]\n{health}")
    return ("--config", str(config))


def run(tmp_path: Path, health: str) -> Run:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = (*configured(tmp_path, health), "--nproc-per-node", "2")
    return Run(tmp_path / "run", str(script), options=options)


def idle(tmp_path: Path, health: str) -> Run:
    """Return a job without Python, since only its agent matters."""
    options = (*configured(tmp_path, health), "--no-python")
    return Run(tmp_path / "run", "sleep", "600", options=options)


def records(one: Run, what: str) -> list[dict[str, Any]]:
    return [record for record in one.records("telemetry") if record["what"] == what]


def collector_of(one: Run) -> int:
    """Return the pid of the agent's collector."""
    assert one.process is not None
    return child_running(one.process.pid, "telemetry.collector")


def test_the_event_log_has_devices_host_and_xids(tmp_path: Path) -> None:
    driver = StandIn(tmp_path)
    driver.put(1, temperature=66)
    kernel_log = tmp_path / "kernel.log"
    kernel_log.touch()
    settings = f'telemetry = "nvml"\nkernel_log = "{kernel_log}"\n{QUICK}'
    with running(run(tmp_path, settings), **driver.environment) as one:
        until(lambda: len(records(one, "device")) >= 4, "records of the devices")
        with kernel_log.open("a") as file:
            file.write("NVRM: Xid (PCI:0000:11:00): 79, pid=7, name=python, GPU has fallen off the bus.\n")
        until(lambda: records(one, "xid"), "a record of the XID")
        until(lambda: records(one, "host"), "a record of the host")
        (xid,) = records(one, "xid")
        assert (xid["device"], xid["values"]) == (1, {"xid": 79.0})
        hot = [record for record in records(one, "device") if record["device"] == 1]
        assert hot[0]["uuid"] == "GPU-stand-in-1"
        assert hot[0]["values"]["temperature"] == 66
        pid = until(lambda: collector_of(one), "the collector")
    until(lambda: is_gone(pid), "the end of the collector")


def test_a_hung_driver_does_not_hold_up_the_job(tmp_path: Path) -> None:
    driver = StandIn(tmp_path)
    with running(run(tmp_path, f'telemetry = "auto"\n{QUICK}'), **driver.environment) as one:
        until(lambda: records(one, "device"), "records of the devices")
        driver.put(0, hang=1)
        until(lambda: len(records(one, "silence")) >= 4, "records of the silence")
        driver.put(0, hang=None)
        seen = len(records(one, "device"))
        until(lambda: len(records(one, "device")) > seen, "records of the devices after it")
        assert one.records("fault_seen") == []


def test_a_collector_that_is_killed_is_replaced_and_survives_a_restart_of_the_workers(tmp_path: Path) -> None:
    driver = StandIn(tmp_path)
    settings = f'telemetry = "nvml"\n{QUICK}'.replace("call_timeout = 0.5", "call_timeout = 20.0")
    with running(run(tmp_path, settings), **driver.environment) as one:
        first = until(lambda: collector_of(one), "the collector")
        os.kill(first, signal.SIGKILL)
        second = until(lambda: collector_of(one) not in (0, first) and collector_of(one), "another one")
        until(lambda: len(records(one, "device")) >= 2, "records of the devices")
        os.kill(one.pids(1)[0], signal.SIGKILL)
        one.pids(2)
        assert not is_gone(second)
        seen = len(records(one, "device"))
        until(lambda: len(records(one, "device")) > seen, "records of the devices after the restart")


def test_collectors_that_hang_one_after_the_other_are_one_silence(tmp_path: Path) -> None:
    """Each is killed before its own silence is as long as a node may be silent, 45 s."""
    silences = tmp_path / "silences.jsonl"
    one_line = {"kind": "silence", "node": "n", "seconds": 44.9, "what": "NVML: device 3, power"}
    silences.write_text("".join(json.dumps({**one_line, "time": float(at)}) + "\n" for at in range(60)))
    with running(idle(tmp_path, f'telemetry = "replay:{silences}"\ntelemetry_interval = 0.2\n')) as one:
        one.until(
            lambda: [note for note in one.records("note") if "NVML: device 3" in note["reason"]],
            "a note about the node",
        )


def test_the_weighted_score_takes_a_sample_at_each_interval(tmp_path: Path) -> None:
    source = 'telemetry = "simulate:healthy,devices=1"\n'
    with running(idle(tmp_path, f'{source}telemetry_interval = 0.2\nmodel = "weighted"\n')) as one:

        def times() -> list[float]:
            texts = [path.read_text().rpartition("\n")[0] for path in one.folder.rglob("gpu_metrics.csv")]
            found = [row["timestamp"] for text in texts for row in csv.DictReader(text.splitlines())]
            return [datetime.fromisoformat(text).timestamp() for text in found]

        def near() -> bool:
            found = times()
            return any(later - before < 9.0 for before, later in pairwise(found))

        one.until(near, "samples that are less than 9 s apart; the score was made for 10")


@pytest.mark.parametrize(
    ("source", "named"), [("replay:/nowhere/a.jsonl", "/nowhere/a.jsonl"), ("simulate:fire", "fire")]
)
def test_a_source_that_cannot_be_used_ends_the_command(tmp_path: Path, source: str, named: str) -> None:
    one = run(tmp_path, f'telemetry = "{source}"\n')
    done = subprocess.run(one.command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert named in done.stderr
    assert not one.records("generation_started")


class TestCommand:
    def shown(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "outlast", "health", *words]
        env = {**os.environ, **environment}
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)

    def test_a_table_of_this_node(self, tmp_path: Path) -> None:
        driver = StandIn(tmp_path)
        driver.put(1, temperature=91, recovery_action=1)
        log = tmp_path / "kernel.log"
        log.write_text("NVRM: Xid (PCI:0000:10:00): 48, DBE\n")
        found = self.shown("--kernel-log", str(log), **driver.environment)
        assert (found.returncode, found.stderr) == (0, "")
        assert "91 C" in found.stdout
        assert "reset" in found.stdout
        assert "XID 48" in found.stdout

    @pytest.mark.parametrize("name", ["samples.csv", "samples.jsonl", "gpu_metrics.csv"])
    def test_files_that_outlast_wrote_are_replayed(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        if name == "gpu_metrics.csv":  # the job's table of the weighted score
            path.write_text(METRICS)
        else:
            make = ("thermal-ramp,device=2,devices=3,after=0", "--interval", "9", "--replay-file", str(path))
            subprocess.run(
                [sys.executable, "-m", "outlast", "chaos", "telemetry", *make], timeout=100, check=True
            )
        found = self.shown("--call-timeout", "600", "--telemetry", f"replay:{path}")  # it waits for nothing
        assert found.returncode == 0, found.stderr
        (line,) = (one for one in found.stdout.splitlines() if one.startswith("2 "))
        assert line.split()[2] == "C", found.stdout
        assert (line.split()[1] == "93") == (name == "gpu_metrics.csv"), found.stdout

    def test_more_files_may_be_open_than_select_takes(self) -> None:
        words = ["health", "--telemetry", "simulate:healthy,devices=1"]
        command = [sys.executable, "-c", CROWDED, *words]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (found.returncode, found.stderr) == (0, "")
        assert " C " in found.stdout

    def test_a_driver_that_hangs_is_a_line(self, tmp_path: Path) -> None:
        driver = StandIn(tmp_path)
        driver.put(1, hang=1)
        found = self.shown("--call-timeout", "0.5", **driver.environment)
        assert found.returncode == 0
        assert re.search("NVML.*device 1", found.stdout)

    def test_live_until_it_is_interrupted(self) -> None:
        words = ["--watch", "--interval", "0.2", "--telemetry", "simulate:healthy,devices=1"]
        command = [sys.executable, "-m", "outlast", "health", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        with process.stdout as lines:
            seen = 0
            for line in lines:
                seen += "55 C" in line or "54 C" in line
                if seen == 3:
                    break
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130

    def test_nvml_without_a_driver_is_refused(self) -> None:
        if Path("/dev/nvidiactl").exists():
            pytest.skip("this host has a driver")
        found = self.shown("--telemetry", "nvml", LD_LIBRARY_PATH="")
        assert found.returncode == 69
        assert "libnvidia-ml.so.1" in found.stderr
        found = self.shown(LD_LIBRARY_PATH="")
        assert found.returncode == 0
