"""Each benchmark runs by the command that its docstring gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from tests.support import warm

SCRIPTS = sorted(one.name for one in (ROOT / "bench").glob("*.py") if "argparse" in one.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_starts_outside_of_the_repository(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = warm.run([ROOT / "bench" / script, "--help"], 100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch: apt-get install patch")
def test_every_defect_can_be_put_back_and_names_a_test_that_is_there() -> None:
    problems = []
    for diff in sorted((ROOT / "bench" / "defects").glob("*.diff")):
        command = ["patch", "-p1", "-s", "-f", "--dry-run", "-i", str(diff)]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
            problems.append(f"{diff.name} does not apply")
        third = diff.read_text().splitlines()[2]
        file, _, name = (
            third.removeprefix("test: ").partition("::") if third.startswith("test: ") else ("", "", "")
        )
        if name and f"def {name.rpartition('::')[2].partition('[')[0]}(" not in (ROOT / file).read_text():
            problems.append(f"{diff.name} names {file}::{name}, which is not there")
    assert problems == []
