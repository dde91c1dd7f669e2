"""What others leave in a folder of Lightning's checkpoints is neither written through nor waited for."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import NoUsableCheckpoint
from outlast.integrations.lightning.unfinished import written_to
from tests.support.bounds import bounded_wait
from tests.support.frameworks import needs

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


@pytest.mark.parametrize("name", ["last.ckpt", BESIDE.format("last.ckpt")])
def test_a_link_in_the_place_of_the_next_unfinished_file_is_not_written_through(
    tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with written_to(tmp_path / name) as part:
        stem = part.name.rpartition("-")[0]
    for number in range(10_000):
        (tmp_path / f"{stem}-{number}.part").symlink_to(victim)
    save(tmp_path, "last.ckpt", 1)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
@pytest.mark.parametrize("name", ["last.ckpt", BESIDE.format("last.ckpt")])
def test_an_unfinished_file_is_a_new_one_even_where_its_name_is_known(
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
    """Change a bit of the first entry of the archive's directory."""
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


ODD: dict[str, Callable[[Path], object]] = {
    "encrypted": lambda path: turn(path, 8, 1),
    "patched": lambda path: turn(path, 8, 0x20),
    "version": lambda path: turn(path, 6, 0x80),
    "method": lambda path: turn(path, 10, 0x40),
    "compressed": compressed,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "dangling": lambda path: (path.unlink(), path.symlink_to("/nonexistent/x")),
    "circle": lambda path: (path.unlink(), path.symlink_to(path)),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "link to a fifo": lambda path: (
        path.unlink(),
        os.mkfifo(path.with_name("fifo")),
        path.symlink_to("fifo"),
    ),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}
DIGESTS: dict[str, Callable[[Path], object]] = {
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "circle": lambda path: (path.unlink(), path.symlink_to(path)),
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
        ODD["fifo"](save(tmp_path, name, 2))
        if not digests:
            (tmp_path / BESIDE.format(name)).unlink()
    with pytest.raises(NoUsableCheckpoint, match=r"step=2\.ckpt"):
        load(tmp_path / "step=2.ckpt")
    assert load(tmp_path / "last.ckpt") == 1


def test_a_save_replaces_digests_that_are_no_file(tmp_path: Path) -> None:
    DIGESTS["fifo"](tmp_path / BESIDE.format(save(tmp_path, "last.ckpt", 1).name))
    with bounded_wait():
        save(tmp_path, "last.ckpt", 2)
    assert load(tmp_path / "last.ckpt") == 2
