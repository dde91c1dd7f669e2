"""Which checkpoint of Lightning is the newest does not depend on the times of files."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from tests.support.frameworks import needs

pytestmark = needs("lightning")
NAMES = ("epoch=0-step=9.ckpt", "last-v1.ckpt", "epoch=1-step=100.ckpt", "best.ckpt")  # by their steps


@pytest.mark.parametrize("newest", range(len(NAMES)))
def test_a_damaged_last_one_is_replaced_by_the_one_of_the_latest_step(newest: int, tmp_path: Path) -> None:
    store = importlib.import_module("outlast.integrations.lightning").OutlastCheckpointIO()
    there, copied = tmp_path / "there", tmp_path / "copied"
    for step, name in enumerate(NAMES[: newest + 1], 8):
        store.save_checkpoint({"epoch": 0, "global_step": step * 11}, there / name)
    store.save_checkpoint({"epoch": 0, "global_step": 1000}, there / "last.ckpt")
    (there / "last.ckpt").write_bytes(b"damaged")
    shutil.copytree(there, copied)
    for age, name in enumerate(NAMES[: newest + 1], 1):
        os.utime(there / name, (1e9 / age, 1e9 / age))  # the clock was set back
        os.utime(copied / name, (1e9, 1e9))
    for folder in (there, copied):
        found = store.load_checkpoint(folder / "last.ckpt", weights_only=True)
        assert found["global_step"] == 11 * (8 + newest)
