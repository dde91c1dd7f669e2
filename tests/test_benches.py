"""Each benchmark runs by the command that its docstring gives."""

from __future__ import annotations

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
