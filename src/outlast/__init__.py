"""outlast: training that outlasts its hardware.

``import outlast`` is cheap and does not import torch; :func:`start` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.agreement.worker.ping import check_nccl_health
    from outlast.checkpoint.content.codecs import register_codec
    from outlast.checkpoint.tools.listing import get_iteration_from_checkpoint
    from outlast.compat.kempnerforge import NaNDetector, ShutdownHandler
    from outlast.config import Checkpoints, Preemption
    from outlast.consistency.policy import TripwireOptions
    from outlast.consistency.worker import Tripwire
    from outlast.errors import NonFinite, ReplicasDiffer
    from outlast.inprocess.policy import InProcessRestart
    from outlast.inprocess.worker.interrupt import Restart
    from outlast.inprocess.worker.reentry import CallWrapper, resilient
    from outlast.numerics.policy.numerics import Numerics
    from outlast.numerics.worker.guard import Guard
    from outlast.rerun.policy.machine import Rerun
    from outlast.rerun.worker.data import RerunDataIterator
    from outlast.rerun.worker.rerun import RerunStateMachine, ResultRejected
    from outlast.worker.reporting import progress
    from outlast.worker.session import Session, start

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
    "CallWrapper": "outlast.inprocess.worker.reentry",
    "Checkpoints": "outlast.config",
    "Guard": "outlast.numerics.worker.guard",
    "InProcessRestart": "outlast.inprocess.policy",
    "NaNDetector": "outlast.compat.kempnerforge",
    "NonFinite": "outlast.errors",
    "Numerics": "outlast.numerics.policy.numerics",
    "Preemption": "outlast.config",
    "ReplicasDiffer": "outlast.errors",
    "Restart": "outlast.inprocess.worker.interrupt",
    "Rerun": "outlast.rerun.policy.machine",
    "RerunDataIterator": "outlast.rerun.worker.data",
    "RerunStateMachine": "outlast.rerun.worker.rerun",
    "ResultRejected": "outlast.rerun.worker.rerun",
    "Session": "outlast.worker.session",
    "ShutdownHandler": "outlast.compat.kempnerforge",
    "Tripwire": "outlast.consistency.worker",
    "TripwireOptions": "outlast.consistency.policy",
    "check_nccl_health": "outlast.agreement.worker.ping",
    "get_iteration_from_checkpoint": "outlast.checkpoint.tools.listing",
    "progress": "outlast.worker.reporting",
    "register_codec": "outlast.checkpoint.content.codecs",
    "resilient": "outlast.inprocess.worker.reentry",
    "start": "outlast.worker.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
