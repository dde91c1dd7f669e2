"""A job that is killed anywhere in a save goes on from a whole copy, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS
from tests.support.saved_steps import SCRIPT, killed, made, ran, said, steps_of, verified


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("sound", 7),
        pytest.param("sound", 1, marks=pytest.mark.long),
        pytest.param("damaged", 1, marks=pytest.mark.long),
    ],
)
def test_a_kill_before_any_change_on_disk_leaves_a_whole_checkpoint(
    kind: str, every: int, tmp_path: Path
) -> None:
    """One rank restores (and quarantines), saves and prunes; it is killed at each point in turn."""
    done = warm.run([SCRIPTS / "dying.py", tmp_path, kind, str(every)], 280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [], done.stderr
    assert found["changes"] > 20
    operations = found["operations"]
    commit = operations.index("rename", operations.index("fsync"))  # after a quarantine there is one before
    assert "fsync" in operations[:commit], "what the copy holds is on disk before it has its name"
    assert "fsync" in operations[commit:], "and so is the name before the older copies go"


@pytest.mark.long
@pytest.mark.parametrize("async_save", [False, True], ids=["waits", "trains on"])
def test_a_job_that_is_killed_again_and_again_goes_on_bit_for_bit(
    tmp_path: Path, async_save: bool, seed: int
) -> None:
    """Every step is saved, so SIGKILL falls into a save more likely than not."""
    steps = list(range(1, 41))
    whole = made(tmp_path / "whole", *steps)
    run, draw = tmp_path / "run", random.Random(seed)
    words = [
        str(SCRIPT),
        str(run),
        f"save={','.join(map(str, steps))}",
        f"async_save={json.dumps(async_save)}",
    ]
    reached = 0
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-u", *words], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            (first,) = said(process.stdout.readline())
            assert first["restored"] >= reached, "what was said to be on disk is loaded"
            assert first["content"] == whole.get(first["restored"], first["content"])
            for _ in range(draw.randrange(1, 10)):
                (line,) = said(process.stdout.readline())
                assert (line["content"], line["saved"]) == (whole[line["step"]], True)
                reached = line["step"]
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE)
    last = ran(*words[1:])[-1]
    assert (last["step"], last["content"]) == (steps[-1], whole[steps[-1]])
    assert verified(run) == 0
    assert {path.name[:5] for path in (run / "checkpoints").iterdir()} == {"step-"}


def test_what_a_save_has_waited_for_is_on_disk_when_the_job_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lines = killed(run, "save=3", "die=3", async_save=True)
    assert (lines[-1]["step"], lines[-1]["saved"]) == (3, True)
    assert 3 in steps_of(run)
    assert verified(run) == 0
    (again,) = ran(run)
    assert (again["restored"], again["content"]) == (3, lines[-1]["content"])
