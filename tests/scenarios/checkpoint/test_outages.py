"""The disk of a job errors for a while: saves are lost, training goes on, and nothing else is."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.faulty import needs_fuse, with_faults
from tests.support.launching import DEADLINE, Run, is_gone, running, until
from tests.support.saved_steps import name_of

STEPS = 40
ALONE = """
import os, signal, sys, time
import torch, outlast
from pathlib import Path

run, switch, out = map(Path, sys.argv[1:])
dies = not out.exists()
model = torch.nn.Linear(8, 8)
options = outlast.CheckpointOptions(non_persistent_save_interval=1, timeout=20)
with outlast.start(run, save_interval=2, checkpoints=options) as session:
    begun = session.restore(model=model)
    for step in session.steps(40):
        if step == 8 and dies:
            switch.with_suffix(".new").write_text("ENOSPC")
            switch.with_suffix(".new").rename(switch)
        elif step == 12 and dies:
            out.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        elif step == 20:
            switch.unlink()
        time.sleep(0.05)
out.write_text(str(begun))
"""
SCRIPT = """
import os, sys, time
import torch, outlast
from pathlib import Path

switch, kind, first, last = Path(sys.argv[1]), *sys.argv[2:]
model = torch.nn.Linear(8, 8)
options = outlast.CheckpointOptions(non_persistent_save_interval=1)
with outlast.start(save_interval=2, checkpoints=options) as session:
    session.restore(model=model)
    for step in session.steps(STEPS):
        if step == int(first) and not switch.with_suffix(".was").exists():
            switch.with_suffix(".was").touch()
            switch.with_suffix(".new").write_text(kind)
            switch.with_suffix(".new").rename(switch)
        elif step == int(last):
            switch.unlink(missing_ok=True)
        time.sleep(0.05)
""".replace("STEPS", str(STEPS))


@needs_fuse
@pytest.mark.parametrize(
    "kind", ["EIO", *(pytest.param(one, marks=pytest.mark.long) for one in ("ENOSPC", "hang"))]
)
def test_an_outage_of_the_disk_is_waited_out(tmp_path: Path, kind: str) -> None:
    """It takes 12 saves, or lasts from shortly before the end until the ranks have ended."""
    for name, first, last in (("within", 8, 32), ("end", 36, STEPS)):
        folder = tmp_path / name
        behind, mounted, switch = folder / "behind", folder / "run", folder / "outage"
        behind.mkdir(parents=True)
        mounted.mkdir()
        script = folder / "script.py"
        script.write_text(SCRIPT)
        run = Run(mounted, str(script), str(switch), kind, str(first), str(last))
        run.command = with_faults(run.command, behind, mounted, switch)
        with running(run):
            run.folder = behind  # as this process sees it
            rank = run.pids()[0]
            if kind == "hang":  # saves wait for it, and so do the ranks in the end
                run.until(switch.exists)
                shown = len(run.console())
                until(lambda run=run, at=shown: str(mounted) in run.console()[at:], run.console)  # noqa: B023
                switch.unlink()
            elif name == "end":
                until(lambda rank=rank: is_gone(rank), run.console)
                switch.unlink()
            assert run.finish() == 0, run.console()
        (started,) = run.records("generation_started")
        assert started["generation"] == 1
        assert run.records("fault_seen") == []
        assert name_of(STEPS, 1) in os.listdir(behind / "checkpoints")
        if name == "within" and kind != "hang":  # nor are the records of the outage in the log
            assert not {one["step"] for one in run.records("saved")} & set(range(12, 30))


@pytest.mark.long
@needs_fuse
def test_a_restart_in_an_outage_waits_for_the_disk(tmp_path: Path) -> None:
    behind, mounted, switch = tmp_path / "behind", tmp_path / "run", tmp_path / "outage"
    behind.mkdir()
    mounted.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = Run(mounted, str(script), str(switch), "EIO", "8", str(STEPS))
    run.command = with_faults(run.command, behind, mounted, switch)
    with running(run):
        assert run.process is not None
        process, run.folder = run.process, behind
        (rank,) = run.pids()
        run.until(switch.exists)
        os.kill(rank, signal.SIGKILL)
        run.until(lambda: "restart-in-job" in run.console())
        tried = time.monotonic() + 1.5  # the logs of the next generation cannot be made at first
        until(lambda: time.monotonic() > tried or process.poll() is not None, run.console)
        switch.unlink()
        assert run.finish() == 0, run.console()
    assert name_of(STEPS, 2) in os.listdir(behind / "checkpoints")


@needs_fuse
def test_a_writer_that_waits_for_room_ends_where_the_next_start_has_its_own(tmp_path: Path) -> None:
    """A script without a launcher dies while the disk of its checkpoints is full, and is started again."""
    behind, mounted, switch = tmp_path / "behind", tmp_path / "mounted", tmp_path / "outage"
    behind.mkdir()
    mounted.mkdir()
    script, out, run = tmp_path / "script.py", tmp_path / "begun", tmp_path / "run"
    script.write_text(ALONE)
    run.mkdir()
    (run / "checkpoints").symlink_to(mounted)
    words = [shlex.join([sys.executable, str(script), str(run), str(switch), str(out)])] * 2
    command = with_faults(["sh", "-c", "; ".join(words)], behind, mounted, switch)
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert int(out.read_text()) >= 11
    assert max(int(name[5:14]) for name in os.listdir(behind) if name.startswith("step-")) > 20
