"""A rank that has returned from its resilient function, while another one does not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.launching import Run, running, until
from tests.support.reentering import faults_seen, processes, reentering, told

pytestmark = pytest.mark.long
OFF = 'rank_heartbeat_timeout = inf\nrank_section_timeouts = { "outlast.finishing" = inf }\n'
SOON = 'rank_section_timeouts = { "outlast.finishing" = 15.0 }\n'
PATIENCE = 10.0  # seconds at the barrier, also of a busy machine; less than a rank may be silent


def returning(folder: Path, fault: str, limits: str = "", patience: float = 1.0) -> Run:
    """Return a run of two ranks that log after so many seconds why they wait for the other one.

    They also wait no longer at the barrier for a restart.
    """
    config = folder / "outlast.toml"
    config.write_text(f"[fault_tolerance]\n{limits}[inprocess_restart]\nbarrier_timeout = {patience}\n")
    return reentering(folder, fault, options=("--config", str(config)), ranks=2)


def waits(run: Run, patience: float = 1.0) -> bool:
    """Say whether the console has that rank 0 has waited for so many seconds."""
    return bool(re.search(rf"\brank 0\b.* {patience:g} s\b", run.console()))


@pytest.mark.parametrize("what", ["sleep", "SIGSTOP"])
def test_a_rank_that_hangs_after_its_session_is_found_and_the_one_that_returned_trains_again(
    tmp_path: Path, what: str
) -> None:
    with running(returning(tmp_path, f"{what}@1@end@1", SOON, PATIENCE)) as run:
        assert run.finish() == 0, run.console()
    assert waits(run, PATIENCE)
    assert faults_seen(run) == [("hang", 1)]
    assert processes(tmp_path, 1)[0] == processes(tmp_path, 2)[0]
    assert len({one["digest"] for one in told(tmp_path, "done")}) == 1


def test_without_hang_detection_the_rank_waits_and_a_signal_ends_the_job(tmp_path: Path) -> None:
    with running(returning(tmp_path, "sleep@1@end@1", OFF)) as run:
        until(lambda: waits(run), "the reason of the wait")
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM, run.console()
    assert run.records("fault_seen") == []


def test_while_the_agent_is_stopped_the_ranks_wait_and_log_it_and_then_the_job_ends_well(
    tmp_path: Path,
) -> None:
    with running(returning(tmp_path, "hold@1@5@1")) as run:
        until(lambda: list(told(tmp_path, "fault")), "a rank to wait in its function")
        assert run.process is not None
        os.kill(run.process.pid, signal.SIGSTOP)
        (tmp_path / "trace" / "go").touch()
        logs = run.folder / "logs" / "gen-0001"
        pid = f"(pid {run.process.pid})"
        until(lambda: all(pid in one.read_text() for one in logs.glob("rank-*/stderr.log")), pid)
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []
