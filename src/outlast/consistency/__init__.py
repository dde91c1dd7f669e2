"""Comparison of what ranks should hold alike, to find silent corruption."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.consistency.worker import Tripwire

__all__ = [
    "Tripwire",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "Tripwire": "outlast.consistency.worker",
    },
)
