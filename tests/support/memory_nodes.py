"""One node: a memory folder with a real saver, the durable folder that they fill, and what was recorded."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage
from outlast.config import CheckpointOptions
from outlast.recovery.policy.events import Loaded, Record
from tests.support.jobs import DEADLINE, Job, saver_process, saving
from tests.support.launching import until


class Node:
    """A memory folder with its saver, and the durable folder that they fill."""

    def __init__(self, tmp_path: Path) -> None:
        self.durable = tmp_path / "checkpoints"
        self.events = tmp_path / "events.jsonl"
        self.memory = MemoryFolder(tmp_path / "memory")
        self.stage = Stage(self.memory.root)
        self.records: list[Record] = []
        self.saver = saver_process(self.memory.root, self.events)

    def join(
        self, job: Job, generation: int = 1, avoid: tuple[str, ...] = (), **settings: Any
    ) -> Checkpointer:
        """Restore into a job as a new generation; return what to save with."""
        wanted = CheckpointOptions(timeout=DEADLINE, **{"max_failed_seconds": 0.0, **settings})
        found = saving(
            self.durable,
            self.memory,
            self.saver.ensure,
            generation=generation,
            records=self.records,
            settings=wanted,
        )
        found.restore(job.state, avoid)
        return found

    def loaded(self) -> Loaded:
        return [record for record in self.records if isinstance(record, Loaded)][-1]

    def in_memory(self, step: int, generation: int = 1) -> Path:
        """Wait until a step is in the memory tier; return its folder."""
        folder = self.stage.tier.folder / copy_name(step, generation)
        until(folder.exists, f"{folder}")
        return folder

    def logged(self, kind: str) -> list[dict[str, Any]]:
        text = self.events.read_text() if self.events.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be on its way
        return [one for one in map(json.loads, lines) if one["kind"] == kind]

    def cut_off(self, *savers: Checkpointer) -> None:
        """End the owner; wait until the saver has finished and gone."""
        for saver in savers:
            saver.settle()
        self.saver.hang_up()
        until(self.saver.ended, "the end of the saver")


def train_and_save(
    saver: Checkpointer, job: Job, steps: range, durable: Callable[[int], bool]
) -> dict[int, bytes]:
    content = {}
    for step in steps:
        job.train()
        assert saver.stage(Order(step, durable(step), "a test"), job.state), step
        content[step] = job.content()
    return content


def remove(folder: Path) -> None:
    """Remove a folder in which others are at work meanwhile."""

    def gone() -> bool:
        with contextlib.suppress(OSError):  # something came or went under our hands
            shutil.rmtree(folder)
        return not folder.exists()

    until(gone, f"the end of {folder}")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
