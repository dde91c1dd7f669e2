"""Kill a job with SIGKILL before each change that it makes to the file system, one after the other.

    dying.py FOLDER {sound,damaged}

A forked process restores and saves; the profiler counts its changes and the process kills
itself just before the n-th, for n = 1, 2, ... until it survives. After each death a restore has
to find a whole checkpoint. Prints all file operations in order and what went wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from outlast.checkpoint.policy.manifest import copy_name
from outlast.config import CheckpointOptions
from tests.support.jobs import Job, checkpointer, save_steps

CHANGES = {"write", "fsync", "mkdir", "rename", "unlink", "rmdir"}
OPERATIONS = CHANGES | {"open", "close", "preadv", "listdir"}
LIMIT = 2000
SETTINGS = CheckpointOptions(keep_last_n=2)


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


def die_before(number: int, pipe: int) -> None:
    """Have this process killed before its change of that number; name each operation on the way."""
    count = 0

    def profile(_: FrameType, event: str, function: Any) -> None:
        nonlocal count
        if event == "c_call" and function.__module__ == "posix" and function.__name__ in OPERATIONS:
            count += function.__name__ in CHANGES
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            sys.setprofile(None)
            os.write(pipe, f"{function.__name__} ".encode())
            sys.setprofile(profile)

    sys.setprofile(profile)


def live(folder: Path) -> None:
    """Restore, and save step 4."""
    job = Job(1)
    saver = checkpointer(folder, generation=2, settings=SETTINGS)
    saver.restore(job.state)
    if not saver.save(4, job.state, "a test"):
        raise AssertionError("the save was lost")


def examine(folder: Path, content: dict[int, bytes], newest: int) -> None:
    """Check that a whole checkpoint is found, and that the job can go on from it."""
    job = Job(2)
    saver = checkpointer(folder, generation=3, settings=SETTINGS)
    committed = (folder / copy_name(4, 2)).exists()
    restored = saver.restore(job.state)
    assert restored is not None, "nothing was restored"
    assert restored.step == (4 if committed else newest), restored
    assert job.content() == content[newest], "the state differs"
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert not left, left
    assert saver.save(5, job.state, "a test")


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    content = save_steps(folder / "before", 1, 2, 3)
    newest = 3
    if kind == "damaged":
        newest = 2
        with (folder / "before" / copy_name(3, 1) / "rank-00000-of-00001.safetensors").open("r+b") as file:
            file.seek(2000)
            byte = file.read(1)[0]
            file.seek(2000)
            file.write(bytes([byte ^ 4]))
    problems, operations = [], ""
    for number in range(1, LIMIT):
        place = folder / "tier"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "before", place)
        readable, writable = os.pipe()

        def part(place: Path = place, number: int = number, writable: int = writable) -> None:
            die_before(number, writable)
            live(place)
            sys.setprofile(None)

        status = forked(part)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            operations = pipe.read()
        if status not in (0, -signal.SIGKILL):
            problems.append(f"before change {number} the job ended with {status}")
        if forked(lambda place=place: examine(place, content, newest)) != 0:  # type: ignore[misc]
            problems.append(f"killed before change {number}, after {operations[-200:]}")
        if status == 0:
            break
    print(json.dumps({"changes": number, "operations": operations.split(), "problems": problems}))


if __name__ == "__main__":
    main()
