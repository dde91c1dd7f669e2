"""accelerate: its steps reported to ``outlast run``, or its state saved and restored by a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.integrations.accelerate.announced import announce
    from outlast.integrations.accelerate.resumed import resume
    from outlast.integrations.resuming import ResumedLoop

__all__ = ["ResumedLoop", "announce", "resume"]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "ResumedLoop": "outlast.integrations.resuming",
        "announce": "outlast.integrations.accelerate.announced",
        "resume": "outlast.integrations.accelerate.resumed",
    },
)
