"""Lightning: a callback that reports its Trainer's steps, attached by itself under ``outlast run``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from outlast import settings
from outlast._lazy import lazily
from outlast.errors import UsageError

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
_LOG = logging.getLogger("outlast")


def callbacks() -> list[Any]:
    """Return what every Trainer gets by the entry point ``lightning.pytorch.callbacks_factory``.

    Outside of ``outlast run`` there are none, and none where Lightning is too old for the callback.
    """
    if not settings.under_launcher():
        return []
    try:
        from outlast.integrations.lightning.callback import OutlastCallback
    except UsageError as error:
        _LOG.warning("the steps of Lightning's Trainer are not reported: %s", error)
        return []

    return [OutlastCallback(implied=True)]
