"""The tensors of a saved state, each with its live counterpart, which says what part of it is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outlast.checkpoint.content.codecs import Coded
from outlast.checkpoint.content.distributed import Piece, distributed, piece_of, unsupported
from outlast.checkpoint.content.state import template_of
from outlast.checkpoint.content.typed_json import Decoder, Json
from outlast.core.errors import UsageError


@dataclass(frozen=True)
class Leaf:
    """A tensor in a saved state.

    Args:
        path: where, for messages.
        key: under which its bytes are stored.
        live: the live tensor of the same place; None when none is known.
        of_optimizer: an optimizer's, which may keep another type than the parameter that stands for it.
    """

    path: str
    key: str
    live: torch.Tensor | None
    of_optimizer: bool


def leaves_of(
    values: Mapping[str, Json], state: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Leaf]:
    """Yield the tensors of a state in typed JSON, each with its live counterpart.

    Args:
        values: by name.
        state: the live objects.
        shapes: of the whole tensors, by key.
    """
    stands = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    keys = {id(tensor): key for key, tensor in stands.items()}
    decoder = Decoder("state", stands)
    for name, value in values.items():
        if name in state:
            saved = decoder.decode(value)
            template = template_of(state[name], saved, lambda one: one.shape)
            for path, tensor, live in _pairs(saved, template, name):
                yield Leaf(path, keys[id(tensor)], live, isinstance(state[name], torch.optim.Optimizer))


def _pairs(saved: Any, template: Any, path: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    if isinstance(saved, Coded):
        yield from _pairs(saved.parts, None, path)
    elif isinstance(saved, torch.Tensor):
        yield path, saved, template if isinstance(template, torch.Tensor) else None
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            live = template.get(key) if isinstance(template, Mapping) else None
            yield from _pairs(value, live, f"{path}.{key}")
    elif isinstance(saved, (list, tuple)):
        for place, value in enumerate(saved):
            known = isinstance(template, (list, tuple)) and place < len(template)
            yield from _pairs(value, template[place] if known else None, f"{path}.{place}")


def wanted_of(leaf: Leaf) -> Piece | None:
    """Return which part of a tensor this rank has use for; None when the live object does not say.

    Raises:
        UsageError: the live tensor is distributed in a way that is not supported.
    """
    if leaf.live is None:
        return None
    if distributed(leaf.live):
        why = unsupported(leaf.live)
        if why:
            raise UsageError(f"{leaf.path} {why}; nothing was loaded or changed")
    return piece_of(leaf.live)
