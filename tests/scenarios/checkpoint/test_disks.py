"""Disks that are full, fail, are slow or may only be read, wrong clocks, and the global tier."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, until
from tests.support.mounts import mounted, needs_root
from tests.support.processes import child_running
from tests.support.saved_steps import (
    FILES,
    SCRIPT,
    TENSORS,
    flip,
    made,
    name_of,
    ran,
    records,
    restored,
    said,
    steps_of,
)

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: apt-get install strace")
needs_faketime = pytest.mark.skipif(
    shutil.which("faketime") is None, reason="no faketime: apt-get install faketime"
)


@needs_root
@pytest.mark.parametrize("async_save", [False, True], ids=["waits", "trains on"])
def test_a_full_disk_costs_saves_and_after_three_in_a_row_the_job(tmp_path: Path, async_save: bool) -> None:
    run, disk = tmp_path / "run", tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    options = {"async_save": async_save, "max_failed_seconds": 0.0}
    with mounted(disk, "-t", "tmpfs", "-o", "size=128k", "tmpfs"):
        held = made(run, 1, **options)
        with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        begun, *saves, last = ran(run, "save=2,3,4,5,6", **options)
        assert begun["restored"] == 1
        assert [one["saved"] for one in saves] == [False] * len(saves)
        assert (last["error"], last["code"]) == ("SaveFailed", 74)
        lost = records(run, "save_lost")
        assert [one["step"] for one in lost[:3]] == [2, 3, 4]
        assert all(os.strerror(28) in one["reason"] for one in lost)
        assert steps_of(run) == [1]
        (disk / "fill").unlink()
        newest = restored(run, **options)[run]
        assert newest["restored"] == 4, "what did not go to disk stays in memory"
        assert newest["content"] == held.get(newest["restored"], newest["content"])


@needs_root
def test_a_folder_that_may_only_be_read_is_loaded_from_and_loses_saves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held = made(run, 1, 2)
    copies = run / "checkpoints"
    flip(copies / name_of(2) / TENSORS)
    with mounted(copies, "--bind", str(copies)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(copies)], check=True)
        begun, save, *_ = ran(run, "save=3")
        assert (begun["restored"], begun["content"], save["saved"]) == (1, held[1], False)
    assert (copies / name_of(2)).is_dir(), "it could not be set aside"


@contextlib.contextmanager
def injected(pid: int, rule: str, log: Path) -> Iterator[None]:
    """Change what system calls of a process return, or how long they take."""
    command = ["strace", "-f", "-o", os.devnull, "-e", f"inject={rule}", "-p", str(pid)]
    with open(log, "w") as file:
        tracer = subprocess.Popen(command, stderr=file)
    try:
        until(lambda: "attached" in log.read_text() or tracer.poll() is not None, "the tracer")
        if tracer.poll() is not None:
            pytest.skip(f"processes cannot be traced here: {log.read_text()}")
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(DEADLINE)


@needs_strace
@pytest.mark.parametrize("rule", ["fsync,fdatasync:error=EIO", "fsync,fdatasync:delay_enter=300000"])
def test_a_disk_that_fails_costs_a_save_and_one_that_is_slow_costs_none(tmp_path: Path, rule: str) -> None:
    run = tmp_path / "run"
    words = [str(SCRIPT), str(run), "save=1,2,3,4,5,6", "async_save=true", "step=0.2", "keep_last_n=9"]
    with subprocess.Popen([sys.executable, "-u", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = said(process.stdout.readline() + process.stdout.readline())
        assert [one.get("saved") for one in first] == [None, True]
        writer = until(lambda: child_running(process.pid, "writer"), "the writer")
        with injected(writer, rule, tmp_path / "strace"):
            saves = said(process.stdout.readline() + process.stdout.readline())
        rest = said(process.stdout.read())
        assert process.wait(DEADLINE) == 0
    saves += rest
    kept = [one["step"] for one in saves if one["saved"]]
    lost = [one["step"] for one in saves if not one["saved"]]
    assert (lost != []) == ("error" in rule)
    assert steps_of(run) == [1, *kept]
    assert [one["step"] for one in records(run, "save_lost")] == lost
    assert all(os.strerror(5) in one["reason"] for one in records(run, "save_lost"))
    assert kept[-1] == 6
    assert restored(run)[run]["content"] == saves[-1]["content"]


@needs_strace
@pytest.mark.parametrize("command", ["load", "verify"])
def test_a_copy_that_cannot_be_read_is_named_and_the_one_before_it_is_loaded(
    tmp_path: Path, command: str
) -> None:
    run = tmp_path / "run"
    made(run, 1, 2)
    newest = run / "checkpoints" / name_of(2) / TENSORS
    words = {
        "load": [str(SCRIPT), str(run)],
        "verify": ["-m", "outlast", "ckpt", "verify", str(run), "--all"],
    }
    calls = "read,pread64,preadv,preadv2,mmap"
    tracer = ["strace", "-f", "--seccomp-bpf", "-o", os.devnull, "-P", str(newest)]
    tracer += ["-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"]
    command_line = [*tracer, sys.executable, *words[command]]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if command == "load":
        (found,) = said(done.stdout)
        assert found["restored"] == 1, done.stderr
        assert any(os.strerror(5) in one["reason"] for one in records(run, "note"))
    else:
        assert (done.returncode != 0, os.strerror(5) in done.stdout + done.stderr) == (True, True)
        assert newest.name in done.stdout + done.stderr


@needs_faketime
@pytest.mark.parametrize("skew", ["-2d", pytest.param("+400d", marks=pytest.mark.long)])
def test_a_clock_that_is_wrong_changes_nothing_about_which_copy_is_loaded(tmp_path: Path, skew: str) -> None:
    run = tmp_path / "run"
    made(run, 1, 2, 3)
    command = ["faketime", "-f", skew, sys.executable, str(SCRIPT), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert [one["restored"] for one in said(done.stdout)] == [3], done.stderr


def test_the_newest_copies_stay_and_the_one_that_was_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made(run, 1, keep_last_n=2)
    made(run, *range(2, 7), keep_last_n=2)
    assert steps_of(run) == [1, 5, 6]
    pruned = [one["checkpoint"] for one in records(run, "pruned")]
    assert [name[:14] for name in pruned] == [name_of(step)[:14] for step in (2, 3, 4)]


def test_when_all_that_is_near_is_lost_or_damaged_the_global_copy_is_loaded(tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "global"
    options = {"async_save": True, "global_url": str(far), "keep_last_n": 9, "keep_ancestors": 9}
    steps = list(range(1, 5))
    held = made(run, *steps, step=0.2, **options)
    until((far / name_of(4) / "COMMIT").exists, "the newest copy in the global tier")
    arrived = sorted(int(path.name[5:14]) for path in far.glob("step-*"))
    for step in steps:
        flip(run / "checkpoints" / name_of(step) / TENSORS)
    flip(far / name_of(4) / FILES[1])
    found = restored(run, **options)[run]
    assert (found["restored"], found["content"]) == (arrived[-2], held[arrived[-2]])
    aside = {one["checkpoint"] for one in records(run, "quarantined")}
    assert aside == {f"global/{name_of(4)}", *(name_of(step) for step in steps if step >= arrived[-2])}
    shutil.rmtree(run / "checkpoints")
    found = restored(run, **options)[run]
    assert (found["restored"], found["content"]) == (arrived[-2], held[arrived[-2]])
    for copy in (*far.glob("step-*"), *(run / "checkpoints").glob("step-*")):
        flip(copy / TENSORS)
    found = restored(run, **options)[run]
    assert (found["error"], found["code"], found["unchanged"]) == ("NoUsableCheckpoint", 65, True)


def test_another_runs_copies_in_the_global_tier_are_refused(tmp_path: Path) -> None:
    made(tmp_path / "other", 2)
    far = tmp_path / "other" / "checkpoints"
    (found,) = ran(tmp_path / "run", async_save=True, global_url=str(far))
    assert (found["error"], str(far) in found["text"]) == ("CheckpointMismatch", True)
