"""Faults that are made inside a process: each one in a real process, seen by how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE = 120.0

# Calls one of its own functions for ever; says so once, so that the fault meets a running script.
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


def start(tmp_path: Path, fault: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "outlast.chaos.inprocess", "--", "--fault", fault, "--base-delay", "0.5"]
    return subprocess.Popen(
        [*command, *options, str(script), "--steps", "5"],
        cwd=tmp_path,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_still(steps: Path) -> None:
    """Wait until a file of a line a millisecond has not grown for a while."""
    deadline, size, looks = time.monotonic() + PATIENCE, -1, 0
    while looks < 50:
        assert time.monotonic() < deadline, "the script goes on"
        before, size = size, steps.stat().st_size
        looks = looks + 1 if size == before else 0
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("WORKLOAD_EXC", 1, "InjectedError: WORKLOAD_EXC in step"),
        ("ASYNC_EXC", 1, "InjectedError"),
        ("SIGNAL_EXC", 1, "InjectedError: SIGNAL_EXC"),
        ("SEGFAULT", -signal.SIGSEGV, ""),
        ("OS_ABORT", -signal.SIGABRT, ""),
        ("SIGTERM", -signal.SIGTERM, ""),
        ("SIGINT", -signal.SIGINT, "KeyboardInterrupt"),
        ("SIGKILL", -signal.SIGKILL, ""),
        ("rank_killed", -signal.SIGKILL, ""),
    ],
)
def test_a_fault_ends_the_script_as_its_name_says(tmp_path: Path, fault: str, code: int, said: str) -> None:
    process = start(tmp_path, fault, "--rank", "1")
    output, errors = process.communicate(timeout=PATIENCE)
    assert output == "running __main__ ['--steps', '5']\n"
    assert f"chaos: {fault} after 0.5" in errors
    assert said in errors
    assert process.returncode == code


def test_a_locked_interpreter_runs_no_more_python(tmp_path: Path) -> None:
    """The script stands still, and the process answers no signal that Python would have to handle."""
    process = start(tmp_path, "LOCK_GIL", "--rank", "1")
    try:
        assert process.stderr is not None
        assert "LOCK_GIL" in process.stderr.readline()
        wait_until_still(tmp_path / "steps")
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_process_is_stopped(tmp_path: Path) -> None:
    process = start(tmp_path, "rank_hung", "--rank", "1")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "environment"),
    [(("--rank", "0"), {}), (("--rank", "1"), {"TORCHELASTIC_RESTART_COUNT": "1"})],
)
def test_other_ranks_and_later_starts_are_spared(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    process = start(tmp_path, "SIGKILL", *options, **environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("running")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
    finally:
        process.kill()
        process.communicate()


def test_every_rank_draws_the_same_victim(tmp_path: Path) -> None:
    processes = [start(tmp_path, "random", "--seed", "4", RANK=rank) for rank in ("0", "1")]
    deadline = time.monotonic() + PATIENCE
    try:
        while not any(process.poll() for process in processes):
            assert time.monotonic() < deadline, "no rank was drawn"
            time.sleep(0.01)
        assert sorted(str(process.poll()) for process in processes) == [str(-signal.SIGKILL), "None"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_fault_of_a_gpu_is_refused_without_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = start(tmp_path, "GPU_ERROR", "--rank", "1", CUDA_VISIBLE_DEVICES="")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "GPU_ERROR needs a CUDA device" in errors


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast.chaos.inprocess", str(tmp_path / "absent.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert found.returncode == 66
    assert "absent.py: no such file" in found.stderr
