"""What lies between the end of one owner of the memory folder and the beginning of the next."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, Manifest, copy_name
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, staged_file
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer import __main__ as writer_main
from outlast.checkpoint.writer.__main__ import Predecessor
from outlast.checkpoint.writer.durable import seal
from outlast.checkpoint.writer_process import REMOVED, STILL, Owner, lock_holder, own
from outlast.config import CheckpointOptions
from outlast.errors import NoUsableCheckpoint, RunFolderUnusable
from outlast.ipc.processes import state_of
from tests.support.jobs import (
    DEADLINE,
    Job,
    save_steps,
    saver_process,
    saving,
    staged,
    together,
)
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save


class Pair:
    """Two ranks of one node, their memory folder and its saver."""

    def __init__(self, tmp_path: Path) -> None:
        self.durable = tmp_path / "checkpoints"
        self.memory = MemoryFolder(tmp_path / "memory")
        self.stage = Stage(self.memory.root)
        self.events = tmp_path / "events.jsonl"
        self.saver = saver_process(self.memory.root, self.events)

    def join(self, jobs: list[Job], generation: int = 1) -> list[Any]:
        """Restore as every rank; return what each got, a checkpointer or an error."""

        def part(exchange: Any) -> Checkpointer:
            settings = CheckpointOptions(timeout=DEADLINE)
            found = saving(
                self.durable,
                self.memory,
                self.saver.ensure,
                generation=generation,
                exchange=exchange,
                settings=settings,
            )
            found.restore(jobs[exchange.rank].state)
            return found

        return together(2, part, generation=generation)

    def joined(self, job: Job, generation: int = 1) -> Checkpointer:
        """Restore as the only rank of a job; return what to save with."""
        found = saving(
            self.durable,
            self.memory,
            self.saver.ensure,
            generation=generation,
            settings=CheckpointOptions(timeout=DEADLINE),
        )
        found.restore(job.state)
        return found


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def save(savers: list[Any], jobs: list[Job], step: int, durable: bool = False) -> None:
    for saver, job in zip(savers, jobs, strict=True):
        assert isinstance(saver, Checkpointer), saver
        job.train()
    assert all(staged(savers, jobs, Order(step, durable, "a test")))
    for saver in savers:
        saver.settle()


def test_a_rank_that_completes_a_state_after_the_owner_has_gone_still_has_it_saved(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1)
    until((pair.stage.tier.folder / copy_name(1, 1)).exists, "step 1 in memory")
    os.kill(pair.saver.pid, signal.SIGSTOP)
    save(savers, jobs, 2)
    (folder,) = pair.stage.staged.iterdir()
    late = folder / staged_file(1, 2)
    os.rename(late, aside := pair.memory.root / "late")
    pair.saver.hang_up()
    os.kill(pair.saver.pid, signal.SIGCONT)
    until(lambda: pair.durable.exists() and os.listdir(pair.durable), "step 1 on its way to disk")
    os.rename(aside, late)
    until(pair.saver.ended, "the end of the saver")
    assert copy_name(2, 1) in os.listdir(pair.durable)
    assert not pair.memory.root.exists()


def test_a_state_that_no_rank_completes_does_not_hold_the_saver(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1)
    save(savers[:1], jobs[:1], 2)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    assert os.listdir(pair.durable) == [copy_name(1, 1)]
    assert not pair.memory.root.exists()


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_last_copy_that_is_damaged_in_memory_is_not_written_again(pair: Pair, damage: str) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1)
    until((pair.stage.tier.folder / copy_name(1, 1)).exists, "step 1 in memory")
    if damage == "gone":
        (pair.stage.tier.folder / copy_name(1, 1) / "rank-00001-of-00002.safetensors").unlink()
    else:
        os.truncate(pair.stage.tier.folder / copy_name(1, 1) / MANIFEST, 63)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    lost = [json.loads(line) for line in pair.events.read_text().splitlines()]
    assert [one["step"] for one in lost if one["kind"] == "save_lost"] == [1]


def test_memory_stays_until_the_copy_on_disk_is_whole(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1, durable=True)
    assert savers[0].durable(1)
    place = pair.durable / copy_name(1, 1) / "rank-00001-of-00002.safetensors"
    os.truncate(place, 100)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    contents = [job.content() for job in jobs]
    others = [Job(7), Job(8)]
    pair.join(others, 2)
    assert [job.content() for job in others] == contents


def test_memory_that_may_not_be_committed_is_removed_when_the_job_went_on_elsewhere(pair: Pair) -> None:
    lease = pair.durable.parent / "lease"  # nobody writes it: this node has lost contact with the job
    pair.saver = saver_process(pair.memory.root, pair.durable.parent / "events.jsonl", lease=str(lease))
    job = Job(0)
    save([pair.joined(job)], [job], 3)
    until((pair.stage.tier.folder / copy_name(3, 1)).exists, "step 3 in memory")
    save_steps(pair.durable, 2, generation=2)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    assert copy_name(3, 1) not in os.listdir(pair.durable)
    assert not pair.memory.root.exists()


def test_a_rank_that_saves_after_the_owner_has_gone_leaves_nothing_in_memory(pair: Pair) -> None:
    """Without a launcher nobody is there who would remove it: the owner is local rank 0."""
    jobs = [Job(0), Job(1)]
    savers = pair.join(jobs)
    save(savers, jobs, 1)
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")
    assert not pair.memory.root.exists()
    assert not savers[1].stage(Order(2, False, "a test"), jobs[1].state)
    assert not pair.memory.root.exists()


def test_ranks_that_are_being_killed_with_the_owner_leave_nothing_in_memory(pair: Pair) -> None:
    """One that makes a buffer meanwhile must not keep the folder."""
    jobs = [Job(0), Job(1)]
    save(pair.join(jobs), jobs, 1)
    over = threading.Event()

    def make_buffers() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                pair.stage.pool.mkdir()
                (pair.stage.pool / "0").mkdir()

    rank = threading.Thread(target=make_buffers)
    rank.start()
    try:
        pair.saver.hang_up()
        until(lambda: pair.memory.members() is None, "the beginning of the removal")
        assert not over.wait(0.2), "what a busy machine may let it live"
    finally:
        over.set()
        rank.join()
    until(pair.saver.ended, "the end of the saver")
    assert not pair.memory.root.exists()


def test_what_a_writer_left_that_was_killed_while_it_removed_the_folder_is_removed(pair: Pair) -> None:
    root = pair.memory.root
    left, other = (root.with_name(f"{REMOVED}0123abcd-{name}") for name in (root.name, f"{root.name}-2"))
    other.mkdir(mode=0o700)
    (left / "pool" / "0").mkdir(parents=True, mode=0o700)
    left.chmod(0o700)
    pair.saver.ensure()
    writer = pair.saver.pid
    assert writer > 0
    os.kill(writer, signal.SIGKILL)
    until(pair.saver.ensure, "the next writer")
    until(lambda: not left.exists(), "the removal of what the one before had left")
    assert other.exists(), "it is of another folder"
    pair.saver.hang_up()
    until(pair.saver.ended, "the end of the saver")


def test_ranks_that_come_while_the_memory_folder_is_removed_are_served_all_the_same(pair: Pair) -> None:
    over = threading.Event()

    def remove() -> None:
        for _ in range(200):
            shutil.rmtree(pair.memory.root, ignore_errors=True)
            if over.wait(0.0005):
                return

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        jobs = [Job(0), Job(1)]
        savers = pair.join(jobs)
    finally:
        over.set()
        remover.join()
    assert all(isinstance(one, Checkpointer) for one in savers), savers


def test_two_ranks_whose_only_copy_was_damaged_in_memory_never_start_anew(pair: Pair) -> None:
    jobs = [Job(0), Job(1)]
    save(pair.join(jobs), jobs, 1)
    copy = pair.stage.tier.folder / copy_name(1, 1)
    until(copy.exists, "step 1 in memory")
    with open(copy / "COMMIT", "r+b") as file:
        file.write(bytes(16))
    for generation in range(2, 5):
        answers = pair.join([Job(7), Job(8)], generation)
        assert [type(one) for one in answers] == [NoUsableCheckpoint] * 2, answers


def test_no_rank_drops_a_damaged_copy_from_memory_before_it_is_written_down(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, name, seen = [Job(0), Job(1)], copy_name(1, 1), []
    save(pair.join(jobs), jobs, 1)
    copy = pair.stage.tier.folder / name
    until(copy.exists, "step 1 in memory")
    os.truncate(copy / "rank-00001-of-00002.safetensors", 100)
    discard = DirectoryTier.discard

    def looked_at(tier: DirectoryTier, gone: str) -> None:
        seen.append((pair.durable / "quarantine" / f"{name}.memory.reason.json").exists())
        discard(tier, gone)

    monkeypatch.setattr(DirectoryTier, "discard", looked_at)
    answers = pair.join([Job(7), Job(8)], 2)
    assert [type(one) for one in answers] == [NoUsableCheckpoint] * 2, answers
    assert seen
    assert all(seen), "a rank that is killed then leaves no trace, and the next start would be a fresh one"


def test_a_memory_folder_that_is_removed_does_not_end_lazy_training(pair: Pair) -> None:
    job = Job(0, width=600)
    found = saving(
        pair.durable,
        pair.memory,
        pair.saver.ensure,
        settings=CheckpointOptions(timeout=DEADLINE, staging="lazy"),
    )
    found.restore(job.state)
    for step in range(1, 20):
        job.train()
        found.stage(Order(step, False, "a test"), job.state)
        shutil.rmtree(pair.memory.root, ignore_errors=True)


def test_a_step_that_was_lost_before_training_went_back_is_saved_when_it_comes_again(pair: Pair) -> None:
    job = Job(0)
    found = pair.joined(job)
    save([found], [job], 1, durable=True)
    assert found.durable(1)
    lost = pair.stage.tier.folder / copy_name(2, 1)
    save([found], [job], 2)
    until(lost.exists, "step 2 in memory")
    shutil.rmtree(lost)
    restored = found.restore(job.state)
    assert restored is not None
    assert restored.step == 1
    save([found], [job], 2)
    until(lost.exists, "step 2 in memory")


@pytest.mark.parametrize("late", ["begins", "ends"])
def test_a_saver_whose_owner_has_gone_leaves_the_folder_to_the_next(pair: Pair, late: str) -> None:
    job, events = Job(0), pair.durable.parent / "events.jsonl"
    first = pair.saver
    pair.memory.make()
    first.ensure()
    if late == "ends":
        save([pair.joined(job)], [job], 1)
        until((pair.stage.tier.folder / copy_name(1, 1)).exists, "step 1 in memory")
    os.kill(first.pid, signal.SIGSTOP)
    root = pair.memory.root.stat()
    first.hang_up()
    pair.saver = saver_process(pair.memory.root, events)
    pair.saver.ensure()
    seen = threading.Thread(target=lambda: os.kill(first.pid, signal.SIGCONT))
    seen.start()
    found = pair.joined(job, 2)
    start = 1 if late == "ends" else 0
    save([found], [job], start + 1, durable=True)
    save([found], [job], start + 2)
    until(first.ended, "the end of the first saver")
    assert found.durable(start + 1)
    assert os.path.samestat(pair.memory.root.stat(), root)


def test_a_saver_that_is_stopped_and_whose_owner_has_gone_is_ended_by_the_next(pair: Pair) -> None:
    """The launcher was killed while its writer stood still: nobody else ends it, and it holds the lock."""
    job, events = Job(0), pair.durable.parent / "events.jsonl"
    first = pair.saver
    save([pair.joined(job)], [job], 1)
    until((pair.stage.tier.folder / copy_name(1, 1)).exists, "step 1 in memory")
    content = job.content()
    os.kill(pid := first.pid, signal.SIGSTOP)
    first.hang_up()
    pair.saver = saver_process(pair.memory.root, events)
    pair.saver.ensure()
    until(first.ended, "the end of the first saver")
    found = pair.joined(other := Job(7), 2)
    assert other.content() == content
    save([found], [other], 2, durable=True)
    assert found.durable(2)
    assert f"pid {pid})" in events.read_text()


HOLDER = """
import fcntl, os, sys, time
fcntl.lockf(os.open(sys.argv[1] + "/lock", os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
print(flush=True)
while True:
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    ("who", "ended", "reported"),
    [
        ("stopped", True, 1),
        ("in the kernel", False, 2),
        ("runs", False, 0),
        ("with an owner", False, 0),
        ("no writer", False, 0),
    ],
)
def test_only_a_writer_that_stands_still_without_an_owner_is_ended(
    tmp_path: Path, who: str, ended: bool, reported: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if who == "in the kernel":  # SIGKILL does not end it
        monkeypatch.setattr(writer_main, "kill_if", lambda pid, is_meant: is_meant(pid))
    root = tmp_path / "memory"
    first, _ = own(root)
    owner, byte = own(root)
    program = HOLDER if who == "no writer" else f"# outlast.checkpoint.writer\n{HOLDER}"
    with subprocess.Popen([sys.executable, "-c", program, root], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            if who != "runs":
                process.send_signal(signal.SIGSTOP)
                until(lambda: state_of(process.pid) == "T", "the stop")
            if who != "with an owner":
                os.close(first)
            reports: list[str] = []
            found = Predecessor(root, root / "lock", byte, reports.append)
            assert lock_holder(root / "lock") == process.pid
            for now in (0.0, 5.0, STILL + 1, 2 * STILL, 3 * STILL, 4 * STILL):
                before = switches(process.pid)
                found.look(now)
                if who == "runs":
                    until(lambda: switches(process.pid) != before, "a moment on a processor")  # noqa: B023
            assert len(reports) == reported
            if ended:
                assert process.wait(DEADLINE) == -signal.SIGKILL
                assert lock_holder(root / "lock") == 0
            assert (process.poll() is not None) == ended
        finally:
            process.kill()
            os.close(owner)


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), RunFolderUnusable("a link")], ids=str)
def test_a_writer_that_waits_outlives_locks_that_do_not_work_for_a_while(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockf, left = fcntl.lockf, [3]

    def refused(*given: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOLCK, "no locks")
        lockf(*given)

    def nobody_knows(_: object) -> int:
        raise error

    folder = MemoryFolder(tmp_path / "memory")
    descriptor, byte = own(folder.root)
    link, end = os.pipe()
    monkeypatch.setattr(writer_main.fcntl, "lockf", refused)
    monkeypatch.setattr(writer_main, "lock_holder", nobody_knows)
    predecessor = Predecessor(folder.root, folder.lock, byte, lambda _: None)
    lock = writer_main._only_saver(folder, Owner(link, byte), predecessor)
    for one in (lock, link, end, descriptor):
        assert one >= 0
        os.close(one)
    assert left[0] == -1


def switches(pid: int) -> list[str]:
    with open(f"/proc/{pid}/status") as file:
        return [line for line in file if "ctxt_switches" in line]


def test_a_commit_is_there_in_one_piece_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(os, "replace", ends)
    whole = Manifest("run", 1, 1, 1, {"dp": 1}, None, 0.0, (), {})
    with pytest.raises(InterruptedError):
        seal(tmp_path, whole)
    assert not (tmp_path / COMMIT).exists()


def test_a_copy_whose_commit_was_being_written_is_committed_by_the_next_saver(pair: Pair) -> None:
    job = Job(0)
    found = pair.joined(job)
    os.kill(pair.saver.pid, signal.SIGSTOP)
    save([found], [job], 1)
    (folder,) = pair.stage.staged.iterdir()
    pair.saver.kill()
    content = job.content()
    (folder / f".COMMIT.{pair.saver.pid}").write_bytes(b"")
    other = Job(7)
    pair.joined(other, 2)
    assert other.content() == content


def test_a_rank_that_asks_when_the_saver_has_ended_finds_its_state_on_disk(node: Node) -> None:
    """Without a launcher the saver is rank 0's, and ends with it; the others may still wait for its word."""
    job, owned = Job(0), [True]
    saver = saving(
        node.durable,
        node.memory,
        lambda: node.saver.ensure() if owned else "",
        settings=CheckpointOptions(timeout=DEADLINE),
    )
    saver.restore(job.state)
    content = train_and_save(saver, job, range(1, 3), lambda step: step == 2)
    saver.settle()
    owned.clear()
    node.cut_off(saver)
    assert not node.memory.root.exists()
    assert saver.durable(2)
    node.join(other := Job(9), generation=2)
    assert (node.loaded().step, other.content()) == (2, content[2])
