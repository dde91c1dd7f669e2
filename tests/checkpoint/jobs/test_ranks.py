"""Several ranks save and restore together: what happens to one is known to all, and none is left waiting."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from outlast.checkpoint.policy.manifest import copy_name, rank_files
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointMismatch, NoUsableCheckpoint, OutlastError, SaveFailed, UsageError
from outlast.ipc.exchange import StoreExchange
from outlast.ports import ExchangeFailed
from outlast.recovery.policy.events import Note, Record
from tests.support.jobs import DEADLINE, Job, checkpointer, kinds, save_steps, together
from tests.support.warm import Warm, start

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "saving.py"
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


def test_each_rank_gets_its_own_part_back(tmp_path: Path) -> None:
    assert save_all(tmp_path, 1, 2, world=4) == [[True, True]] * 4
    assert len(list((tmp_path / NEW).iterdir())) == 2 * 4 + 2
    assert_restored(restore_all(tmp_path, world=4), 2)


def test_only_the_first_rank_records(tmp_path: Path) -> None:
    records: list[Record] = []
    save_all(tmp_path, 1, world=3, records=records)
    restore_all(tmp_path, world=3, records=records)
    assert kinds(records) == ["Saved", "Loaded"]
    saved, loaded = records
    files = [path.stat().st_size for path in (tmp_path / OLD).glob("rank-*")]
    assert saved.nbytes == sum(files)  # type: ignore[attr-defined]
    assert 3 * 4000 < loaded.nbytes < sum(files)  # type: ignore[attr-defined]


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


def test_what_was_of_single_ranks_is_refused_in_another_world(tmp_path: Path) -> None:
    save_all(tmp_path, 1, world=4)
    text = "saved by 4 ranks, it cannot be loaded by these 2 ranks: box.who.0 is of single ranks"
    assert_same_error(restore_all(tmp_path, world=2), CheckpointMismatch, text)
    assert (tmp_path / OLD).is_dir()


def test_when_nothing_is_left_every_rank_says_the_same(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    flip_middle(tmp_path / OLD / rank_files(1, 2)[0])
    assert_same_error(restore_all(tmp_path), NoUsableCheckpoint, f"{OLD}: rank 1: {rank_files(1, 2)[0]}")


def test_a_model_that_differs_on_one_rank_stops_all_of_them(tmp_path: Path) -> None:
    save_all(tmp_path, 1)

    def part(exchange: StoreExchange) -> Any:
        live: Box = {"box": {}} if exchange.rank == 0 else {"crate": {}}
        return checkpointer(tmp_path, exchange=exchange).restore(live)

    assert_same_error(
        together(2, part), CheckpointMismatch, "rank 1: step-000000001.g1 is sound but does not fit"
    )


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

    refused = "Stubborn.load_state_dict did not take what was saved of 'holder': KeyError: 'b'"
    assert_same_error(together(2, part), CheckpointMismatch, f"rank 1: {OLD} is sound, but {refused}")


def test_an_error_of_one_rank_loses_the_save_on_all(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    records: list[Record] = []

    def part(exchange: StoreExchange) -> list[bool | str]:
        settings = CheckpointOptions(max_failed_saves=2, max_failed_seconds=0.0, timeout=DEADLINE)
        saver = checkpointer(tmp_path, exchange=exchange, records=records, settings=settings)
        holder = Stubborn(RuntimeError("no memory left"), gives=False)
        state: Box = {"box": holder if exchange.rank == 1 else {}}
        first = saver.save(2, state, "a test")
        try:
            saver.save(3, state, "a test")
        except SaveFailed as error:
            return [first, str(error)]
        return [first]

    answers: list[Any] = together(2, part)
    assert answers[0] == answers[1]
    assert answers[0][0] is False
    assert "2 saves in a row" in answers[0][1]
    assert "rank 1: RuntimeError: no memory left" in answers[0][1]
    assert kinds(records) == ["SaveLost", "SaveLost"]
    assert [path.name for path in tmp_path.iterdir()] == [OLD]
    assert_restored(restore_all(tmp_path), 1)


def test_a_leaf_that_one_rank_cannot_save_is_refused_on_all(tmp_path: Path) -> None:
    def part(exchange: StoreExchange) -> bool:
        leaf = object() if exchange.rank == 1 else 1
        return checkpointer(tmp_path, exchange=exchange).save(1, {"box": {"leaf": leaf}}, "a test")

    assert_same_error(
        together(2, part), UsageError, "rank 1: state['box.leaf']: a builtins.object has no form"
    )
    assert list(tmp_path.iterdir()) == []


def test_ranks_at_different_steps_save_nothing(tmp_path: Path) -> None:
    def part(exchange: StoreExchange) -> bool:
        return checkpointer(tmp_path, exchange=exchange).save(5 + exchange.rank, {"box": {}}, "a test")

    assert_same_error(together(2, part), UsageError, "rank 0 is at step 5, rank 1 at step 6")
    assert list(tmp_path.iterdir()) == []


def test_a_cursor_that_has_no_json_form_is_refused_on_all(tmp_path: Path) -> None:
    def part(exchange: StoreExchange) -> bool:
        return checkpointer(tmp_path, exchange=exchange).save(1, {"box": {}}, "a test", object())

    assert_same_error(together(2, part), UsageError, "state['cursor']")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_gone_is_named_and_leaves_no_copy(tmp_path: Path) -> None:
    save_all(tmp_path, 1)

    def part(exchange: StoreExchange) -> bool:
        settings = CheckpointOptions(timeout=3.0)
        saver = checkpointer(tmp_path, exchange=exchange, settings=settings)
        if exchange.rank == 1:
            exchange.gather("begin", json.dumps(["fine", "", {"step": 2}, None]), DEADLINE)
            return False
        return saver.save(2, {"box": box_of(0, 2)}, "a test")

    answer, _ = together(2, part)
    assert isinstance(answer, ExchangeFailed)
    assert "exchange 'written': rank 1 of 2 did not answer within 3 s" in str(answer)
    assert_restored(restore_all(tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == [OLD]


class Ranks:
    """Real processes with a gloo group between them."""

    def __init__(self, folder: Path, *arguments: str, world: int = 2, generation: int = 1) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        common = [str(self.store.port), str(world), str(generation), str(folder), *arguments]
        self.processes: list[Warm] = []
        self.outputs: list[IO[str]] = []
        for rank in range(world):
            readable, writable = os.pipe()
            self.outputs.append(os.fdopen(readable))
            with open(writable, "wb") as output:
                self.processes.append(start([SCRIPT, str(rank), *common], output, sys.__stderr__))

    def line(self, rank: int) -> Any:
        """Return the next line that a rank prints."""
        return json.loads(self.outputs[rank].readline() or '"it ended"')

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE)
        for output in self.outputs:
            output.close()


def test_a_resumed_job_of_real_ranks_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path) -> None:
    """DDP over gloo with dropout: steps 4 to 6, again from the checkpoint of step 3, have the same losses."""
    whole = Ranks(tmp_path, "6", "3")
    expected = [[whole.line(rank) for _ in range(7)] for rank in (0, 1)]
    whole.end()
    shutil.rmtree(tmp_path / copy_name(6, 1))
    again = Ranks(tmp_path, "6", "3", generation=2)
    resumed = [[again.line(rank) for _ in range(4)] for rank in (0, 1)]
    again.end()
    for rank in (0, 1):
        assert resumed[rank] == [["restored", 3], *expected[rank][4:]]
        assert len({line[2] for line in expected[rank][1:]}) == 6


def test_a_job_killed_while_it_saves_goes_on_from_a_whole_checkpoint(tmp_path: Path, seed: int) -> None:
    """Every step is saved, so SIGKILL for rank 1 falls into a save more likely than not."""
    ranks = Ranks(tmp_path, "100000", "1")
    last = [ranks.line(0) for _ in range(5 + seed % 40)][-1]
    ranks.processes[1].send_signal(signal.SIGKILL)
    ranks.end()
    assert last[0] == "loss"
    again = Ranks(tmp_path, "1000000", "1000000", generation=2)
    restored = [again.line(rank) for rank in (0, 1)]
    again.end()
    assert restored[0] == restored[1]
    assert restored[0][1] >= last[1] - 1
    names = {path.name for path in tmp_path.iterdir()}
    assert all(name.startswith("step-") for name in names), names


def test_what_one_rank_saved_two_ranks_load(tmp_path: Path) -> None:
    content = save_steps(tmp_path, 1)

    def part(exchange: StoreExchange) -> bytes:
        job = Job(99)
        restored = checkpointer(tmp_path, exchange=exchange, generation=2, records=records).restore(job.state)
        assert restored is not None
        (note,) = restored.notes
        assert re.match("saved by 1 rank and loaded by 2 ranks: .*bit for bit", note)
        return job.content()

    records: list[Record] = []
    assert together(2, part) == [content[1]] * 2
    assert sum("bit for bit" in one.reason for one in records if isinstance(one, Note)) == 1
