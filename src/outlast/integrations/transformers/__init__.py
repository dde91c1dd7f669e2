"""Transformers: a callback that reports the Trainer's steps, and a Trainer that resumes through outlast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.integrations.transformers.callback import OutlastCallback
    from outlast.integrations.transformers.trainer import OutlastTrainer, OutlastTrainerMixin

__all__ = ["OutlastCallback", "OutlastTrainer", "OutlastTrainerMixin"]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "OutlastCallback": "outlast.integrations.transformers.callback",
        "OutlastTrainer": "outlast.integrations.transformers.trainer",
        "OutlastTrainerMixin": "outlast.integrations.transformers.trainer",
    },
)
