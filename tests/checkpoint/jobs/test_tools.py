"""The tools behind ``outlast ckpt``: runs that come and go, doubts, and copies in memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.copies import NON_FINITE, Copies, Faulted
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.tools import upkeep
from outlast.checkpoint.tools.commands import main
from outlast.checkpoint.tools.listing import find, items
from outlast.compat import get_iteration_from_checkpoint
from outlast.errors import ExitCode, RunFolderBusy, UsageError
from outlast.fields import FORMAT_VERSION
from outlast.ipc.exchange import StoreExchange
from outlast.observe.run_folder import RunFolder
from tests.support.ckpt_run import NAMES, RUN_ID, TENSORS, ckpt, content, flip, lines, make_run
from tests.support.jobs import Job, checkpointer, save_steps, together


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    root = tmp_path_factory.mktemp("made") / "run"
    return root, make_run(root)


@pytest.fixture
def run(made: tuple[Path, dict[int, bytes]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "run"))


@pytest.mark.parametrize("aside", [False, True])
def test_where_no_copy_is_that_is_said_also_of_a_verification(
    aside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.claim()
    folder.release()
    folder.checkpoints.mkdir()
    if aside:
        (folder.checkpoints / "quarantine" / NAMES[0]).mkdir(parents=True)
    assert main(["verify", str(tmp_path), "--json"]) == ExitCode.OK
    assert capsys.readouterr().out == ""
    assert main(["verify", str(tmp_path)]) == ExitCode.OK
    verified = capsys.readouterr().out
    assert str(folder.checkpoints) in verified
    assert ("quarantine" in verified) is aside
    assert main(["ls", str(tmp_path)]) == ExitCode.OK
    assert (capsys.readouterr().out == verified) is not aside


def test_what_cannot_be_believed_is_listed_with_the_reason(run: Path) -> None:
    tier = run / "checkpoints"
    os.truncate(tier / NAMES[0] / TENSORS, 100)
    newer = commit_line(FORMAT_VERSION + 1, file_digest((tier / NAMES[1] / MANIFEST).read_bytes()))
    (tier / NAMES[1] / COMMIT).write_bytes(newer)
    (tier / NAMES[2] / MANIFEST).unlink()
    found = lines("ls", run)
    assert [one["state"] for one in found] == ["damaged", "incompatible", "damaged", "whole"]
    assert found[0]["created"] is not None
    assert [found[1]["created"], found[2]["created"]] == [None, None]
    assert str(FORMAT_VERSION + 1) in str(found[1]["reason"])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_damage_in_any_rank_is_found_and_a_terminal_is_told_of_every_byte(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(exchange: StoreExchange) -> bool:
        return checkpointer(tmp_path, exchange=exchange).save(3, Job(exchange.rank).state, "a test")

    assert together(3, part) == [True, True, True]
    (item,) = items(find(str(tmp_path)))
    read: list[int] = []
    monkeypatch.setattr(upkeep, "working", lambda *_, **__: contextlib.nullcontext(read.append))
    sound = upkeep.read_all(item)
    assert (sound.copy.state.value, sum(read)) == ("whole", sound.nbytes)
    assert len(read) >= 3
    flip(tmp_path / item.name / rank_files(rank, 3)[0])
    found = upkeep.read_all(item).copy
    assert found.damage is not None
    assert found.damage.file == rank_files(rank, 3)[0]


def doubt(run: Path, *names: str) -> None:
    """Leave what a launcher leaves to whom a fault came back after each of these copies was loaded."""
    copies = Copies()
    for name in names:
        copies.load(1, (name,), "", 1)
        copies.fault(Faulted(1, NON_FINITE, name, speaks=True))
    (run / "job_state.json").write_text(json.dumps({"format": 1, "copies": copies.state()}))


def test_a_suspect_is_shown_as_one_and_a_person_can_release_it(run: Path) -> None:
    doubt(run, NAMES[0])
    before = content(run)
    assert json.loads(ckpt("show", run, NAMES[0], "--json").stdout)["trust"] == "suspect"
    assert ckpt("release", run, NAMES[0]).returncode == 0
    after = content(run)
    assert {path for path in before if before[path] != after[path]} == {"job_state.json"}
    assert json.loads(ckpt("show", run, NAMES[0], "--json").stdout)["trust"] == "committed"
    assert ckpt("release", run, NAMES[0]).returncode == 2


def test_copies_that_the_run_avoids_do_not_crowd_out_the_one_that_it_loads(run: Path) -> None:
    doubt(run, NAMES[0], NAMES[1])
    assert ckpt("prune", run, "--keep-last-n", "1").returncode == 0
    assert os.listdir(run / "checkpoints") == [NAMES[2]]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (
            {"format": 1, "copies": {"version": 1, "copies": {}, "doubted": [], "diverged": []}},
            "version 1,.* 2",
        ),
        ({"format": 1, "copies": []}, ""),
        ({"format": 1}, ""),
        ([], ""),
    ],
)
def test_where_the_trust_in_copies_cannot_be_read_none_is_removed_or_released(
    run: Path, state: object, named: str
) -> None:
    (run / "job_state.json").write_text(json.dumps(state))
    before = content(run)
    prune = "prune", run, "--keep-last-n", "1"
    for words in (("release", run, NAMES[0]), prune, (*prune, "--dry-run")):
        done = ckpt(*words)
        assert (done.returncode, done.stdout) == (ExitCode.RUN_FOLDER_UNUSABLE, ""), done.stderr
        assert re.search(f"job_state.json.*{named}", done.stderr), done.stderr
    for looked_at in (("ls", run), ("show", run, NAMES[0])):
        done = ckpt(*looked_at, "--json")
        assert (done.returncode, json.loads(done.stdout.splitlines()[0])["trust"]) == (0, None)
        assert re.search(f"job_state.json.*{named}", done.stderr), done.stderr
    assert content(run) == before


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def memory_of(run: Path) -> Iterator[MemoryFolder]:
    root = default_root(RUN_ID, run)
    try:
        found = MemoryFolder(root)
        found.make()
        yield found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_a_run_whose_writer_is_still_at_work_is_not_changed(run: Path) -> None:
    before = content(run)
    with memory_of(run) as memory, locked(memory.lock):
        for words in (("prune", run, "--keep-last-n", "1"), ("quarantine", run, NAMES[0], "--reason", "x")):
            done = ckpt(*words)
            assert (done.returncode, done.stdout) == (64, ""), (words, done.stderr)
        assert content(run) == before
        assert ckpt("ls", run).returncode == 0


def prune_while(run: Path, happens: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prune a run, and have something happen while the copy that stays is read."""
    advance = contextlib.nullcontext(lambda _: happens())
    monkeypatch.setattr(upkeep, "working", lambda *_, **__: advance)
    target = find(str(run))
    with pytest.raises(RunFolderBusy):
        list(upkeep.prune(target, upkeep.plan(target, 1)))


