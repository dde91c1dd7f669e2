"""Loops of frameworks that do not learn the step from a session that is restored within them."""

from __future__ import annotations

import sys
from types import FrameType

from outlast.errors import UsageError

_LIGHTNING = (
    "Lightning's Trainer would begin its data again and train on samples that it has seen; use"
    ' trainer.fit(..., ckpt_path="last") with ModelCheckpoint(save_last=True), and no session'
)
_LOOPS = {
    ("transformers.trainer", "_inner_training_loop"): (
        "Transformers' Trainer would begin its data again and train on samples that it has seen; use"
        " outlast.integrations.transformers.OutlastTrainer and"
        ' trainer.train(resume_from_checkpoint="outlast")'
    ),
    ("lightning.pytorch.trainer.trainer", "_run"): _LIGHTNING,
    ("pytorch_lightning.trainer.trainer", "_run"): _LIGHTNING,
}


def refuse() -> None:
    """Raise if the caller was called by such a loop, for example by a callback.

    Raises:
        UsageError: it was; the message says what to use instead.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _LOOPS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if found is not None:
            raise UsageError(f"session.restore: called within a loop that cannot go on from it: {found}")
        frame = frame.f_back
