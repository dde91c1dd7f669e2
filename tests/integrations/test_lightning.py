"""Lightning's checkpoints: which one is loaded, and what is left beside them."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast import settings
from outlast.errors import NoUsableCheckpoint
from outlast.integrations.lightning import callbacks
from outlast.integrations.lightning.unfinished import remove_stale, written_to
from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.settings import WorkerContext
from tests.support.bounds import bounded_wait
from tests.support.frameworks import needs
from tests.support.launching import DEADLINE, SCRIPTS, until

pytestmark = needs("lightning")
BESIDE = ".{}.digests.json"


def store() -> Any:
    return importlib.import_module("outlast.integrations.lightning").OutlastCheckpointIO()


def save(folder: Path, name: str, step: int) -> Path:
    store().save_checkpoint({"epoch": 0, "global_step": step}, folder / name)
    return folder / name


def load(path: Path) -> int:
    with bounded_wait():
        return int(store().load_checkpoint(path, weights_only=True)["global_step"])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
@pytest.mark.parametrize("name", ["last.ckpt", BESIDE.format("last.ckpt")])
def test_an_unfinished_file_is_written_through_nothing_that_has_its_name(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("outlast.integrations.lightning.unfinished.os.urandom", bytes)
    with written_to(tmp_path / name) as part:
        pass
    plant = {"link": part.symlink_to, "hard link": part.hardlink_to, "fifo": lambda _: os.mkfifo(part)}
    plant[kind](victim)
    with bounded_wait(), contextlib.suppress(OSError):
        save(tmp_path, "last.ckpt", 1)
        pytest.fail("the save was to be refused")
    assert victim.read_text() == "mine"


def turn(path: Path, offset: int, bit: int) -> None:
    """Change bits of the first entry of the archive's directory."""
    content = bytearray(path.read_bytes())
    content[content.find(b"PK\x01\x02") + offset] ^= bit
    path.write_bytes(content)


def compressed(path: Path) -> None:
    """Leave an archive whose stream of compressed bytes is none."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"global_step": 5}))
    content = path.read_bytes().replace(b"PK\x03\x04\x14\0\0\0\0\0", b"PK\x03\x04\x14\0\0\0\x08\0")
    path.write_bytes(content)
    turn(path, 10, 8)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: str | Path) -> None:
    path.unlink()
    path.symlink_to(target)


ODD: dict[str, Callable[[Path], object]] = {
    "encrypted": lambda path: turn(path, 8, 1),
    "patched": lambda path: turn(path, 8, 0x20),
    "version": lambda path: turn(path, 6, 0x80),
    "method": lambda path: turn(path, 10, 0x40),
    "compressed": compressed,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "dangling": lambda path: link(path, "/nonexistent/x"),
    "circle": lambda path: link(path, path),
    "fifo": fifo,
    "link to a fifo": lambda path: (os.mkfifo(path.with_name("fifo")), link(path, "fifo")),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}
DIGESTS: dict[str, Callable[[Path], object]] = {
    "fifo": fifo,
    "folder": ODD["folder"],
    "huge": lambda path: os.truncate(path, 1 << 40),
    "circle": ODD["circle"],
}


@pytest.mark.parametrize("odd", ODD)
def test_another_checkpoint_that_is_damaged_is_passed_over(tmp_path: Path, odd: str) -> None:
    save(tmp_path, "step=1.ckpt", 1)
    ODD[odd](save(tmp_path, "step=2.ckpt", 2))
    damage(save(tmp_path, "last.ckpt", 3))
    assert load(tmp_path / "last.ckpt") == 1


@pytest.mark.parametrize("odd", DIGESTS)
@pytest.mark.parametrize("whose", ["step=2.ckpt", "last.ckpt"])
def test_digests_that_are_no_small_file_are_damaged(tmp_path: Path, whose: str, odd: str) -> None:
    save(tmp_path, "step=1.ckpt", 1)
    save(tmp_path, "step=2.ckpt", 2)
    damage(save(tmp_path, "last.ckpt", 3))
    DIGESTS[odd](tmp_path / BESIDE.format(whose))
    assert load(tmp_path / "last.ckpt") == (1 if whose == "step=2.ckpt" else 2)


@pytest.mark.parametrize("digests", [True, False])
def test_a_fifo_that_is_named_is_refused_or_replaced_without_waiting(tmp_path: Path, digests: bool) -> None:
    save(tmp_path, "step=1.ckpt", 1)
    for name in ("step=2.ckpt", "last.ckpt"):
        fifo(save(tmp_path, name, 2))
        if not digests:
            (tmp_path / BESIDE.format(name)).unlink()
    with pytest.raises(NoUsableCheckpoint, match=r"step=2\.ckpt"):
        load(tmp_path / "step=2.ckpt")
    assert load(tmp_path / "last.ckpt") == 1


def test_a_save_replaces_digests_that_are_no_file(tmp_path: Path) -> None:
    fifo(tmp_path / BESIDE.format(save(tmp_path, "last.ckpt", 1).name))
    with bounded_wait():
        save(tmp_path, "last.ckpt", 2)
    assert load(tmp_path / "last.ckpt") == 2


NAMES = ("epoch=0-step=9.ckpt", "last-v1.ckpt", "epoch=1-step=100.ckpt", "best.ckpt")  # by their steps


@pytest.mark.parametrize("newest", range(len(NAMES)))
def test_a_damaged_last_one_is_replaced_by_the_one_of_the_latest_step(newest: int, tmp_path: Path) -> None:
    there, copied = tmp_path / "there", tmp_path / "copied"
    for step, name in enumerate(NAMES[: newest + 1], 8):
        save(there, name, step * 11)
    damage(save(there, "last.ckpt", 1000))
    shutil.copytree(there, copied)
    for age, name in enumerate(NAMES[: newest + 1], 1):
        os.utime(there / name, (1e9 / age, 1e9 / age))  # the clock was set back
        os.utime(copied / name, (1e9, 1e9))
    for folder in (there, copied):
        assert load(folder / "last.ckpt") == 11 * (8 + newest)


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
    remove_stale(tmp_path / "none")


@pytest.mark.parametrize(
    ("preemption", "stay"),
    [
        pytest.param({"enable_exit_handler": False}, ["SIGTERM", "SIGUSR1"], marks=pytest.mark.long),
        ({"exit_signals": ["SIGTERM"]}, ["SIGUSR1"]),
        pytest.param({}, [], marks=pytest.mark.long),
    ],
)
def test_lightnings_handlers_of_other_signals_stay(
    tmp_path: Path, preemption: dict[str, Any], stay: list[str]
) -> None:
    page = HeartbeatReader(tmp_path / "page", rank=0, generation=1, spawned=time.monotonic())
    control = str(tmp_path / "control")
    context = WorkerContext(
        generation=1, heartbeat_path=str(page.path), control_path=control, preemption=preemption
    )
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    slurm |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "lightning_signals.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={**os.environ, **settings.worker_variables(context), **slurm, "OMP_NUM_THREADS": "1"},
    )
    page.close()
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^handles (\w+)$", done.stderr, re.MULTILINE) == stay, done.stderr


def test_outside_of_the_launcher_nothing_is_attached_nor_imported() -> None:
    before = set(sys.modules)
    assert callbacks() == []
    assert not {name for name in set(sys.modules) - before if "lightning" in name and "outlast" not in name}
