"""Workers that are forked ahead: what a restart gets of them; none outlives its zygote or its agent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faulty import needs_fuse, with_faults
from tests.support.launching import Run, is_gone, running, until
from tests.support.processes import children_of

WORLD = 2
SCRIPT = """
import os, sys, time
import torch
said = "first"
name = f"{os.environ['OUTLAST_GENERATION']}-{os.environ['RANK']}"
with open(f"{sys.argv[1]}/.{name}", "w") as file:
    file.write(f"{said} {os.environ['RANK']} {torch.initial_seed()} {1 is 1}")
os.rename(f"{sys.argv[1]}/.{name}", f"{sys.argv[1]}/{name}")
while True:
    time.sleep(0.1)
"""
WARNING = 'SyntaxWarning: "is" with'


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A job whose ranks wait, with standbys."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ("--nproc-per-node", str(WORLD), "--max-restarts", "3")
    run = Run(tmp_path / "run", str(script), str(tmp_path), options=options, cold=True)
    with running(run):
        yield run


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def standbys(run: Run) -> dict[int, int]:
    """Return standbys and the zygotes that have forked them."""
    assert run.process is not None
    children = set(children_of(run.process.pid))
    groups = {pid: group_of(pid) for pid in children}
    return {pid: group for pid, group in groups.items() if group in children - {pid} and not is_gone(pid)}


def waiting(run: Run) -> dict[int, int]:
    """Wait until there are as many standbys as ranks, and their ranks have begun."""
    folder, number = run.folder.parent, max(one["generation"] for one in run.records("generation_started"))
    run.until(lambda: len(list(folder.glob(f"{number}-*"))) == WORLD)
    return run.until(lambda: found if len(found := standbys(run)) == WORLD else {})


def said(run: Run, generation: int) -> list[list[str]]:
    paths = [run.folder.parent / f"{generation}-{rank}" for rank in range(WORLD)]
    return [path.read_text().split() for path in paths]


def test_a_restart_takes_them_and_none_outlives_its_zygote_or_its_agent(run: Run) -> None:
    first = run.pids(1)
    ahead = waiting(run)
    os.kill(first[0], signal.SIGKILL)
    assert set(run.pids(2)) == set(ahead)
    following = waiting(run)
    assert not set(following) & set(ahead)
    (one, other), before = said(run, 2), said(run, 1)
    assert (one[1], other[1]) == ("0", "1")
    assert len({line[2] for line in (one, other, *before)}) == 2 * WORLD, "each has seeds of its own"
    run.until(lambda: run.console().count(WARNING) >= 2 * WORLD)
    assert run.console().count(WARNING) == 2 * WORLD, "of ranks, and of no standby"

    killed, left = following
    os.kill(killed, signal.SIGKILL)
    until(lambda: is_gone(killed), run.console)
    os.kill(run.pids(2)[1], signal.SIGKILL)
    third = run.pids(3)
    assert (left in third, killed in third, len(third)) == (True, False, WORLD), "one was forked on demand"

    ahead = waiting(run)
    os.kill(next(iter(ahead.values())), signal.SIGKILL)
    until(lambda: all(map(is_gone, ahead)), run.console)
    following = waiting(run)
    assert not set(following) & set(ahead), "they end with their zygote, and the next one has its own"
    run.stop()
    until(lambda: all(map(is_gone, following)), run.console)


HANGS = """
import os, sys, time
import torch
if os.environ["OUTLAST_GENERATION"] == "1":
    open(sys.argv[1], "w").close()
    time.sleep(600)
"""


@needs_fuse
def test_a_restart_takes_one_that_cannot_read_the_script_yet(tmp_path: Path) -> None:
    """The rank has its file system hang, before a standby is forked."""
    behind, mounted, switch = (tmp_path / name for name in ("behind", "mounted", "hangs"))
    behind.mkdir()
    mounted.mkdir()
    (behind / "script.py").write_text(HANGS)
    run = Run(tmp_path / "run", str(mounted / "script.py"), str(switch))
    run.command = with_faults(run.command, behind, mounted, switch)
    seen: dict[int, float] = {}

    def waits() -> list[int]:
        """Return the standby; a host of a store is in its place for a moment."""
        now = time.monotonic()
        return [pid for pid in standbys(run) if now > seen.setdefault(pid, now) + 0.3]

    with running(run):
        try:
            (rank,) = run.pids(1)
            run.until(switch.exists)
            (standby,) = run.until(waits)
            os.kill(rank, signal.SIGKILL)
            assert run.pids(2) == [standby]
        finally:
            switch.unlink(missing_ok=True)
        assert run.finish() == 0, run.console()


@pytest.mark.long
def test_a_script_that_was_changed_meanwhile_runs_as_it_is(run: Run, tmp_path: Path) -> None:
    first = run.pids(1)
    waiting(run)
    (tmp_path / "script.py").write_text(SCRIPT.replace('"first"', '"second"'))
    os.kill(first[0], signal.SIGKILL)
    run.pids(2)
    waiting(run)
    assert [line[0] for line in said(run, 2)] == ["second"] * WORLD
