"""Parts of tensors are read from the files of any world, every chunk verified."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from outlast.checkpoint.load import reading
from outlast.checkpoint.load.world import World
from outlast.checkpoint.policy.manifest import rank_files
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import CheckpointMismatch
from outlast.parallelism.policy.slices import Part, Split, part_of
from tests.support.worlds import NAME, load, write_world


def take(folder: Path, wanted: Part, reader: int) -> torch.Tensor:
    with DirectoryTier(folder).open(NAME) as copy:
        world = World(copy, read_manifest(copy, NAME)[0])
        dtype = world.dtype("t")
        target = reading.reserve({"pad": (Part.whole((3,)), 1), "t": (wanted, dtype.itemsize)})["t"]
        moves, why = reading.moves_to(target, world.stored["t"], reader)
        assert why == ""
        reading.carry_out(copy, world.shards, moves)
        return target.typed(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("big", [False, True])
def test_any_part_is_read_from_any_world(dtype: torch.dtype, big: bool, tmp_path: Path, seed: int) -> None:
    """Random divisions along random dimensions; the big ones do not fit into memory for a block at once."""
    dice = random.Random(seed)
    for round_ in range(2 if big else 12):
        shape = (dice.randrange(900, 1100), 3, 2600) if big else tuple(dice.choices(range(1, 9), k=3))
        octets = torch.randint(2, 255, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        if big and dtype.itemsize != 4:
            return
        whole = octets.view(dtype).view(shape)
        mesh = [(dice.randrange(3), dice.randrange(1, 4)) for _ in range(dice.randrange(3))]
        ranks = itertools.product(*(range(count) for _, count in mesh))
        parts = [part_of(shape, [Split(*m, i) for m, i in zip(mesh, at, strict=True)]) for at in ranks]
        folder = tmp_path / str(round_)
        write_world(folder, whole, parts + parts[: dice.randrange(2)])
        for reader in range(3):
            bounds = [sorted((dice.randrange(n + 1), dice.randrange(n + 1))) for n in shape]
            wanted = Part(tuple(b for b, _ in bounds), tuple(e - b for b, e in bounds))
            expected = whole[tuple(slice(*each) for each in bounds)].contiguous()
            found = take(folder, wanted, reader)
            assert found.shape == expected.shape
            assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([Part((0, 0), (2, 4)), Part((3, 0), (1, 4))], "[1, 4] at [2, 0]"),
        ([Part((0, 0), (3, 4)), Part((2, 0), (2, 4))], "t "),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused(parts: list[Part], text: str, tmp_path: Path) -> None:
    write_world(tmp_path, torch.ones(4, 4), parts)
    with pytest.raises(CheckpointMismatch) as caught:
        load(tmp_path, 0, 1, {"t": torch.zeros(4, 4)})
    assert text in str(caught.value)


def test_parts_become_whole_only_where_it_is_known_that_the_whole_is_wanted(tmp_path: Path) -> None:
    whole = torch.arange(16.0).view(4, 4)
    write_world(tmp_path, whole, [Part((0, 0), (4, 2)), Part((0, 2), (4, 2))])
    live = torch.zeros(4, 4)
    for rank in range(2):  # as many ranks as saved, and yet not what either of them saved
        live.zero_()
        load(tmp_path, rank, 2, {"t": live})
        assert torch.equal(live, whole)
    with pytest.raises(CheckpointMismatch, match="t "):
        load(tmp_path, 0, 1, {"t": {}})


def test_the_files_say_to_others_where_their_parts_are(tmp_path: Path) -> None:
    write_world(tmp_path, torch.ones(4, 4) * 1j, [Part((0, 0), (4, 2)), Part((0, 2), (4, 2))])
    with safe_open(tmp_path / NAME / rank_files(1, 2)[0], framework="pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {"t": {"saved_offsets": [0, 2, 0]}}
        assert file.get_tensor("t").shape == (4, 2, 8)  # a type that safetensors does not have, as bytes
