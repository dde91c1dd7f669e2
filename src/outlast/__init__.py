"""Keep distributed PyTorch training going through faults.

``import outlast`` does not import torch; :func:`start` does. Options are in :mod:`outlast.config`, all errors
in :mod:`outlast.errors`, names of other projects in :mod:`outlast.compat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily
from outlast._version import VERSION

if TYPE_CHECKING:
    from outlast.config import CheckpointOptions
    from outlast.errors import (
        CheckpointMismatch,
        NonFinite,
        NoUsableCheckpoint,
        OutlastError,
        SaveFailed,
        UsageError,
    )
    from outlast.inprocess.worker.reentry import resilient
    from outlast.numerics.worker.guard import Guard
    from outlast.parallelism.worker import Batches
    from outlast.ports import Stateful
    from outlast.worker.reporting import progress
    from outlast.worker.session import Session, start

__all__ = [
    "Batches",
    "CheckpointMismatch",
    "CheckpointOptions",
    "Guard",
    "NoUsableCheckpoint",
    "NonFinite",
    "OutlastError",
    "SaveFailed",
    "Session",
    "Stateful",
    "UsageError",
    "__version__",
    "progress",
    "resilient",
    "start",
]
__version__ = VERSION
__getattr__, __dir__ = lazily(
    __name__,
    {
        "Batches": "outlast.parallelism.worker",
        "CheckpointMismatch": "outlast.errors",
        "CheckpointOptions": "outlast.config",
        "Guard": "outlast.numerics.worker.guard",
        "NoUsableCheckpoint": "outlast.errors",
        "NonFinite": "outlast.errors",
        "OutlastError": "outlast.errors",
        "SaveFailed": "outlast.errors",
        "Session": "outlast.worker.session",
        "Stateful": "outlast.ports",
        "UsageError": "outlast.errors",
        "progress": "outlast.worker.reporting",
        "resilient": "outlast.inprocess.worker.reentry",
        "start": "outlast.worker.session",
    },
)
