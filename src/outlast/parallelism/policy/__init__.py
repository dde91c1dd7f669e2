"""Arithmetic of parallelism: parts of tensors."""

from __future__ import annotations

from outlast.parallelism.policy.slices import (
    Part,
    Split,
    blocks,
    cover,
    extent,
    part_of,
    place_in,
    strides_of,
)

__all__ = ["Part", "Split", "blocks", "cover", "extent", "part_of", "place_in", "strides_of"]
