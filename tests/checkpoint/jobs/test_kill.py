from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from tests.support import warm

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "dying.py"


@pytest.mark.parametrize("kind", ["sound", "damaged"])
def test_a_kill_before_any_change_on_disk_leaves_a_whole_checkpoint(kind: str, tmp_path: Path) -> None:
    """One rank restores (and quarantines), saves and prunes; it is killed at each point in turn."""
    done = warm.run([SCRIPT, tmp_path, kind], 240, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [], done.stderr
    print(found["changes"], "changes;", *found["operations"])
    assert found["changes"] > 20
    # A commit and two removals, or a quarantine, a commit and one removal.
    assert found["operations"].count("rename") == 3
    # The manifest and COMMIT, each down to the disk, then their folder; the name; then the folder above.
    commit = "open write open write fsync fsync close close open fsync close rename open fsync close"
    assert commit in " ".join(found["operations"])
