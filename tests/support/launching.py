"""Starting ``outlast run`` for real, and waiting on what it writes, never on time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tests.support import warm

_AT_THE_START = ("PYTHON", "OMP", "LD_", "MALLOC")  # what an interpreter and torch read as they start
PYTHON = [sys.executable, "-m"]
SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE = float(os.environ.get("TESTS_DEADLINE", "180"))  # seconds: a loaded machine imports torch slowly


def until(condition: Callable[[], Any], what: str | Callable[[], str], deadline: float = DEADLINE) -> Any:
    """Return the first true answer of ``condition``; fail with ``what`` when the deadline passes."""
    end = time.monotonic() + deadline
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline:.0f} s for {what() if callable(what) else what}")
        time.sleep(0.01)


def started(
    command: list[str], output: IO[bytes], environment: Mapping[str, str], cold: bool = False
) -> subprocess.Popen[bytes] | warm.Warm:
    """Start a command; ``python -m ...`` as a fork, unless told otherwise or given variables of a start."""
    alike = not any(name.startswith(_AT_THE_START) for name in environment)
    if alike and not cold and command[:2] == PYTHON:
        return warm.start(command[1:], output, output, environment)
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


class Run:
    """A launcher under test and its run folder.

    Args:
        folder: of the run.
        script: a name in tests/support/scripts, or a path.
        args: of the script.
        options: of ``outlast run``.
        cold: a new interpreter, and one for its zygote; else both are forks (tests/support/warm).
    """

    def __init__(
        self, folder: Path, script: str, *args: str, options: tuple[str, ...] = (), cold: bool = False
    ) -> None:
        self.folder = folder
        self.cold = cold
        self.output = folder.parent / f"{folder.name}.console"
        self.command = [
            *PYTHON,
            "outlast",
            "run",
            "--run-dir",
            str(folder),
            *options,
            str(SCRIPTS / script) if (SCRIPTS / script).exists() else script,
            *args,
        ]
        self.process: subprocess.Popen[bytes] | warm.Warm | None = None

    def start(self, **environment: str) -> Run:
        if "PYTHONPATH" in environment:  # bench/defects.py has a copy of outlast in it
            own = (environment["PYTHONPATH"], os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, own))
        with open(self.output, "ab") as file:
            self.process = started(self.command, file, environment, self.cold)
        return self

    def finish(self, deadline: float = DEADLINE) -> int:
        assert self.process is not None
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline:.0f} s:\n{self.console()}") from None

    def console(self) -> str:
        return self.output.read_text(errors="replace")

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [one for one in found if kind in (None, one["kind"])]

    def until(self, condition: Callable[[], Any], what: str = "the condition of the test is true") -> Any:
        """Return the first true answer of a condition; fail when the launcher ends before it is true."""

        def true_or_over() -> Any:
            over = self.process is not None and self.process.poll() is not None
            answer = condition()
            assert answer or not over, f"ended with {self.finish()} before {what}; console:\n{self.console()}"
            return answer

        return until(true_or_over, lambda: f"{what}; console:\n{self.console()}")

    def pids(self, generation: int | None = None) -> list[int]:
        """Return the ranks' pids of a generation (the newest one by default) once they are known."""

        def known() -> list[int]:
            started = [
                one for one in self.records("generation_started") if generation in (None, one["generation"])
            ]
            return started[-1]["pids"] if started else []

        return self.until(known, f"generation {generation} to start")

    def wait_step(self, step: int, generation: int | None = None) -> None:
        """Wait until the trace of every rank of a generation shows a step."""

        def reached() -> bool:
            ranks = {}
            for path in (self.folder.parent / "trace").glob("rank-*"):
                for line in path.read_text().splitlines():
                    with contextlib.suppress(ValueError):
                        one = json.loads(line)
                        if one["step"] >= step and generation in (None, one["generation"]):
                            ranks[path.name] = one["world"]
            return bool(ranks) and len(ranks) == next(iter(ranks.values()))

        self.until(reached, f"step {step} of generation {generation}")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def running(run: Run, **environment: str) -> Iterator[Run]:
    """Start a launcher and make sure that it is gone afterwards."""
    run.start(**environment)
    try:
        yield run
    finally:
        run.stop()


def is_gone(pid: int) -> bool:
    """Say whether a process has ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def runtime_folders(agent: int) -> list[Path]:
    """Return what a launcher has left in shared memory."""
    return list(Path("/dev/shm").glob(f"outlast-{agent}-*"))
