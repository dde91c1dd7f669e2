"""Signals to a launcher, and ends of it, at moments that are easily missed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.launching import Run, is_gone, running, runtime_folders, until
from tests.support.processes import children_of, command_line, listening

WAITING = "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"

IGNORES = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


def waiting(folder: Path) -> Run:
    """Return a job of one rank, which ends with 0 as soon as there is a file ``go``."""
    words = ("-c", WAITING, str(folder / "go"))
    return Run(folder / "run", sys.executable, *words, options=("--no-python",))


def cleaner_of(agent: int) -> int:
    """Return the fork of a launcher that cleans up after it."""
    return next(pid for pid in children_of(agent) if command_line(pid) == command_line(agent))


def catches(pid: int, number: int) -> bool:
    """Say whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_does_not_change_the_exit_code_of_a_job_that_is_over(tmp_path: Path, number: int) -> None:
    with running(waiting(tmp_path)) as run:
        run.pids()
        agent = run.process.pid
        cleaner = cleaner_of(agent)
        os.kill(cleaner, signal.SIGSTOP)  # which holds nobody up
        (tmp_path / "go").touch()
        until(lambda: not catches(agent, number), "the launcher to have heard the last signal")
        os.kill(agent, number)
        assert run.finish() == 0, run.console()
    assert is_gone(cleaner)
    assert runtime_folders(agent) == []


def test_a_rank_does_not_ignore_what_a_shell_ignored_for_a_job_in_the_background(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal; assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL")
    run = Run(tmp_path / "run", str(script))
    run.command[:0] = ["sh", "-c", "trap '' QUIT; exec \"$@\"", "sh"]
    with running(run):
        assert run.finish() == 0, run.console()


def test_a_launcher_whose_parent_ignores_the_end_of_children_learns_how_ranks_end(tmp_path: Path) -> None:
    options = ("--no-python", "--max-restarts=0")
    run = Run(tmp_path / "run", sys.executable, "-c", "raise SystemExit(7)", options=options)
    run.command[:0] = [sys.executable, "-c", IGNORES]
    with running(run):
        assert run.finish() == 1, run.console()
    assert "7" in run.records("fault_seen")[0]["signature"]


def test_a_hangup_does_not_end_a_job_under_nohup(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    run.command[:0] = ["nohup"]
    with running(run):
        run.pids()
        run.process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert run.finish() == 0, run.console()
    assert run.console().count("SIGHUP") == 1


@pytest.mark.skipif(
    os.path.exists("/dev/nvidia0"), reason="nvidia-smi is not asked where the kernel shows GPUs"
)
@pytest.mark.leaves("/bin/sleep 60")  # where the signal comes before Popen has returned
def test_ctrl_c_before_anything_runs_is_told_in_one_line(tmp_path: Path) -> None:
    asked, program = tmp_path / "asked", tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n: > {asked}\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    run = Run(tmp_path / "run", "train.py", options=("--nproc-per-node", "gpu"))
    with running(run, PATH=f"{tmp_path}:{os.environ['PATH']}"):
        until(asked.exists, "the launcher to count GPUs")
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.console()
    (line,) = run.console().splitlines()
    assert "SIGINT" in line


OUTLIVES = """
import os, signal, sys, time, torch
from pathlib import Path
here, memory = Path(sys.argv[1]), Path("/dev/shm")
if os.environ["OUTLAST_GENERATION"] == "1":
    while not (here / "go").exists():
        time.sleep(0.01)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / "began").touch()
while any(memory.glob("outlast-memory-*")):
    time.sleep(0.001)
(here / "outlived").touch()
"""


def test_ranks_that_are_still_to_be_forked_at_a_signal_end_before_the_checkpoint_writer(
    tmp_path: Path,
) -> None:
    """What forks them is stopped until the launcher has the signal, and the writer a little longer."""
    script = tmp_path / "script.py"
    script.write_text(OUTLIVES)
    options = ("--nproc-per-node=1", "--ft-workers-stop-timeout=1")
    with running(Run(tmp_path / "run", str(script), str(tmp_path), options=options)) as run:
        (rank,) = run.pids()
        agent, program = run.process.pid, command_line(rank)
        run.until(lambda: sum(bool(listening(pid)) for pid in children_of(agent)) == 2, "the next store")
        others = {pid: command_line(pid) for pid in children_of(agent) if pid != rank}
        (writer,) = (pid for pid, line in others.items() if "checkpoint.writer" in line)
        forks = [pid for pid, line in others.items() if line == program]
        for pid in (writer, *forks):
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        run.until(lambda: run.records("action_taken"), "the restart")
        run.process.send_signal(signal.SIGTERM)
        for pid in forks:
            with contextlib.suppress(ProcessLookupError):  # the launcher has killed it
                os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(AssertionError):  # the rank may be killed before it begins
            until((tmp_path / "began").exists, "the rank", deadline=5.0)
        os.kill(writer, signal.SIGCONT)
        assert run.finish() == 143, run.console()
    assert not (tmp_path / "outlived").exists()
