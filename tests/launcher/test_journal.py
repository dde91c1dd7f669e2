"""What the launcher writes into the event log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.journal import Journal
from outlast.launcher.output.file_thread import FileThread
from outlast.observe.recorder import read
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import Progress, StepSource


class AtOnce:
    """Carries out what is handed to it."""

    def hand(self, done: Callable[[], object], *_: object) -> None:
        done()


def journal(root: Path) -> Journal:
    return Journal(RunFolder(root), "n0", cast(LaunchOptions, None), "run", cast(FileThread, AtOnce()))


@pytest.mark.parametrize("step", [-1, 0, 9])
@pytest.mark.parametrize("ago", [-60.0, 0.0, 5.0, math.inf])
def test_the_last_step_has_its_own_time_and_is_behind_the_first_one(
    tmp_path: Path, step: int, ago: float
) -> None:
    written, begun, path = journal(tmp_path), time.monotonic(), tmp_path / "events.jsonl"
    written.last_step(step, StepSource.COUNTED, 0.0 if ago == math.inf else begun - ago)
    found = read(path).records if path.exists() else ()
    assert len(found) == (step >= 0 and ago < math.inf)
    for one in found:
        assert one.clock == begun - ago if ago >= 0 else begun <= one.clock <= time.monotonic()
        assert (isinstance(one, Progress) and one.step) == step
    written.announced(3, False)
    written.last_step(9, StepSource.ANNOUNCED, begun)
    first, last = read(path).records[-2:]
    assert isinstance(first, Progress)
    assert isinstance(last, Progress)
    assert (first.step, last.step, first.clock <= last.clock) == (3, 9, True)
