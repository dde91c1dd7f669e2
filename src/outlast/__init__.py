"""outlast: training that outlasts its hardware.

``import outlast`` is cheap and does not import torch; :func:`start` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.codecs import register_codec
    from outlast.core.config import Checkpoints
    from outlast.worker.session import Session, start

__all__ = ["Checkpoints", "Session", "__version__", "register_codec", "start"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Session", "start"):
        from outlast.worker import session

        return getattr(session, name)
    if name == "register_codec":
        from outlast.checkpoint.codecs import register_codec

        return register_codec
    if name == "Checkpoints":
        from outlast.core.config import Checkpoints

        return Checkpoints
    raise AttributeError(f"module 'outlast' has no attribute {name!r}")
