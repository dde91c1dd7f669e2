"""``outlast ckpt``: what it changes, and that it changes nothing while a run is there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.policy.copies import Copies
from outlast.checkpoint.policy.manifest import COMMIT, copy_name
from outlast.checkpoint.policy.trust import NON_FINITE, Faulted
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.tools import upkeep
from outlast.checkpoint.tools.listing import find
from outlast.compat import get_iteration_from_checkpoint
from outlast.errors import RunFolderBusy, UsageError
from outlast.observe.run_folder import RunFolder
from tests.support.ckpt_run import (
    NAMES,
    RUN_ID,
    TENSORS,
    ckpt,
    content,
    flip,
    lines,
    make_run,
    restored,
)
from tests.support.jobs import save_steps


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    root = tmp_path_factory.mktemp("made") / "run"
    return root, make_run(root)


@pytest.fixture
def run(made: tuple[Path, dict[int, bytes]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "run"))


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
    done = ckpt("ls", run)
    assert f"{NAMES[0]} is suspect to the run: non-finite ({NAMES[0]}) 0 steps after" in done.stdout
    assert json.loads(ckpt("show", run, NAMES[0], "--json").stdout)["trust"] == "suspect"
    done = ckpt("release", run, NAMES[0])
    assert (done.returncode, done.stdout) == (0, f"{NAMES[0]} is sound, and no suspect any more\n")
    after = content(run)
    assert {path for path in before if before[path] != after[path]} == {"job_state.json"}
    assert json.loads(ckpt("show", run, NAMES[0], "--json").stdout)["trust"] == "committed"
    assert ckpt("release", run, NAMES[0]).returncode == 2


def test_old_copies_are_removed_and_the_rest_stays_as_it_was(run: Path) -> None:
    ckpt("quarantine", run, NAMES[3], "--reason", "a test")
    before = content(run)
    done = ckpt("prune", run, "--keep-last-n", "1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [NAMES[2], NAMES[1]]
    assert content(run) == before
    done = ckpt("prune", run, "--keep-last-n", "1", "--keep-ancestors", "1")
    assert done.returncode == 0, done.stderr
    gone = [name for name in NAMES if f"{name} removed: " in done.stdout]
    assert len(gone) == 1
    assert content(run) == {path: octets for path, octets in before.items() if gone[0] not in path}
    assert ckpt("prune", run, "--keep-last-n", "1").returncode == 0
    assert sorted(os.listdir(run / "checkpoints")) == ["quarantine", NAMES[0]]
    assert "nothing is to be removed" in ckpt("prune", run, "--keep-last-n", "1").stdout


def test_nothing_is_removed_on_the_word_of_a_damaged_copy(run: Path) -> None:
    flip(run / "checkpoints" / NAMES[0] / TENSORS)
    before = content(run)
    done = ckpt("prune", run, "--keep-last-n", "1")
    assert done.returncode == 65
    assert f"{NAMES[0]} would be the newest that stays" in done.stderr
    assert content(run) == before


def test_copies_that_the_run_avoids_do_not_crowd_out_the_one_that_it_loads(run: Path) -> None:
    doubt(run, NAMES[0], NAMES[1])
    assert ckpt("prune", run, "--keep-last-n", "1").returncode == 0
    assert os.listdir(run / "checkpoints") == [NAMES[2]]


def test_a_copy_goes_to_the_quarantine_and_comes_back_as_it_was(run: Path) -> None:
    before = content(run)
    doubt(run, NAMES[0])
    assert ckpt("quarantine", run, NAMES[0], "--reason", "the loss rose").returncode == 0
    assert restored(run)[0] == 3
    again = ckpt("quarantine", run, NAMES[0], "--reason", "x")
    assert (again.returncode, "in quarantine already: the loss rose" in again.stderr) == (2, True)
    done = ckpt("release", run, NAMES[0])
    assert done.returncode == 0, done.stderr
    assert upkeep.avoided(find(str(run))) == frozenset()
    (run / "job_state.json").unlink()
    assert content(run) == before
    assert ckpt("release", run, NAMES[0]).returncode == 2
    assert restored(run)[0] == 40


def test_a_damaged_copy_stays_in_quarantine(run: Path) -> None:
    ckpt("quarantine", run, NAMES[0], "--reason", "a test")
    flip(run / "checkpoints" / "quarantine" / NAMES[0] / TENSORS)
    before = content(run)
    done = ckpt("release", run, NAMES[0])
    assert done.returncode == 65
    assert (TENSORS in done.stderr, "it stays in quarantine" in done.stderr) == (True, True)
    assert content(run) == before


def test_two_copies_of_one_name_are_told_apart(run: Path) -> None:
    aside = run / "checkpoints" / "quarantine"
    for reason in ("first", "second"):
        assert ckpt("quarantine", run, NAMES[0], "--reason", reason).returncode == 0
        if reason == "first":
            shutil.copytree(aside / NAMES[0], run / "checkpoints" / NAMES[0])
    (other,) = (path.name for path in aside.iterdir() if "~" in path.name and path.is_dir())
    assert [one["state"] for one in lines("ls", run)] == ["whole"] * 5
    assert ckpt("verify", run, f"quarantine/{other}", NAMES[0]).returncode == 0
    assert ckpt("release", run, other).returncode == 0
    assert (run / "checkpoints" / NAMES[0] / COMMIT).exists()
    assert not (aside / f"{other}.reason.json").exists()
    done = ckpt("release", run, f"quarantine/{NAMES[0]}")
    assert (done.returncode, "too; it stays" in done.stderr) == (2, True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


@pytest.mark.parametrize("holder", ["run", "saver"])
def test_a_live_run_is_looked_at_and_not_changed(holder: str, run: Path) -> None:
    assert ckpt("quarantine", run, NAMES[3], "--reason", "a test").returncode == 0
    flip(run / "checkpoints" / NAMES[2] / TENSORS)
    before = content(run)
    changes = [
        ("prune", run, "--keep-last-n", "1"),
        ("quarantine", run, NAMES[0], "--reason", "x"),
        ("release", run, NAMES[3]),
        ("verify", run, "--all", "--quarantine"),
        ("import", run / "run.json", "--format", "torch", "--to", run, "--step", "7"),
    ]
    folder = RunFolder(run)
    with memory_of(run) as staged, contextlib.ExitStack() as stack:
        if holder == "run":
            folder.claim()
            stack.callback(folder.release)
        else:
            stack.enter_context(locked(staged.lock))
        for words in changes:
            done = ckpt(*words)
            assert (done.returncode, done.stdout) == (64, ""), (words, done.stderr)
            assert "nothing was changed" in done.stderr
        assert content(run) == before
        assert [ckpt("ls", run).returncode, ckpt("show", run, NAMES[1]).returncode] == [0, 0]
        assert ckpt("verify", run, "--all").returncode == 65
        assert ckpt("prune", run, "--keep-last-n", "1", "--dry-run").returncode == 0
    assert ckpt("verify", run, "--all", "--quarantine").returncode == 65
    assert ckpt("verify", run, "--all").returncode == 0


def test_a_run_that_comes_while_bytes_are_read_is_not_turned_away(run: Path) -> None:
    folder, before = RunFolder(run), content(run)

    def start(_nbytes: int) -> None:
        folder.claim(RUN_ID)

    with pytest.raises(RunFolderBusy, match="a run goes on"):
        list(upkeep.prune(find(str(run)), upkeep.Keep(1), start))
    folder.release()
    assert content(run) == before


def test_what_a_run_changed_while_bytes_were_read_counts(run: Path) -> None:
    def come_and_go(_nbytes: int) -> None:
        doubt(run, NAMES[0])

    with pytest.raises(RunFolderBusy, match="a run was here meanwhile"):
        list(upkeep.prune(find(str(run)), upkeep.Keep(1), come_and_go))
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
    with pytest.raises(UsageError, match=r"step-000000009.g1 .* name another copy"):
        get_iteration_from_checkpoint(str(memory.tier.folder / copy_name(9, 1)))
    with pytest.raises(UsageError, match="no such folder"):
        get_iteration_from_checkpoint(str(folder.checkpoints / copy_name(7, 1)))
    folder.release()


@pytest.mark.parametrize(
    "name", ["iter_0000120", "step_120", "gpt--val_loss=2.31-step=120-consumed_samples=960.0-last"]
)
def test_the_step_of_a_checkpoint_of_another_system_is_that_of_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert get_iteration_from_checkpoint(str(tmp_path / name)) == 120
    with pytest.raises(UsageError, match="no such folder"):
        get_iteration_from_checkpoint(str(tmp_path / f"{name}1"))
