"""Runtime folders: one a launcher, swept when it is gone, whatever pid its name shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.launcher import runtime

HOLD = "runtime._base = lambda: Path({!r}); print(runtime.make(), flush=True); input()"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime, "_base", lambda: tmp_path)
    return tmp_path


def test_a_folder_of_a_launcher_that_lives_stays_though_its_pid_is_unknown_here(base: Path) -> None:
    mine = runtime.make()
    elsewhere = mine.rename(base / f"outlast-{2**22 + 1}-{mine.name[-8:]}")  # no pid is that high
    runtime.sweep()
    assert elsewhere.is_dir()


def test_a_folder_of_a_launcher_that_was_killed_goes(base: Path) -> None:
    hold = f"from pathlib import Path; from outlast.launcher import runtime; {HOLD.format(str(base))}"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        runtime.sweep()
        assert left.is_dir()
        other.kill()
    runtime.sweep()
    assert not left.exists()


def test_what_only_looks_like_one_stays(base: Path) -> None:
    others = [base / "outlast-notes-of-2", base / "outlast-12-zz", base / "other-12-00000000"]
    for path in others:
        path.mkdir()
    runtime.sweep()
    assert all(path.is_dir() for path in others)
