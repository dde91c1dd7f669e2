"""Kill a job with SIGKILL before each change that its checkpoint writer makes to the file system.

    dying.py FOLDER {sound,damaged} EVERY

A forked process restores and saves, and its writer, a process of its own, imports a file of this script as
it starts: with that the profiler counts its changes, and just before the n-th both are killed, for n = 1,
1 + EVERY, 1 + 2 * EVERY, ... until they survive. After each death a restore has to find a whole checkpoint:
the newest on disk, or the one that was in memory. Prints all operations of the writer in order and what went
wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from saves_steps import Job

import outlast

CHANGES = {"write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}
OPERATIONS = CHANGES | {"open", "close"}
LIMIT = 2000
OPTIONS = outlast.CheckpointOptions(async_save=False, keep_last_n=2, timeout=60.0)


def forked(part: Callable[[], None]) -> int:
    """Run a part in a forked process and return how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - the parent hears of it by the status
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Python imports it in each process that starts with its folder in PYTHONPATH, before the program.
SITE = """
import os, signal, sys, threading
if any("checkpoint.writer" in word for word in sys.orig_argv):
    number, rank, path = os.environ["DYING"].split(" ", 2)
    pipe = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    lock, count = threading.Lock(), 0

    def profile(_, event, function):
        global count
        if event == "c_call" and function.__module__ == "posix" and function.__name__ in {operations}:
            with lock:
                count += function.__name__ in {changes}
                if count == int(number):
                    os.kill(int(rank), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.setprofile(None)
                os.write(pipe, f"{{function.__name__}} ".encode())
                sys.setprofile(profile)

    threading.setprofile(profile)
    sys.setprofile(profile)
"""


def go_on(run: Path, seed: int) -> tuple[int, str]:
    """Restore, do one step and save it; return what was restored."""
    job = Job(seed)
    with outlast.start(str(run), save_interval=10**6, checkpoints=OPTIONS) as session:
        step = session.restore(**job.state)
        content = job.content()
        job.train()
        session.step_done(step + 1)
        (run / "after").write_text(job.content())
        assert session.save(), "the save was lost"
    return step, content


def writer_has_ended(run: Path) -> None:
    """Wait until the writer of a run has removed its memory folder."""
    deadline = time.monotonic() + 60.0
    memory = Path(json.loads((run / "memory.json").read_text())["memory"])
    while memory.exists():
        assert time.monotonic() < deadline, f"{memory} is still there"
        time.sleep(0.01)


def make(run: Path) -> None:
    """Save three steps; leave what each holds."""
    job, content = Job(1), {}
    options = outlast.CheckpointOptions(async_save=False, keep_last_n=9)
    with outlast.start(str(run), save_interval=1, checkpoints=options) as session:
        session.restore(**job.state)
        for step in session.steps(3):
            job.train()
            content[step + 1] = job.content()
    writer_has_ended(run)
    (run.parent / "content").write_text(json.dumps(content))


def examine(run: Path, content: dict[int, str]) -> None:
    """Check that a whole checkpoint is found, and that the job can go on from it."""
    on_disk = max(int(path.name[5:14]) for path in (run / "checkpoints").glob("step-*") if whole(path))
    after = (run / "after").read_text() if (run / "after").exists() else ""
    step, found = go_on(run, 2)
    assert step >= on_disk, (step, on_disk)
    assert found == content.get(step, after), f"step {step}: the state differs"
    writer_has_ended(run)
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert not left, left


def whole(copy: Path) -> bool:
    return (copy / "COMMIT").exists() and not (copy / "damaged").exists()


def main() -> None:
    folder, kind, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    make(folder / "before")  # here, so that forks need not import what it needs
    content = {int(step): held for step, held in json.loads((folder / "content").read_text()).items()}
    if kind == "damaged":
        newest = folder / "before" / "checkpoints" / "step-000000003.g0"
        (newest / "damaged").touch()
        tensors = newest / "rank-00000-of-00001.safetensors"
        octets = bytearray(tensors.read_bytes())
        octets[-1] ^= 4
        tensors.write_bytes(octets)
    (folder / "site").mkdir()
    names = {"operations": repr(OPERATIONS), "changes": repr(CHANGES)}
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(**names))
    problems, operations, number = [], "", 0
    for number in range(1, LIMIT, every):
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "before", run)
        (run / "after").unlink(missing_ok=True)
        done = folder / "operations"
        done.unlink(missing_ok=True)

        def part(number: int = number, done: Path = done, run: Path = run) -> None:
            os.environ["DYING"] = f"{number} {os.getpid()} {done}"
            os.environ["PYTHONPATH"] = f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}"
            go_on(run, 1)
            writer_has_ended(run)

        status = forked(part)
        operations = done.read_text()
        if status not in (0, -signal.SIGKILL):
            problems.append(f"before change {number} the job ended with {status}")
        if forked(lambda run=run: examine(run, content)) != 0:
            problems.append(f"killed before change {number}, after {operations[-200:]}")
        if status == 0:
            break
    print(json.dumps({"changes": number, "operations": operations.split(), "problems": problems}))


if __name__ == "__main__":
    main()
