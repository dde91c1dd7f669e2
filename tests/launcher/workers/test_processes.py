"""Workers as the agent holds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from outlast.ipc.processes import children_of, tree_of
from outlast.launcher.workers.processes import (
    Reaper,
    adopt,
    kill_adopted,
    kill_all,
    kill_strays,
    signal_worker,
    wait_for_end,
)
from tests.support.launching import is_gone, until


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


FAMILY = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); sys.stdin.read()"


def test_a_tree_is_a_process_with_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE) as parent:
        (below,) = until(lambda: list(children_of(parent.pid)), "a child of the child")
        assert tree_of(parent.pid) == {parent.pid, below}
        assert tree_of(os.getpid()) >= {os.getpid(), parent.pid, below}
        os.kill(below, signal.SIGKILL)
    assert tree_of(parent.pid) == {parent.pid}


def test_of_some_processes_only_children_are_killed() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child, subprocess.Popen(["sleep", "1000"]) as other:
        kill_adopted(())
        kill_adopted({child.pid, os.getppid()})
        assert child.wait(60.0) == -signal.SIGKILL
        assert other.poll() is None
        assert kill_strays(set(children_of(os.getpid())) - {other.pid}) == {other.pid}
        assert other.wait(60.0) == -signal.SIGKILL
