"""What tells cheaply that live objects have changed since they were saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch

from outlast.checkpoint.content.state import Captured
from outlast.checkpoint.content.typed_forms import Json

_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class Fingerprint:
    """Of a captured state: its values, and address and version counter of each tensor.

    Random states are left out: whoever draws a number between two saves has not changed what is registered.

    Args:
        values: the typed JSON of each object, by name.
        tensors: address and version counter, by key.
    """

    values: Mapping[str, Json]
    tensors: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, captured: Captured) -> Fingerprint:
        """Return that of a state."""
        tensors = list(captured.tensors.values())
        places = zip(map(torch.Tensor.data_ptr, tensors), map(_VERSION, tensors), strict=True)
        return cls(captured.values, dict(zip(captured.tensors, places, strict=True)))

    def changed(self, captured: Captured) -> list[str]:
        """Return what has changed since: names of objects, and keys of tensors that were written to.

        A tensor that an object makes anew whenever it is asked tells nothing.
        """
        now = Fingerprint.of(captured)
        names = [name for name, value in now.values.items() if self.values.get(name, value) != value]
        written = [
            key
            for key, (address, version) in now.tensors.items()
            if self.tensors.get(key, (0, 0))[0] == address and self.tensors[key][1] != version
        ]
        return [*names, *written]
