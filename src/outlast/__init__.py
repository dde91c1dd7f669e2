"""outlast: training that outlasts its hardware.

``import outlast`` is cheap and does not import torch; :func:`start` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.care.listing import get_iteration_from_checkpoint
    from outlast.checkpoint.content.codecs import register_codec
    from outlast.core.config import Checkpoints, Preemption
    from outlast.core.errors import NonFinite, ReplicasDiffer
    from outlast.core.numerics import Numerics
    from outlast.core.reentry import InProcessRestart
    from outlast.core.rerun_options import Rerun
    from outlast.core.tripwire import TripwireOptions
    from outlast.worker.guard import Guard
    from outlast.worker.nan_detector import NaNDetector
    from outlast.worker.ping import check_nccl_health
    from outlast.worker.progress import progress
    from outlast.worker.reentry import CallWrapper, resilient
    from outlast.worker.reentry_line import Restart
    from outlast.worker.rerun import RerunStateMachine, ResultRejected
    from outlast.worker.rerun_data import RerunDataIterator
    from outlast.worker.session import Session, start
    from outlast.worker.shutdown import ShutdownHandler
    from outlast.worker.tripwire import Tripwire

__all__ = [
    "CallWrapper",
    "Checkpoints",
    "Guard",
    "InProcessRestart",
    "NaNDetector",
    "NonFinite",
    "Numerics",
    "Preemption",
    "ReplicasDiffer",
    "Rerun",
    "RerunDataIterator",
    "RerunStateMachine",
    "Restart",
    "ResultRejected",
    "Session",
    "ShutdownHandler",
    "Tripwire",
    "TripwireOptions",
    "__version__",
    "check_nccl_health",
    "get_iteration_from_checkpoint",
    "progress",
    "register_codec",
    "resilient",
    "start",
]
__version__ = "0.1.0"

_HOMES = {
    "CallWrapper": "outlast.worker.reentry",
    "Checkpoints": "outlast.core.config",
    "Guard": "outlast.worker.guard",
    "InProcessRestart": "outlast.core.reentry",
    "NaNDetector": "outlast.worker.nan_detector",
    "NonFinite": "outlast.core.errors",
    "Numerics": "outlast.core.numerics",
    "Preemption": "outlast.core.config",
    "ReplicasDiffer": "outlast.core.errors",
    "Restart": "outlast.worker.reentry_line",
    "Rerun": "outlast.core.rerun_options",
    "RerunDataIterator": "outlast.worker.rerun_data",
    "RerunStateMachine": "outlast.worker.rerun",
    "ResultRejected": "outlast.worker.rerun",
    "Session": "outlast.worker.session",
    "ShutdownHandler": "outlast.worker.shutdown",
    "Tripwire": "outlast.worker.tripwire",
    "TripwireOptions": "outlast.core.tripwire",
    "check_nccl_health": "outlast.worker.ping",
    "get_iteration_from_checkpoint": "outlast.checkpoint.care.listing",
    "progress": "outlast.worker.progress",
    "register_codec": "outlast.checkpoint.content.codecs",
    "resilient": "outlast.worker.reentry",
    "start": "outlast.worker.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
