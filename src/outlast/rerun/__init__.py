"""The rerun state machine: where a rejected result comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.rerun.worker.data import RerunDataIterator
    from outlast.rerun.worker.rerun import RerunStateMachine, ResultRejected

__all__ = [
    "RerunDataIterator",
    "RerunStateMachine",
    "ResultRejected",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "RerunDataIterator": "outlast.rerun.worker.data",
        "RerunStateMachine": "outlast.rerun.worker.rerun",
        "ResultRejected": "outlast.rerun.worker.rerun",
    },
)
