"""In-process restart: a training function is left on a fault and entered again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.inprocess.worker.interrupt import Restart
    from outlast.inprocess.worker.reentry import CallWrapper, resilient

__all__ = [
    "CallWrapper",
    "Restart",
    "resilient",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "CallWrapper": "outlast.inprocess.worker.reentry",
        "Restart": "outlast.inprocess.worker.interrupt",
        "resilient": "outlast.inprocess.worker.reentry",
    },
)
