"""What a loop with a DeepSpeed engine cannot resume is refused; its kills are in test_every_framework.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.frameworks import alone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed: not installed; docs/how-to/deepspeed.md says how to install it",
)


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("model", "Linear"),
        ("none", "resume(engine, loader)"),
        ("unknown", "resume"),
        ("repeating", "RepeatingLoader"),
        ("elastic", "elastic_checkpoint"),
        ("longer", "1"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, named: str
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    done = alone(tmp_path, "deepspeed_refused.py", way)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
