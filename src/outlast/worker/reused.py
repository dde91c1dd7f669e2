"""Objects that a training function has trained and left, and then hands to a session once more.

A function that is entered again finds what stands outside of it as the fault left it. A checkpoint that is
loaded sets that right. Where there is none yet, training would begin at step 0 with trained weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch

from outlast.core.errors import ObjectReused
from outlast.worker.leaving import when_left

_left: dict[int, weakref.ref[object]] = {}  # by id; neither a tensor nor any object can be compared safely


def training(state: Mapping[str, object]) -> None:
    """Take note of what is trained from now on, for the case that the function is left."""
    parts = {id(part): weakref.ref(part) for _, part in _parts(state)}
    when_left(lambda: _left.update(parts))


def loaded() -> None:
    """Forget it all: a checkpoint has set it right."""
    _left.clear()


def refuse(state: Mapping[str, object]) -> None:
    """Refuse to begin anew with what was trained before.

    Raises:
        ObjectReused: names the object.
    """
    for name, part in _parts(state):
        found = _left.get(id(part))
        if found is not None and found() is part:
            raise ObjectReused(
                f"session.restore: {name} was built outside of the resilient function: it was trained before"
                " the function was left, and there is no checkpoint yet that could set it back; build it"
                " inside of the function"
            )


def _parts(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield what makes up the state, as far as it can be told again; plain containers cannot."""
    for name, holder in state.items():
        if type(holder).__weakrefoffset__:
            yield name, holder
        if isinstance(holder, torch.nn.Module):
            yield from ((f"{name}.{path}", one) for path, one in holder.named_parameters())
