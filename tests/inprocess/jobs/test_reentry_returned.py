"""A rank that has returned from its resilient function, while another one does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.inprocess.jobs.test_reentry import processes, told
from tests.support.launching import Run, running, until

STILL_INSIDE = "rank 0 returned 1 s ago and waits: other ranks of this node have not returned"
OFF = 'rank_heartbeat_timeout = inf\nrank_section_timeouts = { "outlast.finishing" = inf }\n'


def returning(folder: Path, *faults: str, limits: str = "") -> Run:
    """Return a run of two ranks that say after a second why they wait for the other one."""
    config = folder / "outlast.toml"
    config.write_text(f"[fault_tolerance]\n{limits}[inprocess_restart]\nbarrier_timeout = 1.0\n")
    options = ("--nproc-per-node", "2", "--config", str(config))
    return Run(folder / "run", "reentering.py", str(folder / "trace"), "12", "5", *faults, options=options)


@pytest.mark.parametrize("what", ["sleep", "SIGSTOP"])
def test_a_rank_that_hangs_after_its_session_is_found_and_the_one_that_returned_trains_again(
    tmp_path: Path, what: str
) -> None:
    limits = 'rank_section_timeouts = { "outlast.finishing" = 6.0 }\n'
    with running(returning(tmp_path, f"{what}@1@end@1", limits=limits)) as run:
        assert run.finish() == 0, run.console()
    assert STILL_INSIDE in run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("hang", 1)
    assert processes(tmp_path, 1)[0] == processes(tmp_path, 2)[0]
    assert len({one["digest"] for one in told(tmp_path, "done")}) == 1


def test_without_hang_detection_the_rank_says_why_it_waits_and_a_signal_ends_the_job(tmp_path: Path) -> None:
    with running(returning(tmp_path, "sleep@1@end@1", limits=OFF)) as run:
        until(lambda: STILL_INSIDE in run.console(), "the reason of the wait")
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.console()
    assert run.records("fault_seen") == []


def test_while_the_agent_is_stopped_the_ranks_wait_and_say_so_and_then_the_job_ends_well(
    tmp_path: Path,
) -> None:
    with running(returning(tmp_path, "hold@1@5@1")) as run:
        until(lambda: list(told(tmp_path, "fault")), "a rank to wait in its function")
        assert run.process is not None
        os.kill(run.process.pid, signal.SIGSTOP)
        (tmp_path / "trace" / "go").touch()
        logs = run.folder / "logs" / "gen-0001"
        words = f"the launcher (pid {run.process.pid}) is stopped"
        until(lambda: all(words in one.read_text() for one in logs.glob("rank-*/stderr.log")), words)
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []
