"""A worker whose wait at the re-entry barrier is over leaves before its generation begins."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from outlast.cluster.policy.messages import Assignment
from outlast.inprocess.agent import Reentries
from outlast.launcher.workers.generation import Generation
from outlast.launcher.workers.processes import Worker
from tests.support.launching import until

WORKER = """
import signal, sys
from outlast.inprocess.barrier import INTERRUPT_SIGNAL, Line
signal.signal(INTERRUPT_SIGNAL, signal.SIG_IGN)
line = Line(sys.argv[1])
line.say({"say": "inside", "generation": 1, "patience": 30.0, "granularity": "rank"})
assert line.hear()["say"] == "interrupt"
line.say({"say": "unwinds", "generation": 1})
line.say({"say": "waits", "generation": 1})
sys.stdin.readline()
line.say({"say": "leaves", "generation": 1})
signal.pause()
"""


def test_a_worker_that_leaves_before_its_generation_begins_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "gate"
    ended: list[Worker] = []
    reentries = Reentries(
        path, lambda _: None, (ended.append, lambda one: one.send(signal.SIGKILL)), said.append
    )
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(path)], stdin=subprocess.PIPE)
    worker = Worker(0, process.pid)
    vacant: list[int] = []

    def generation(number: int) -> Generation:
        one = SimpleNamespace(number=number, ranks=range(1), living=lambda: [worker], pages={}, vacant=vacant)
        one.kept, one.vacate, one.seat = frozenset({0}), vacant.append, lambda _: {}
        return cast("Generation", one)

    def heard(condition: Any) -> bool:
        list(reentries.hear(time.monotonic(), False))
        return bool(condition())

    following = generation(2)
    try:
        until(lambda: heard(lambda: reentries.able(generation(1))), "the worker to be inside")
        order = Assignment(2, seated=True, reenter=True)
        kept, _ = reentries.begin(order, generation(1), None, time.monotonic())
        assert kept == {0: worker}
        until(lambda: heard(lambda: reentries.at_rest), "the worker to wait")
        assert process.stdin is not None
        process.stdin.close()
        until(lambda: heard(lambda: not reentries.at_rest), "the worker to leave")
        reentries.started(following, time.monotonic())
        until(lambda: reentries.tick(time.monotonic()) is following, "the rank to be vacant")
    finally:
        process.kill()
        process.wait()
        worker.close()
        reentries.close()
    assert vacant == [0]
    assert ended == [worker]
    assert reentries.at_rest
    assert len(said) == 1
