"""Training state to verified copies on disk and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.checkpoint.content.codecs import register_codec

__all__ = [
    "register_codec",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "register_codec": "outlast.checkpoint.content.codecs",
    },
)
