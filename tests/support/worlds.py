"""Copies of whole worlds, written and read without a process for each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from outlast.checkpoint.content.codecs import Piece
from outlast.checkpoint.content.digest import ends_of
from outlast.checkpoint.content.format import make_image
from outlast.checkpoint.content.random_states import capture_random
from outlast.checkpoint.content.restore import apply, require_fit
from outlast.checkpoint.content.state import Captured
from outlast.checkpoint.load import reshard
from outlast.checkpoint.load.landing import land
from outlast.checkpoint.policy.manifest import Identity, Manifest, copy_name, expanded, runs_of
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools.convert import write_rank_files
from outlast.ipc.exchange import StoreExchange
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.slices import Part
from tests.support.jobs import OnDisk, checkpointer, together

NAME = copy_name(3, 1)
State = dict[str, object]


def in_layout(folder: Path, exchange: StoreExchange, layout: Layout | None) -> OnDisk:
    return checkpointer(folder, exchange=exchange, layout=layout)


def save(folder: Path, ranks: int, state_of: Callable[[int], State], layout: Layout | None = None) -> None:
    """Let ranks save, each its own state."""

    def part(exchange: StoreExchange) -> bool:
        state = state_of(exchange.rank)
        cursor = "here" if exchange.rank == 0 else None
        return in_layout(folder, exchange, layout).save(3, state, "a test", cursor)

    assert together(ranks, part) == [True] * ranks


def load(folder: Path, rank: int, ranks: int, state: State, layout: Layout | None = None) -> reshard.Received:
    with DirectoryTier(folder).open(NAME) as copy:
        commit = read_manifest(copy, NAME)[1]
        identity = Identity("run-a", 2, rank, ranks, layout)
        received = reshard.open_part(copy, NAME, commit, identity, state)
        document = received.document
        require_fit(state, received.saved, document.kinds, document.parameters)
        received.fill()
    land(state, received.saved, 1, received.views)
    apply(state, received.saved, received.random, document.parameters)
    return received


def box_of(**content: Any) -> State:
    return {"box": content}


class Mesh:
    """A mesh as one of its ranks has it."""

    def __init__(self, sizes: Sequence[int], place: Sequence[int]) -> None:
        self.mesh = torch.empty(tuple(sizes))
        self._place = list(place)

    def get_coordinate(self) -> list[int]:
        return self._place


Division = tuple[Mesh, tuple[tuple[int, int], ...]]


def write_world(folder: Path, whole: torch.Tensor, parts: list[Part], cuts: Sequence[Division] = ()) -> None:
    """Write a copy in which each rank has a part of one tensor; ``cuts`` say for each how it is divided."""
    tier, found = DirectoryTier(folder), []
    temporary = tier.begin(NAME)
    for rank, part in enumerate(parts):
        cut = tuple(slice(b, b + n) for b, n in zip(part.offsets, part.shape, strict=True))
        local = whole[cut].contiguous()
        piece = {"t": Piece(tuple(whole.shape), part, *(cuts[rank] if cuts else ()))}
        torch.manual_seed(rank)
        captured = Captured({"t": {"tensor": "t"}}, {}, {"t": local}, {}, capture_random(), piece)
        identity = Identity("run-a", 1, rank, len(parts))
        image = make_image(captured, 3, identity)
        found.append(write_rank_files(tier, temporary, image, identity))
    own = tuple(row for each in found for row in each["own"])
    contents = runs_of([expanded(each["contents"])[0] for each in found])
    manifest = Manifest("run-a", 1, 3, len(parts), {"dp": len(parts)}, None, 0.0, own, contents)
    tier.write(temporary, ends_of(manifest))
    tier.commit(temporary, NAME)
