"""What the commands make of event logs that this test has written: times, steps, several nodes, trackers."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.dashboards import EVENTFUL

WITHIN = 100.0


def outlast(*words: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outlast", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=WITHIN, check=False, env=dict(os.environ)
    )


def answer(*words: str | Path, folder: Path | None = None) -> Any:
    """Return the JSON that a command prints."""
    done = outlast(*words, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Log:
    """The event log of a node, whose clock is 0 at its start."""

    def __init__(self, run_dir: Path, node: str = "") -> None:
        folder = run_dir / "nodes" / node if node else run_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "events.jsonl"
        self._node = node or "n0"

    def add(self, at: float, kind: str, generation: int, **values: Any) -> Log:
        head = {"v": 1, "kind": kind, "time": 1.7e9 + at, "clock": at, "generation": generation}
        with self._path.open("a") as file:
            file.write(json.dumps({**head, "reason": "a test", **values}) + "\n")
        return self

    def run(self, at: float) -> Log:
        about = {"run_id": "run", "node": self._node, "pid": 7, "boot_id": "boot", "command": ["train.py"]}
        return self.add(at, "run_started", 0, **about, world_size=2)

    def starts(self, at: float, generation: int) -> Log:
        self.add(at, "generation_started", generation, world_size=2, pids=[70, 71], start="zygote")
        return self.add(at + 1.0, "first_step", generation, step=1, marks={}, source="session")

    def fails(self, at: float, generation: int, node: str = "n0", **values: Any) -> Log:
        fault = {"fault": "crash", "node": node, "rank": 1, "step": 6, "since": 0.0, "signature": "signal 9"}
        self.add(at, "fault_seen", generation, **{**fault, "evidence": {}, "source": "session", **values})
        action = {"action": "restart-in-job", "next_generation": generation + 1, "state": "newest"}
        return self.add(at, "action_taken", generation, **action, wait=0.0)

    def slow(self, at: float, generation: int) -> Log:
        rank = {"step": 3, "rank": 1, "node": "n1", "state": "on", "activity": "data", "section": "forward"}
        figures = {"slowdown": 1.5, "job_slowdown": 1.2, "share_of_steps": 1.0, "confidence": 0.9}
        return self.add(at, "straggler_seen", generation, **rank, **figures, windows=4)


def test_a_rank_is_slow_in_a_trace_until_its_launcher_wrote_last(tmp_path: Path) -> None:
    log = Log(tmp_path).run(0.0).starts(1.0, 1).slow(3.0, 1).add(12.0, "progress", 1, step=7)
    log.run(20.0).starts(21.0, 2).slow(24.0, 2).add(26.0, "run_ended", 2, step=9, exit_code=0)
    done = outlast("report", tmp_path, "--trace", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slow = [one for one in events if one.get("args", {}).get("section") == "forward"]
    assert [(one["ts"] / 1e6, one["dur"] / 1e6) for one in slow] == [(3.0, 9.0), (24.0, 2.0)]


def test_a_launch_has_no_step_of_the_one_before_it(tmp_path: Path) -> None:
    log = Log(tmp_path).run(0.0).starts(1.0, 1).add(12.0, "progress", 1, step=50)
    assert answer("top", tmp_path)["step"] == 50
    log.run(20.0)
    now = answer("top", tmp_path)
    assert (now["step"], now["state"], now["launches"]) == (-1, "starting", 2)


def test_a_step_that_one_process_has_counted_is_told_as_that(tmp_path: Path) -> None:
    log = Log(tmp_path / "runs").run(0.0).starts(1.0, 1).fails(5.0, 1, source="counted")
    log.starts(6.0, 2).add(9.0, "progress", 2, step=40, source="counted")
    assert answer("top", tmp_path / "runs")["incident"]["source"] == "counted"
    (listed,) = answer("report", folder=tmp_path / "runs")
    assert (listed["step"], listed["source"]) == (40, "counted")


def test_a_leader_whose_clock_is_late_answers_no_fault_before_its_generation_began(tmp_path: Path) -> None:
    Log(tmp_path, "a").run(0.0).starts(1.0, 1).fails(90.0, 1, "b")
    late = Log(tmp_path, "b").run(0.0).starts(1.0, 1).starts(61.0, 2).fails(70.0, 2, "b", since=69.0)
    late.starts(71.0, 3).add(80.0, "run_ended", 3, step=9, exit_code=0)
    found = answer("report", tmp_path)
    assert [one["generation"] for one in found["incidents"]] == [1, 2]


class Refusing(http.server.BaseHTTPRequestHandler):
    """A collector that takes nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture
def refusing() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_values_that_a_collector_does_not_take_are_an_error(tmp_path: Path, refusing: int) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    shutil.copy(EVENTFUL, tmp_path / "events.jsonl")
    done = outlast("metrics", tmp_path, "--to", f"otlp:http://127.0.0.1:{refusing}/v1/metrics")
    assert done.returncode == 2, done.stderr
    assert str(refusing) in done.stderr
