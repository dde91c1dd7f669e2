"""A rank that cannot go on waits for a notice; children that end meanwhile raise nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from outlast import settings
from outlast.config import PreemptionOptions
from outlast.preemption import worker
from outlast.preemption.worker import PreemptionHandler

REASON = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated."


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Have a child that ends raise in the main thread, as torch does for a worker of a DataLoader."""

    def torchs(number: int, frame: object) -> None:
        del number, frame
        raise RuntimeError("DataLoader worker (pid 8) exited unexpectedly")

    before = signal.signal(signal.SIGCHLD, torchs)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_child_that_ends_while_a_broken_rank_waits_for_a_notice_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_SKEW", 5.0)  # the child ends within the wait on a loaded host, too
    handler = PreemptionHandler(PreemptionOptions(), settings.worker_context())
    child = os.fork()
    if child == 0:
        time.sleep(0.3)  # its end comes in the wait
        os._exit(1)
    ours = signal.getsignal(signal.SIGCHLD)
    handler.broken(REASON)
    assert signal.getsignal(signal.SIGCHLD) is ours
    assert os.waitpid(child, 0)[1]
