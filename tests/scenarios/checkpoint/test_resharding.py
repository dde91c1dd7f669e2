"""A copy is loaded into other worlds than the one that saved it, in every bit, or refused by name."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.support import warm
from tests.support.launching import SCRIPTS
from tests.support.saved_steps import TENSORS, made, name_of, records


def worlds(folder: Path, *wanted: str) -> list[list[dict[str, Any]]]:
    """Let worlds save and load one after the other; return what each rank of each of them has."""
    done = warm.run([SCRIPTS / "resharding.py", folder, *wanted], 240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


PLANS = {
    "fsdp": "fsdp:4:save fsdp:4:load fsdp:3:load hsdp:4:load ddp:2:load fsdp:1:load tp:4:load",
    "ddp": "ddp:2:save fsdp:3:load fsdp:2:load ddp:1:load",
    "tp": "tp:4:save tp:4:load tp:2:load fsdp:3:load ddp:1:load",
    "hsdp": "hsdp:4:save fsdp:4:load hsdp:4:load ddp:1:load",
}


@pytest.mark.parametrize(
    "plan", ["fsdp", "ddp", *(pytest.param(one, marks=pytest.mark.long) for one in ("tp", "hsdp"))]
)
def test_every_bit_arrives_in_every_world(plan: str, tmp_path: Path) -> None:
    """Model and moments of FSDP2, DDP and tensor parallelism, with parts of unequal size and empty ones."""
    (saved, *_), *loaded = worlds(tmp_path, *PLANS[plan].split())
    assert len(saved["content"]) == 6 + 6 * 3
    for world, answers in zip(PLANS[plan].split()[1:], loaded, strict=True):
        for answer in answers:
            assert answer.get("content") == saved["content"], (world, answer)
            assert (answer["restored"], answer["place"]) == (3, {"sample": 17})
            assert math.isfinite(answer["loss"])
    ranks = [int(world.split(":")[1]) for world in PLANS[plan].split()]
    copy = tmp_path / "run" / "checkpoints" / name_of(3)
    contents = json.loads((copy / "MANIFEST.json").read_text())["contents"]
    assert [count for count, _ in contents["table"]] == ranks[:1], "one table for all ranks"
    for generation, here in enumerate(ranks):
        loads = {tuple(numbers[:2]) for numbers in noted(tmp_path / "run", generation)}
        assert ((str(ranks[0]), str(here)) in loads) == (here != ranks[0]), (
            "the run is another one from here on"
        )
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.GELU(), torch.nn.Linear(6, 2), torch.nn.LayerNorm(2)
    )
    assert read_by_dcp(copy, model) == saved["content"]


def noted(run: Path, generation: int) -> list[list[str]]:
    """Return the numbers in each note of a generation."""
    notes = (one["reason"] for one in records(run, "note") if one["generation"] == generation)
    return [re.findall(r"\d+", one) for one in notes]


def digest(tensor: torch.Tensor) -> str:
    octets = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    return hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + octets).hexdigest()


def read_by_dcp(copy: Path, model: torch.nn.Module) -> dict[str, str]:
    """Have stock DCP read a copy, of whatever world; return digests of all that it found."""
    optimizer = {
        index: {"step": torch.tensor(0.0)}
        | {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
        for index, one in enumerate(model.parameters())
    }
    wanted = {"model": model.state_dict(), "optimizer": {"state": optimizer}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(copy)))
    found = {f"model.{key}": digest(tensor) for key, tensor in wanted["model"].items()}
    for index, entries in optimizer.items():
        found |= {f"optimizer.{index}.{key}": digest(tensor) for key, tensor in entries.items()}
    return found


def test_what_is_of_single_ranks_comes_back_to_each_and_is_refused_in_another_world(tmp_path: Path) -> None:
    saved, same, other = worlds(tmp_path, "ddp:2:save+own", "ddp:2:load+own", "ddp:3:load+own")
    assert [one["content"]["own"] for one in saved] == ["[0.0, 0.0]", "[1.0, 1.0]"]
    assert [one["content"] for one in same] == [one["content"] for one in saved]
    assert [one["error"] for one in other] == ["CheckpointMismatch"] * 3
    assert len({one["text"] for one in other}) == 1, "every rank says the same"
    assert "own.number" in other[0]["text"]


def test_stock_readers_read_what_one_rank_saved(tmp_path: Path) -> None:
    made(tmp_path / "run", 1)
    copy = tmp_path / "run" / "checkpoints" / name_of(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
    found = {
        f"{key.replace('.state.', '.')}": digest(tensor) for key, tensor in load_file(copy / TENSORS).items()
    }
    assert read_by_dcp(copy, model) == found
    assert len(found) == 4 + 4 * 3
