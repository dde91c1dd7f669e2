"""On a machine without a GPU the commands for one print that and succeed."""

from __future__ import annotations

import pytest

from tests.source_tree import ROOT
from tests.support import warm


@pytest.mark.parametrize("command", [["tests/gpu/__main__.py"], ["bench/gpu.py", "--out", "gpu.jsonl"]])
def test_without_a_gpu_there_is_one_line(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    done = warm.run(command, 100)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("no GPU: ")
    assert not (ROOT / "gpu.jsonl").exists()
