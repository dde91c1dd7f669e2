"""Each optimizer of torch goes on in every bit, whatever the memory order of its parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FUSED = ["Adam", "SGD"]


def test_no_optimizer_of_a_resumed_run_differs(tmp_path: Path) -> None:
    """A part of the cases of bench/optimizer_state.py: two optimizers with fused kernels, one type."""
    line = [sys.executable, str(ROOT / "bench" / "optimizer_state.py"), "--dtypes", "float32"]
    done = subprocess.run(
        [*line, "--optimizers", *FUSED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    cases = [json.loads(text) for text in done.stdout.splitlines()]
    assert [case for case in cases if case["outcome"] == "different"] == []
    assert done.returncode == 0, done.stderr
    equal = {(case["format"], case["implementation"]) for case in cases if case["outcome"] == "equal"}
    assert {
        ("channels_last", "fused"),
        ("channels_last of one channel", "fused"),
        ("slice", "plain"),
    } <= equal
    refused = {case["format"] for case in cases if case["outcome"] == "refused"}
    assert refused == {"expanded"}
