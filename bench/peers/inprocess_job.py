"""A job of bench/inprocess.py: its processes, and the traces of its ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "inprocess_training.py"
SOURCE = Path(__file__).resolve().parents[2] / "src"
LOOK = 0.01
STOP_PATIENCE = 30.0
Line = dict[str, Any]


class Lost(Exception):
    """The job did not reach the expected state."""


class Job:
    """Four ranks of one system; ``nvrx`` is the Python that has NVRx installed."""

    def __init__(self, system: str, folder: Path, ranks: int, hang_timeout: float, nvrx: Path) -> None:
        self.system, self.folder, self.ranks = system, folder, ranks
        self.lines: list[Line] = []
        self._read: dict[Path, int] = {}
        words = [str(SCRIPT), system, str(folder), str(hang_timeout)]
        # Without progress in between, and a hundred times a day: what the budgets are there to stop.
        budgets = ["--max-restarts", str(10**6), "--ft-max-restarts-per-day", str(10**6)]
        ours = ["-m", "outlast", "run", "--run-dir", str(folder / "run"), *budgets]
        if system == "outlast":
            command = [sys.executable, *ours, "--nproc-per-node", str(ranks), *words]
            self.processes = [self._start(command, {}, "launcher")]
        else:
            places = self._places()
            self.processes = [
                self._start([str(nvrx), *words], place, f"rank-{rank}") for rank, place in enumerate(places)
            ]

    def _places(self) -> list[dict[str, str]]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        quiet = {"TORCH_CPP_LOG_LEVEL": "error"}
        return [{**shared, **quiet, "RANK": str(rank)} for rank in range(self.ranks)]

    def _start(self, command: list[str], place: dict[str, str], name: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **place}
        with open(self.folder / f"output-{name}", "wb") as output:
            return subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> None:
        """Read the lines that were written since the last call."""
        for path in self.folder.glob("trace-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                self.lines += map(json.loads, whole.splitlines())

    def forget(self) -> None:
        """Drop the lines read so far."""
        self.lines.clear()

    def until(self, found: Callable[[], Any], what: str, patience: float) -> Any:
        """Wait until a condition holds; read the traces before each check."""
        end = time.monotonic() + patience
        while time.monotonic() < end and any(one.poll() is None for one in self.processes):
            self.look()
            answer = found()
            if answer:
                return answer
            time.sleep(LOOK)
        ended = [one.poll() for one in self.processes]
        raise Lost(f"{self.system}: {what} did not come within {patience:.0f} s; exit codes {ended}")

    def output(self) -> str:
        """Return the end of what the processes printed."""
        return "\n".join(path.read_text(errors="replace")[-600:] for path in self.folder.glob("output-*"))

    def stop(self) -> None:
        """End the job and all its processes."""
        if self.system == "outlast":
            self.processes[0].send_signal(signal.SIGTERM)
            try:
                self.processes[0].wait(STOP_PATIENCE)
            except subprocess.TimeoutExpired:
                self.processes[0].kill()
        pids = {int(path.name.partition("-")[2]) for path in self.folder.glob("trace-*")}
        for pid in self._own(pids | {one.pid for one in self.processes}):
            os.kill(pid, signal.SIGKILL)
        for one in self.processes:
            one.wait()

    def _own(self, pids: set[int]) -> list[int]:
        """The processes among these, and monitors forked from them, that run this job's script."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (int(entry.name) in pids or self.system != "outlast"):
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if str(self.folder).encode() in words:
                    found.append(int(entry.name))
        return found
