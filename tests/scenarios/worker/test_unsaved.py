"""What a checkpoint does not hold is named once, where it matters; ordinary scripts hear nothing."""

from __future__ import annotations

from pathlib import Path

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS

SILENT = ("plain", "many", "rotary", "unfrozen-by-step", "unfrozen-after", "validating", "tensors")
AT_EACH_START = {
    "model-left-out": ("optimizer", "6"),
    "head-left-out": ("optimizer", "4", "6"),
    "queue": ("model.queue", "model.rebound"),
}
AFTER_A_LOAD = {
    "unfrozen-once": ("model.0.weight", "model.0.bias"),
    "batch-norm-switched-off": ("model.1",),
}


def heard(folder: Path, steps: int) -> tuple[dict[str, list[str]], str]:
    """Return the warnings of each kind of script, and the output."""
    done = warm.run([SCRIPTS / "unsaved.py", folder], DEADLINE, {"STEPS": str(steps)})
    assert done.returncode == 0, done.stderr
    parts = [part.splitlines() for part in done.stderr.split("== ")[1:]]
    return {name: lines for name, *lines in parts}, done.stdout


def test_what_a_checkpoint_does_not_hold_is_named_once(tmp_path: Path) -> None:
    first, _ = heard(tmp_path / "run", 4)
    again, output = heard(tmp_path / "run", 8)
    assert [line.split()[1] for line in output.splitlines()] == ["4"] * len(again)
    expected = dict.fromkeys((*SILENT, *AFTER_A_LOAD), ()) | AT_EACH_START
    for found, wanted in ((first, expected), (again, expected | AFTER_A_LOAD)):
        assert found.keys() == wanted.keys()
        for name, lines in found.items():
            assert len(lines) == bool(wanted[name]), (name, lines)
            assert all(word in line for line in lines for word in wanted[name]), (name, lines)
