"""DeepSpeed: the state of an engine, saved and restored by a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.integrations.deepspeed.resumed import resume
    from outlast.integrations.resuming import ResumedLoop

__all__ = ["ResumedLoop", "resume"]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "ResumedLoop": "outlast.integrations.resuming",
        "resume": "outlast.integrations.deepspeed.resumed",
    },
)
