"""outlast, torchrun and NVRx's ft_launcher with one interface, for bench/recovery.py.

Each reports the stages of a restart with their times. All times are
CLOCK_MONOTONIC, which the processes of a host share.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
PEER = Path(__file__).resolve().parent / "ddp_torchrun.py"
MANY = 10**6
STOP_PATIENCE = 40.0


@dataclass(frozen=True)
class Line:
    """A completed step in a rank's trace."""

    step: int
    clock: float
    pid: int


class Traces:
    """The steps that every rank has completed, read as they are written."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._paths = [folder / f"rank-{rank:05d}.jsonl" for rank in range(ranks)]
        self._read = [0] * ranks
        self.lines: list[list[Line]] = [[] for _ in range(ranks)]

    def update(self) -> None:
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read[rank] += len(whole) + 1
                values = map(json.loads, whole.splitlines())
                self.lines[rank] += [Line(value["step"], value["clock"], value["pid"]) for value in values]

    def since(self, moment: float, old: set[int], step: int = 0) -> list[Line] | None:
        """Return each rank's first step after a time that a new process made; None: one is missing.

        Args:
            step: only steps from this one on count.
        """
        found: list[Line] = []
        for lines in self.lines:
            later = lines[bisect_right(lines, moment, key=lambda line: line.clock) :]
            found += [line for line in later if line.pid not in old and line.step >= step][:1]
        return found if len(found) == len(self.lines) else None


class System:
    """A running job under one launcher.

    Args:
        name: as it is printed.
        command: the launcher and the script.
        work: an empty folder of its own.
        environment: variables on top of this process's.
        ranks: world size.
    """

    def __init__(
        self, name: str, command: Sequence[str], work: Path, environment: dict[str, str], ranks: int
    ) -> None:
        self.name = name
        self.traces = Traces(work / "trace", ranks)
        self.work = work
        self._said: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            command,
            cwd=work,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with (self.work / "output.txt").open("w") as copy:
            for line in self._process.stdout:
                self._said.append((time.monotonic(), line))
                copy.write(line)

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the job and all its processes."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.traces.update()
        for pid in {lines[-1].pid for lines in self.traces.lines if lines}:
            if b"train_gpt" in _command(pid) or b"ddp_torchrun" in _command(pid):
                os.kill(pid, signal.SIGKILL)

    def marks(self, killed: float, new: set[int]) -> dict[str, float]:
        """Return the times of the stages of a restart (detect, spawn, import, group, load) on the last rank.

        Args:
            killed: the moment of the kill.
            new: pids of the new workers.
        """
        detected = [at for at, line in self._said if at >= killed and DETECTED.search(line)]
        marks = {"detected": min(detected)} if detected else {}
        for text in (self.work / "marks.jsonl").read_text().splitlines():
            value: dict[str, Any] = json.loads(text)
            if value["pid"] in new:
                for name, at in value["marks"].items():
                    marks[name] = max(marks.get(name, 0.0), at)
        return marks


DETECTED = re.compile(r"failed \(exitcode|closing signal|Worker group UNHEALTHY")


class Outlast(System):
    """The job under ``outlast run``; its event log has the marks."""

    def marks(self, killed: float, new: set[int]) -> dict[str, float]:  # noqa: ARG002 - the log knows them
        marks: dict[str, float] = {}
        for text in (self.work / "run" / "events.jsonl").read_text().splitlines():
            value: dict[str, Any] = json.loads(text)
            if value["clock"] < killed:
                continue
            if value["kind"] == "fault_seen":
                marks.setdefault("detected", value["clock"])
            elif value["kind"] == "first_step" and "imported" not in marks:
                marks["started"], marks["imported"] = value["marks"]["started"], value["marks"]["session"]
                marks["group"], marks["loaded"] = value["marks"]["group"], value["marks"]["loaded"]
        return marks


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def start(
    name: str, work: Path, ranks: int, interval: int, ft_launcher: Path | None, checkout: Path = ROOT
) -> System:
    """Start the job under the launcher of that name.

    Args:
        name: ``outlast``, ``checkout``, ``torchrun`` or ``nvrx``.
        work: an empty folder of its own.
        ranks: world size.
        interval: steps between two checkpoints.
        ft_launcher: path of NVRx's launcher, for ``nvrx``.
        checkout: of outlast, for ``checkout``.
    """
    job = ["--steps", str(MANY), "--save-interval", str(interval), "--trace", str(work / "trace")]
    peer = [*job, "--checkpoint", str(work / "checkpoint.pt"), "--marks", str(work / "marks.jsonl")]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    if name in ("outlast", "checkout"):
        root = ROOT if name == "outlast" else checkout
        paths["PYTHONPATH"] = f"{root / 'src'}:{root / 'examples'}"
        launch = [sys.executable, "-m", "outlast", "run", "--nproc-per-node", str(ranks)]
        options = ["--run-dir", str(work / "run"), "--max-restarts", str(MANY)]
        options += ["--ft-max-restarts-per-day", str(MANY)]
        script = root / EXAMPLE.relative_to(ROOT)
        return Outlast(name, [*launch, *options, str(script), *job], work, paths, ranks)
    if name == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        options = ["--max-restarts", str(MANY)]
        # Without this, torchrun uses store keys of the last start again and burns restarts (pytorch#135712).
        paths["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return System(name, [*launch, *options, str(PEER), *peer], work, paths, ranks)
    launch = [str(ft_launcher), f"--nproc-per-node={ranks}", f"--max-restarts={MANY}"]
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    timeouts = ["--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=30"]
    return System(name, [*launch, *options, *timeouts, str(PEER), "--nvrx", *peer], work, paths, ranks)
