"""outlast: training that outlasts its hardware.

``import outlast`` is cheap and does not import torch; :func:`start` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.codecs import register_codec
    from outlast.checkpoint.listing import get_iteration_from_checkpoint
    from outlast.core.config import Checkpoints
    from outlast.core.errors import NonFinite
    from outlast.worker.session import Session, start

__all__ = [
    "Checkpoints",
    "NonFinite",
    "Session",
    "__version__",
    "get_iteration_from_checkpoint",
    "register_codec",
    "start",
]
__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "outlast.core.config",
    "NonFinite": "outlast.core.errors",
    "Session": "outlast.worker.session",
    "get_iteration_from_checkpoint": "outlast.checkpoint.listing",
    "register_codec": "outlast.checkpoint.codecs",
    "start": "outlast.worker.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
