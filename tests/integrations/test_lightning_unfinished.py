"""Files that a kill leaves half written beside Lightning's checkpoints: removed where surely ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast import settings
from outlast.integrations.lightning.unfinished import remove_stale, written_to
from outlast.settings import WorkerContext
from tests.support.launching import until

WRITES = (
    "import sys, time; from pathlib import Path\n"
    "from outlast.integrations.lightning.unfinished import written_to\n"
    "with written_to(Path(sys.argv[1])) as part:\n"
    "    part.write_text('half')\n"
    "    time.sleep(600)\n"
)


def parts(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.endswith(".part")}


def enter(patch: pytest.MonkeyPatch, generation: int, run: str = "a run") -> None:
    context = WorkerContext(generation=generation, run_id=run, run_dir="/runs/one")
    for name, value in settings.worker_variables(context).items():
        patch.setenv(name, value)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that has begun to write a file."""
    before = parts(target.parent)
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(target)])
    try:
        until(lambda: parts(target.parent) - before or process.poll() is not None, "the part")
        assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize("run", ["", "a run"])
def test_what_a_kill_has_left_is_removed_and_what_is_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    enter(monkeypatch, 1, run)
    with writing(tmp_path / "last.ckpt") as process:
        (left,) = parts(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)  # it is suspended, not gone
        remove_stale(tmp_path)
        assert parts(tmp_path) == {left}
    others = {"last.ckpt.12.part", "a.part", f"{left}.part", left.replace("on-", "on-ff")}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "folder.ckpt").mkdir()
    os.rename(tmp_path / "folder.ckpt", tmp_path / left.replace("last", "folder"))
    with written_to(tmp_path / "last.ckpt") as part:
        part.touch()
        remove_stale(tmp_path)
        assert parts(tmp_path) == {*others, part.name, left.replace("last", "folder")}


def test_what_an_earlier_generation_has_left_on_another_host_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, 2)
    with writing(tmp_path / "last.ckpt"):
        (here,) = parts(tmp_path)
    elsewhere = here.replace(".on-", ".on-ff")
    (tmp_path / here).rename(tmp_path / elsewhere)
    for generation, run in ((1, "a run"), (2, "a run"), (3, "another run"), (3, "")):
        enter(monkeypatch, generation, run)
        remove_stale(tmp_path)
        assert parts(tmp_path) == {elsewhere}, "it may be written still"
    enter(monkeypatch, 3)
    remove_stale(tmp_path)
    assert parts(tmp_path) == set()


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(OSError), written_to(tmp_path / ("long" * 60)) as part:
        part.touch()
        assert parts(tmp_path) == {part.name}
        raise OSError("the disk is full")
    assert parts(tmp_path) == set()


def test_a_folder_that_is_missing_is_none_of_its_business(tmp_path: Path) -> None:
    remove_stale(tmp_path / "none")
