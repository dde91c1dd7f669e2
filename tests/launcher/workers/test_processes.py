"""Workers as the agent holds them."""

from __future__ import annotations

import os
import signal

from outlast.launcher.workers.processes import Reaper, adopt, kill_all, signal_worker, wait_for_end
from tests.support.launching import is_gone


def ended_with(code: int) -> int:
    """Return the pid of a child that has ended and was not waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_a_worker_that_ended_and_was_reaped_before_the_agent_heard_of_it_has_ended() -> None:
    reaper, pid = Reaper(), ended_with(3)
    reaper.collect()
    assert is_gone(pid)
    (worker,) = adopt({7: pid})
    assert (worker.rank, worker.pid, worker.exit_code) == (7, pid, None)
    assert wait_for_end([worker], 60.0) == []
    signal_worker(worker, signal.SIGTERM)
    assert kill_all([worker], reaper) == []
    assert worker.exit_code == 3


def test_a_worker_that_ended_and_was_not_reaped_has_ended() -> None:
    reaper = Reaper()
    (worker,) = adopt({0: ended_with(4)})
    assert wait_for_end([worker], 60.0) == []
    signal_worker(worker, signal.SIGTERM)
    assert kill_all([worker], reaper) == []
    assert worker.exit_code == 4
