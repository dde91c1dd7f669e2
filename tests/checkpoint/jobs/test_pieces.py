"""Parts of tensors are read from the files of any world, every chunk verified."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outlast.checkpoint.load import reading
from outlast.checkpoint.load.world import World
from outlast.checkpoint.policy.manifest import rank_files
from outlast.checkpoint.tiers.inventory import read_manifest
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from outlast.errors import CheckpointMismatch
from outlast.fields import DamagedCopy
from outlast.parallelism.policy.slices import Part, Split, part_of
from tests.support.forging import rewrite
from tests.support.worlds import NAME, Mesh, load, write_world


def take(folder: Path, wanted: Part, reader: int) -> torch.Tensor:
    with DirectoryTier(folder).open(NAME) as copy:
        world = World(copy, read_manifest(copy, NAME)[0])
        dtype = world.dtype("t")
        pad = (Part.whole((3,)), torch.uint8, None)
        target = reading.reserve({"pad": pad, "t": (wanted, dtype, None)})["t"]
        moves, why = world.moves("t", target, reader)
        assert why == ""
        reading.carry_out(copy, moves, 1 + reader)
        return target.tensor


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
        ranks = list(itertools.product(*(range(count) for _, count in mesh)))
        ranks += ranks[: dice.randrange(2)]
        parts = [part_of(shape, [Split(*m, i) for m, i in zip(mesh, at, strict=True)]) for at in ranks]
        meshes = [Mesh([count for _, count in mesh], at) for at in ranks]
        cuts = [(one, tuple((axis, along) for along, (axis, _) in enumerate(mesh))) for one in meshes]
        folder = tmp_path / str(round_)
        write_world(folder, whole, parts, cuts if round_ % 3 else ())
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


def test_a_division_that_a_mesh_does_not_give_is_written_as_it_is(tmp_path: Path) -> None:
    """As of a tensor whose parts are divided otherwise than torch.chunk divides."""
    whole, parts = torch.arange(16.0).view(4, 4), [Part((0, 0), (3, 4)), Part((3, 0), (1, 4))]
    write_world(tmp_path, whole, parts, [(Mesh([2], [rank]), ((0, 0),)) for rank in (0, 1)])
    assert torch.equal(take(tmp_path, Part((1, 1), (3, 2)), 0), whole[1:, 1:3])


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_a_rank_reads_one_document_and_the_files_of_its_own_parts(
    readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(48.0).view(12, 4)
    places = [(i, j) for i in range(3) for j in range(2)]  # divided by three, and twice the same
    parts = [part_of((12, 4), [Split(0, 3, i)]) for i, _ in places]
    write_world(tmp_path, whole, parts, [(Mesh([3, 2], at), ((0, 0),)) for at in places])
    opened: list[str] = []
    right = CopyFolder.open

    def noted(self: CopyFolder, file: str, nbytes: int | None = None) -> Any:
        opened.append(file)
        return right(self, file, nbytes)

    monkeypatch.setattr(CopyFolder, "open", noted)
    for reader in range(readers):
        rows = part_of((12, 4), [Split(0, readers, reader)])
        opened.clear()
        assert torch.equal(
            take(tmp_path, rows, reader), whole[rows.offsets[0] : rows.offsets[0] + rows.shape[0]]
        )
        assert [file for file in opened if file.endswith(".json")] == [
            "MANIFEST.json",
            rank_files(0, 6).document,
        ]
        wanted = sum(part.overlap(rows) is not None for part in parts) // 2
        assert sum(file.endswith(".digests") for file in opened) == wanted
        assert sum(file.endswith(".safetensors") for file in opened) == wanted


@pytest.mark.parametrize("change", [(6, [[3, 0]]), (6, [[1]]), (6, []), (5, 8), (0, 1 << 30)], ids=str)
def test_a_row_that_contradicts_the_table_is_damage(change: tuple[int, Any], tmp_path: Path) -> None:
    """Of a rank whose document is not read, as the one of another rank is like it."""
    places, whole = [(i, j) for i in range(3) for j in range(2)], torch.arange(48.0).view(12, 4)
    parts = [part_of((12, 4), [Split(0, 3, i)]) for i, _ in places]
    write_world(tmp_path, whole, parts, [(Mesh([3, 2], at), ((0, 0),)) for at in places])
    rewrite(tmp_path / NAME, lambda manifest: manifest["own"][2].__setitem__(*change))
    with pytest.raises(DamagedCopy):
        take(tmp_path, Part((4, 0), (4, 4)), 0)


def test_the_files_say_to_others_where_their_parts_are(tmp_path: Path) -> None:
    write_world(tmp_path, torch.ones(4, 4) * 1j, [Part((0, 0), (4, 2)), Part((0, 2), (4, 2))])
    with safe_open(tmp_path / NAME / rank_files(1, 2)[0], framework="pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {"t": {"saved_offsets": [0, 2, 0]}}
        assert file.get_tensor("t").shape == (4, 2, 8)  # a type that safetensors does not have, as bytes
