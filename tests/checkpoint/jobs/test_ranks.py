"""Several ranks save and restore together: what happens to one is known to all, and none is left waiting."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.checkpoint.policy.manifest import copy_name, rank_files
from outlast.errors import CheckpointMismatch, OutlastError
from outlast.ipc.exchange import StoreExchange
from outlast.recovery.policy.events import Record
from tests.support.jobs import checkpointer, kinds, together

OLD, NEW = copy_name(1, 1), copy_name(2, 1)
Box = dict[str, Any]


def box_of(rank: int, step: int, size: int = 1000) -> Box:
    return {"x": torch.full((size,), float(100 * step + rank)), "who": (rank, step)}


def save_all(folder: Path, *steps: int, world: int = 2, **options: Any) -> list[Any]:
    def part(exchange: StoreExchange) -> list[bool]:
        saver = checkpointer(folder, exchange=exchange, **options)
        return [
            saver.save(
                step, {"box": box_of(exchange.rank, step)}, "a test", step if exchange.rank == 0 else None
            )
            for step in steps
        ]

    return together(world, part)


def restore_all(folder: Path, world: int = 2, **options: Any) -> list[Any]:
    """Return what each rank got back: the step, the cursor and the box."""

    def part(exchange: StoreExchange) -> tuple[int, Any, Box] | None:
        box: Box = {}
        restored = checkpointer(folder, exchange=exchange, generation=2, **options).restore({"box": box})
        return None if restored is None else (restored.step, restored.cursor, box)

    return together(world, part)


def assert_restored(answers: list[Any], step: int) -> None:
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, BaseException), repr(answer)
        found, cursor, box = answer
        expected = box_of(rank, step)
        assert (found, cursor, box["who"]) == (step, step, expected["who"])
        assert torch.equal(box["x"], expected["x"])


def assert_same_error(answers: list[Any], kind: type[OutlastError], text: str) -> None:
    for answer in answers:
        assert type(answer) is kind, repr(answer)
        assert text in str(answer)
    assert len({str(answer) for answer in answers}) == 1


def test_only_the_first_rank_records(tmp_path: Path) -> None:
    records: list[Record] = []
    save_all(tmp_path, 1, world=3, records=records)
    restore_all(tmp_path, world=3, records=records)
    assert kinds(records) == ["Loaded"]
    (loaded,) = records
    assert loaded.nbytes == 3 * 4000  # type: ignore[attr-defined]


def flip_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, 3), flip_middle])
def test_damage_that_one_rank_finds_sends_all_to_the_older_copy(
    harm: Callable[[Path], None], rank: int, tmp_path: Path
) -> None:
    save_all(tmp_path, 1, 2, world=3)
    harm(tmp_path / NEW / rank_files(rank, 3)[0])
    records: list[Record] = []
    assert_restored(restore_all(tmp_path, world=3, records=records), 1)
    assert kinds(records) == ["Quarantined", "Loaded"]
    reason = json.loads((tmp_path / "quarantine" / f"{NEW}.reason.json").read_text())
    assert (reason["rank"], reason["file"]) == (rank, rank_files(rank, 3)[0])


def test_a_copy_that_one_rank_does_not_see_is_passed_over_by_all(tmp_path: Path) -> None:
    """Each rank has a folder of its own here, as on nodes with local disks; one lacks the newest copy."""
    save_all(tmp_path / "0", 1, 2)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1" / NEW)

    def part(exchange: StoreExchange) -> tuple[int, Any, Box]:
        box: Box = {}
        tier = tmp_path / str(exchange.rank)
        restored = checkpointer(tier, exchange=exchange).restore({"box": box})
        assert restored is not None
        return restored.step, restored.cursor, box

    assert_restored(together(2, part), 1)
    assert (tmp_path / "0" / NEW).is_dir()


class Deceived(StoreExchange):
    """Hears nothing of the newest copy where ranks say what they see."""

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        heard = [json.loads(text) for text in super().gather(topic, value, timeout)]
        for _, _, data, _ in heard if topic == "inventory" else ():
            data["copies"] = [one for one in data["copies"] if one["name"] != NEW]
        return list(map(json.dumps, heard))


def test_ranks_that_have_restored_different_copies_do_not_train_on(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2)
    store = dist.HashStore()

    def part(exchange: StoreExchange) -> object:
        kind = Deceived if exchange.rank else StoreExchange
        box: Box = {}
        other = kind(store, exchange.rank, 2, 2)
        return checkpointer(tmp_path, exchange=other, generation=2).restore({"box": box})

    first, second = together(2, part)
    assert (type(first), type(second)) == (OutlastError, OutlastError)
    assert all(name in str(first) for name in (OLD, NEW))


def test_a_model_that_differs_on_one_rank_stops_all_of_them(tmp_path: Path) -> None:
    save_all(tmp_path, 1)

    def part(exchange: StoreExchange) -> Any:
        live: Box = {"box": {}} if exchange.rank == 0 else {"crate": {}}
        return checkpointer(tmp_path, exchange=exchange).restore(live)

    assert_same_error(together(2, part), CheckpointMismatch, OLD)


class Stubborn:
    """Gives a state and fails to take it, or fails to give it."""

    def __init__(self, error: Exception, *, gives: bool) -> None:
        self._error = error
        self._gives = gives

    def state_dict(self) -> Box:
        if not self._gives:
            raise self._error
        return {"a": 1}

    def load_state_dict(self, _: Box) -> None:
        raise self._error


def test_an_object_that_does_not_take_its_state_stops_every_rank(tmp_path: Path) -> None:
    def part(exchange: StoreExchange) -> Any:
        holder: object = Stubborn(KeyError("b"), gives=True) if exchange.rank == 1 else {"a": 1}
        saver = checkpointer(tmp_path, exchange=exchange)
        assert saver.save(1, {"holder": holder}, "a test")
        return saver.restore({"holder": holder})

    assert_same_error(together(2, part), CheckpointMismatch, "KeyError: 'b'")
