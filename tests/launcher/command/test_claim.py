"""Which run folder a launch takes where another process holds the lock of the one that it would."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.errors import RunFolderBusy
from outlast.ipc.processes import identity, lives
from outlast.launcher.command.launch import _claim
from outlast.launcher.command.options import LaunchOptions, parse_run

PID, BEGAN, BOOT, NAMESPACE = identity().split()
ENDED = f"{PID} {int(BEGAN) + 1} {BOOT} {NAMESPACE}"  # another process has the pid now


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchOptions:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return parse_run(["train.py"], {})


@pytest.fixture
def lock(options: LaunchOptions) -> Iterator[Path]:
    """Give the lock file of the folder, which is held."""
    path = Path(options.run_dir, "lock")
    path.parent.mkdir(parents=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def test_a_launch_beside_one_that_lives_has_a_folder_of_its_own(options: LaunchOptions, lock: Path) -> None:
    lock.write_text(f"{identity()}\n")
    folder, _, (notice,) = _claim(options)
    folder.release()
    assert folder.root == Path(f"{options.run_dir}-2").resolve()
    assert options.run_dir in notice
    assert lives((folder.root / "lock").read_text())


def test_what_a_killed_launch_has_left_is_no_launch_though_its_pid_is_used_again(
    options: LaunchOptions, lock: Path
) -> None:
    lock.write_text(f"{ENDED}\n")
    with pytest.raises(RunFolderBusy, match=f"pid {PID}"):
        _claim(options)
    assert os.listdir(lock.parent.parent) == [lock.parent.name]


@pytest.mark.parametrize(
    "text",
    [
        f"{PID} {BEGAN} {'0' * 8} {NAMESPACE}",
        f"{PID} {BEGAN} {BOOT} pid:[1]",
        f"{PID}\n",
        f"{PID} soon {BOOT} {NAMESPACE}",
        "",
    ],
    ids=["another host", "another namespace", "a pid alone", "no number", "nothing yet"],
)
def test_a_process_that_cannot_be_seen_is_not_taken_for_dead_or_alive(
    text: str, options: LaunchOptions, lock: Path
) -> None:
    lock.write_text(text)
    assert lives(text) is None
    with pytest.raises(RunFolderBusy):
        _claim(options)
    assert os.listdir(lock.parent.parent) == [lock.parent.name]


def test_who_has_ended_does_not_live() -> None:
    assert lives(identity())
    assert lives(ENDED) is False
    assert lives(f"{2**22 + 1} {BEGAN} {BOOT} {NAMESPACE}") is False  # beyond the largest pid
