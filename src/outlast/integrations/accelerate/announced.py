"""Scripts with accelerate: their steps and ``save_state`` reported to ``outlast run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outlast.errors import NoUsableCheckpoint
from outlast.fields import whole
from outlast.files import read_text
from outlast.integrations.announcing import AnnouncedLoop, SaveState, require

OLDEST = (1, 0)
_FILE = "outlast_step.json"
_MOST_BYTES = 1 << 12


def announce(accelerator: Any, optimizer: Any) -> AnnouncedLoop:
    """Report the steps of an optimizer, and the checkpoints of ``accelerator.save_state``.

    Call it on every rank, before ``load_state``. The steps are counted over all restarts: their number is
    written into the folder of a checkpoint. Outside of ``outlast run`` nothing happens.

    Args:
        accelerator: of the script.
        optimizer: what ``accelerator.prepare`` returned; with several, the one whose steps count.

    Returns:
        The loop: a context manager. The script saves where its ``should_save`` says so, and leaves its loop
        where its ``should_stop`` does.

    Raises:
        UsageError: accelerate is missing or too old.
    """
    require("accelerate", OLDEST, "outlast.integrations.accelerate")
    loop = AnnouncedLoop("accelerate")
    if not loop.active:
        return loop
    steps = _Steps(loop, accelerator)
    getattr(optimizer, "optimizer", optimizer).register_step_post_hook(steps.done)
    accelerator.register_save_state_pre_hook(steps.save)
    accelerator.register_load_state_pre_hook(steps.load)
    return loop


class _Steps:
    """The number of optimizer steps, over all restarts."""

    def __init__(self, loop: AnnouncedLoop, accelerator: Any) -> None:
        self._loop = loop
        self._accelerator = accelerator
        self._count = 0

    def done(self, *_: Any) -> None:
        self._count = self._loop.step_done(self._count + 1)

    def save(self, models: Any, weights: Any, folder: str) -> None:  # noqa: ARG002 - accelerate's
        if self._accelerator.is_main_process:
            (Path(folder) / _FILE).write_text(json.dumps({"step": self._count}))
        project = self._accelerator.project_configuration
        before = project.iteration

        def state() -> SaveState:  # project.iteration counts the saves that ended
            return SaveState.COMPLETED if project.iteration > before else SaveState.LOST

        self._loop.saved(self._count, state)

    def load(self, models: Any, folder: str) -> None:  # noqa: ARG002 - accelerate's
        path = Path(folder) / _FILE
        if path.exists():
            try:
                self._count = whole(json.loads(read_text(path, _MOST_BYTES))["step"], at_least=0)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise NoUsableCheckpoint(
                    f"{path}: an object with the number of completed steps expected, found {error}; nothing"
                    " was loaded; load another checkpoint"
                ) from error
