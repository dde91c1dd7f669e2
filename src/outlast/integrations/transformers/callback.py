"""A callback of Transformers' Trainer that reports its steps, saves and evaluations to ``outlast run``."""

from __future__ import annotations

import importlib
from typing import Any

from outlast.integrations.announcing import AnnouncedLoop, require

OLDEST = (5, 0)
require("transformers", OLDEST, "outlast.integrations.transformers")
_Callback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback


class OutlastCallback(_Callback):  # type: ignore[misc]
    """Reports ``state.global_step`` and the Trainer's checkpoints; inert outside of ``outlast run``.

    When the job is told to end, all ranks save and stop after the same step, and the process exits with 75.
    """

    def __init__(self) -> None:
        self._loop = AnnouncedLoop("OutlastCallback")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - theirs
        """Begin to report at the step that was resumed from."""
        self._loop.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - theirs
        """Report an optimizer step; save and stop where all ranks have agreed to."""
        self._loop.step_done(state.global_step)
        if self._loop.should_save:
            control.should_save = True
        if self._loop.should_stop:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - theirs
        """Report a checkpoint of the Trainer."""
        self._loop.saved(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - theirs
        """Report that an evaluation goes on."""
        self._loop.enter_section("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - theirs
        """End the section of an evaluation."""
        self._loop.leave_section()

    on_predict = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - theirs
        """End the report; with exit code 75 where the job is given back."""
        self._loop.end()
