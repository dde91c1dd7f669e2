"""The system's clock is set back while checkpoints are saved: what counts is the step, never the time."""

from __future__ import annotations

from pathlib import Path

from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.policy.manifest import copy_name
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import SoloExchange, SystemClock
from outlast.recovery.policy.events import Pruned, Record
from tests.support.jobs import DEADLINE, Job, checkpointer
from tests.support.ranks import copies

HOUR = 3600.0


class SetBack(SystemClock):
    """The clock port of a host whose wall time somebody changes."""

    shift = 0.0

    def wall(self) -> float:
        return super().wall() + self.shift


def test_nothing_newer_is_pruned_and_the_newest_step_stays_the_newest(tmp_path: Path) -> None:
    folder, clock, records = tmp_path / "checkpoints", SetBack(), list[Record]()
    job, content = Job(0), dict[int, bytes]()
    settings = CheckpointOptions(timeout=DEADLINE, keep_last_n=2)
    saver = Checkpointer(folder, Identity("run-a", 1, 0, 1), SoloExchange(), settings, clock, records.append)
    for step in range(1, 9):
        clock.shift = -HOUR if step >= 4 else 0.0
        job.train()
        assert saver.save(step, job.state, "a test")
        content[step] = job.content()
        assert copies(tmp_path) == list(range(max(1, step - 1), step + 1))
    pruned = [one.checkpoint for one in records if isinstance(one, Pruned)]
    assert pruned == [copy_name(step, 1) for step in range(1, 7)]
    other = Job(5)
    restored = checkpointer(folder, generation=2).restore(other.state)
    assert restored is not None
    assert restored.step == 8
    assert other.content() == content[8]
