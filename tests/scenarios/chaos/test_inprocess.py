"""Faults that are made inside a process: each one in a real process, seen by how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import until

PATIENCE = 120.0

# Calls one of its own functions for ever; prints once, so that the fault meets a running script.
SCRIPT = """
import signal
import sys
import time

def step(number):
    if number == 1:
        print("running", __name__, sys.argv[1:], flush=True)
    time.sleep(0.001)

signal.alarm(240)  # ends a script that no fault has ended
number = 0
with open("steps", "w", 1) as steps:
    while True:
        number += 1
        step(number)
        steps.write(f"{number}\\n")
"""


@contextlib.contextmanager
def started(
    tmp_path: Path, fault: str, *options: str, delay: str = "0.5", **environment: str
) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "outlast.chaos.inprocess", "--", "--fault", fault, "--base-delay", delay]
    process = subprocess.Popen(
        [*command, *options, str(script), "--steps", "5"],
        cwd=tmp_path,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("fault", "code", "error"),
    [
        ("WORKLOAD_EXC", 1, "InjectedError"),
        ("ASYNC_EXC", 1, "InjectedError"),
        ("SIGNAL_EXC", 1, "InjectedError"),
        ("SEGFAULT", -signal.SIGSEGV, ""),
        ("OS_ABORT", -signal.SIGABRT, ""),
        ("SIGTERM", -signal.SIGTERM, ""),
        ("SIGINT", -signal.SIGINT, "KeyboardInterrupt"),
        ("SIGKILL", -signal.SIGKILL, ""),
        ("rank_killed", -signal.SIGKILL, ""),
    ],
)
def test_a_fault_ends_the_script_as_its_name_says(tmp_path: Path, fault: str, code: int, error: str) -> None:
    with started(tmp_path, fault, "--rank", "1") as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert output == "running __main__ ['--steps', '5']\n"
    assert fault in errors
    assert error in errors
    assert process.returncode == code


def test_a_locked_interpreter_runs_no_more_python(tmp_path: Path) -> None:
    """The script stands still, and the process answers no signal that Python would have to handle."""
    steps, sizes = tmp_path / "steps", [-1]

    def still() -> bool:
        sizes.append(steps.stat().st_size)
        return len(sizes) > 50 and len(set(sizes[-50:])) == 1

    with started(tmp_path, "LOCK_GIL", "--rank", "1") as process:
        assert process.stderr is not None
        assert "LOCK_GIL" in process.stderr.readline()
        until(still, "the script to stand still")
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)


def test_a_stopped_process_is_stopped(tmp_path: Path) -> None:
    with started(tmp_path, "rank_hung", "--rank", "1") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


@pytest.mark.parametrize(
    ("options", "environment"),
    [(("--rank", "0"), {}), (("--rank", "1"), {"TORCHELASTIC_RESTART_COUNT": "1"})],
    ids=["another rank", "a later start"],
)
def test_other_ranks_and_later_starts_are_spared(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    with started(tmp_path, "SIGKILL", *options, delay="0.1", **environment) as process:
        steps = tmp_path / "steps"
        until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 1000, "a thousand steps")
        assert process.poll() is None


def test_every_rank_draws_the_same_victim(tmp_path: Path) -> None:
    with (
        started(tmp_path, "random", "--seed", "4", RANK="0") as one,
        started(tmp_path, "random", "--seed", "4", RANK="1") as other,
    ):
        until(lambda: one.poll() or other.poll(), "one rank to be drawn")
        assert sorted(str(process.poll()) for process in (one, other)) == [str(-signal.SIGKILL), "None"]


def test_a_fault_of_a_gpu_is_refused_without_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with started(tmp_path, "GPU_ERROR", "--rank", "1", CUDA_VISIBLE_DEVICES="") as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "GPU_ERROR" in errors) == (2, True)


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast.chaos.inprocess", str(tmp_path / "absent.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (found.returncode, "absent.py" in found.stderr) == (66, True)
