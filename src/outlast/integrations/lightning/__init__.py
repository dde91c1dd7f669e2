"""Lightning: a callback that reports its Trainer's steps, attached by itself under ``outlast run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast import settings
from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.integrations.lightning.callback import OutlastCallback
    from outlast.integrations.lightning.storage import OutlastCheckpointIO

__all__ = ["OutlastCallback", "OutlastCheckpointIO", "callbacks"]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "OutlastCallback": "outlast.integrations.lightning.callback",
        "OutlastCheckpointIO": "outlast.integrations.lightning.storage",
    },
)


def callbacks() -> list[Any]:
    """Return what every Trainer gets by the entry point ``lightning.pytorch.callbacks_factory``.

    Outside of ``outlast run`` there are none.
    """
    if not settings.worker_context().heartbeat_path:
        return []
    from outlast.integrations.lightning.callback import OutlastCallback

    return [OutlastCallback(implied=True)]
