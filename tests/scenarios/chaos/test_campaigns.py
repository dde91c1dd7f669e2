"""Campaigns of random kills and damage, and the bugs on purpose that show that their oracle is not blind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 240.0


def campaigns(*options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run campaigns; return the exit status, the lines and everything that was printed."""
    source = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = warm.run([ROOT / "bench" / "campaigns.py", *options], DEADLINE, {"PYTHONPATH": source})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, lines, done.stdout + done.stderr


def test_whatever_is_killed_or_damaged_the_newest_whole_state_comes_back(seed: int) -> None:
    status, lines, printed = campaigns("--campaigns", "6", "--seed", str(seed))
    assert len(lines) == 6, printed
    wrong = {line["seed"]: line["verdict"] for line in lines if line["verdict"].startswith("wrong")}
    assert (status, wrong) == (0, {}), printed


def test_every_planted_bug_is_caught() -> None:
    status, lines, printed = campaigns("--planted", "20", "--seed", "1")
    assert {line["plant"] for line in lines} >= {"no-digests", "stale-bytes", "hasty-commit", "newest-pruned"}
    assert [line for line in lines if line["caught"] is None] == [], printed
    assert status == 0, printed