def test_a_run_that_comes_while_bytes_are_read_is_not_turned_away(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = RunFolder(run), content(run)
    prune_while(run, lambda: folder.claim(RUN_ID), monkeypatch)
    folder.release()
    assert content(run) == before


def test_what_a_run_changed_while_bytes_were_read_counts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune_while(run, lambda: doubt(run, NAMES[0]), monkeypatch)
    assert set(NAMES) == set(os.listdir(run / "checkpoints"))


def test_a_copy_that_also_is_in_memory_is_not_set_aside_in_vain(run: Path) -> None:
    with memory_of(run) as staged:
        tier = Stage(staged.root).tier.folder
        shutil.copytree(run / "checkpoints" / NAMES[0], tier / NAMES[0])
        done = ckpt("quarantine", run, NAMES[0], "--reason", "x")
        assert (done.returncode, str(tier / NAMES[0]) in done.stderr) == (65, True)
        assert ckpt("quarantine", run, NAMES[1], "--reason", "x").returncode == 0
    assert ckpt("quarantine", run, NAMES[0], "--reason", "x").returncode == 0


def test_the_newest_whole_checkpoint_is_told_without_loading_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run_id = folder.claim()
    assert get_iteration_from_checkpoint(str(folder.root)) == 0
    save_steps(folder.checkpoints, 3, 5, run_id=run_id)
    assert get_iteration_from_checkpoint(str(folder.root)) == 5
    memory = Stage(tmp_path / "memory")
    memory.make()
    save_steps(memory.tier.folder, 9, run_id=run_id)
    folder.note_memory(memory.root)
    assert get_iteration_from_checkpoint(str(folder.root)) == 9
    assert get_iteration_from_checkpoint(str(memory.tier.folder / copy_name(9, 1))) == 9
    assert get_iteration_from_checkpoint(str(folder.checkpoints / copy_name(3, 1))) == 3
    (memory.tier.folder / copy_name(9, 1) / "COMMIT").unlink()
    assert get_iteration_from_checkpoint(str(folder.root)) == 5
    with pytest.raises(UsageError, match=r"step-000000009\.g1"):
        get_iteration_from_checkpoint(str(memory.tier.folder / copy_name(9, 1)))
    with pytest.raises(UsageError, match=r"step-000000007\.g1"):
        get_iteration_from_checkpoint(str(folder.checkpoints / copy_name(7, 1)))
    folder.release()


@pytest.mark.parametrize(
    "name", ["iter_0000120", "step_120", "gpt--val_loss=2.31-step=120-consumed_samples=960.0-last"]
)
def test_the_step_of_a_checkpoint_of_another_system_is_that_of_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert get_iteration_from_checkpoint(str(tmp_path / name)) == 120
    with pytest.raises(UsageError, match=re.escape(f"{name}1")):
        get_iteration_from_checkpoint(str(tmp_path / f"{name}1"))
