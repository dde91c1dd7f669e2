"""Event logs that are read while they are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.errors import UsageError
from outlast.observe import following
from outlast.observe.following import RunFollower
from outlast.observe.policy import codec
from outlast.observe.policy.now import NowFold, State
from outlast.observe.recorder import read
from outlast.recovery.policy.events import FirstStep, GenerationStarted, Progress, ScriptSaved

DATA = Path(__file__).parent / "data"
LOG = DATA / "eventful.jsonl"
BEGUN = GenerationStarted(2e9, 6000.0, 4, 4, (70, 71), "zygote", "2 workers")


def whole() -> object:
    told = NowFold()
    for record in read(LOG).records:
        told.take(record)
    return told.now()


def pieces(size: int) -> Iterator[bytes]:
    content = LOG.read_bytes()
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize("size", [1, 777, 1 << 20])
def test_a_log_that_grows_by_pieces_is_read_like_a_whole_one(tmp_path: Path, size: int) -> None:
    log = tmp_path / "events.jsonl"
    log.touch()
    follower = RunFollower(tmp_path)
    with open(log, "ab", buffering=0) as file:
        for count, piece in enumerate(pieces(size)):
            file.write(piece)
            if size > 1 or count % 97 == 0:
                follower.poll()
    assert follower.poll() == whole()
    assert (follower.skipped, follower.unknown) == (1, 1)


def test_the_last_line_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    lines = LOG.read_bytes().splitlines(keepends=True)
    log = tmp_path / "events.jsonl"
    log.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    follower = RunFollower(tmp_path)
    assert (follower.poll().saves, follower.skipped) == (0, 0)
    with open(log, "ab") as file:
        file.write(lines[4][50:])
    assert (follower.poll().saves, follower.skipped) == (1, 0)


def test_a_log_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    shutil.copy(LOG, log)
    follower = RunFollower(tmp_path)
    assert follower.poll() == whole()
    head = LOG.read_bytes().splitlines(keepends=True)[:3]
    log.write_bytes(b"".join(head))
    assert (follower.poll().state, follower.poll().step) == (State.TRAINING, 2)
    log.unlink()
    shutil.copy(LOG, tmp_path / "other")
    os.replace(tmp_path / "other", log)
    assert follower.poll() == whole()


def test_old_progress_of_a_long_log_is_passed_over_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_CHUNK", 4096)
    records = (Progress(2e9 + at, 6000.0 + at, 4, 500 + at, "session") for at in range(2000))
    bulk = "".join(f"{codec.encode(record)}\n" for record in records)
    log = tmp_path / "events.jsonl"
    again = "".join(
        f"{codec.encode(record)}\n" for record in (BEGUN, FirstStep(2e9, 6000.0, 4, 500, {}, "session"))
    )
    log.write_text(LOG.read_text() + '{"v":1,"kind":"progress","step":\n' * 300 + again + bulk)
    follower = RunFollower(tmp_path, recent=8192)
    now = follower.poll()
    assert (now.step, now.rate, now.saves) == (2499, 1.0, 6)
    assert now.faults == {"crash": 1, "hang": 1}
    assert follower.skipped == 1  # the torn line of LOG, and none of those that were not decoded


def test_nodes_are_followed_and_one_may_come_later(tmp_path: Path) -> None:
    shutil.copytree(DATA / "three-nodes" / "nodes" / "n0", tmp_path / "nodes" / "n0")
    follower = RunFollower(tmp_path)
    assert [one.name for one in follower.poll().nodes] == ["n0"]
    shutil.copytree(DATA / "three-nodes" / "nodes" / "n1", tmp_path / "nodes" / "n1")
    assert [one.name for one in follower.poll().nodes] == ["n0", "n1"]


def test_the_newest_record_has_the_last_word_in_whichever_log_it_is(tmp_path: Path) -> None:
    old, new = (replace(BEGUN, time=at, generation=number) for at, number in ((10.0, 4), (20.0, 5)))
    logs = {
        "n0": (old, ScriptSaved(12.0, 12.0, 4, 100), new, ScriptSaved(22.0, 22.0, 5, 300)),
        "n1": (replace(old, time=11.0), ScriptSaved(13.0, 13.0, 4, 200), replace(new, time=21.0)),
    }
    for name, records in logs.items():
        (tmp_path / "nodes" / name).mkdir(parents=True)
        text = "".join(f"{codec.encode(record)}\n" for record in records)
        (tmp_path / "nodes" / name / "events.jsonl").write_text(text)
    assert [one.step for one in RunFollower(tmp_path).poll().checkpoints] == [300]


def test_a_log_that_cannot_be_read_for_a_while_costs_no_records(tmp_path: Path) -> None:
    shutil.copytree(DATA / "three-nodes" / "nodes", tmp_path / "nodes")
    expected = RunFollower(tmp_path).poll()
    follower, log = RunFollower(tmp_path), tmp_path / "nodes" / "n1" / "events.jsonl"
    log.rename(tmp_path / "kept")
    log.mkdir()
    with pytest.raises(UsageError, match=r"events\.jsonl"):
        follower.poll()
    log.rmdir()
    (tmp_path / "kept").rename(log)
    assert follower.poll() == expected


def test_a_folder_without_a_log_and_a_log_that_is_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        RunFollower(tmp_path).poll()
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UsageError, match=r"events\.jsonl"):
        RunFollower(tmp_path).poll()


def test_a_folder_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        RunFollower(tmp_path / ("x" * 300)).poll()


def test_the_log_of_one_node_is_read_without_those_of_the_others() -> None:
    run = DATA / "three-nodes"
    (first, *others) = sorted(path.name for path in (run / "nodes").iterdir())
    now = RunFollower(run, first).poll()
    assert others
    assert [one.name for one in now.nodes] == [first]
    assert now.run_id == RunFollower(run).poll().run_id
