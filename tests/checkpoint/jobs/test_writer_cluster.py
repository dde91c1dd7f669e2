"""Saving over several nodes: parts, replicas and commits, and what is left when nodes are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from outlast.checkpoint.load import fetching
from outlast.checkpoint.policy.manifest import COMMIT, copy_name
from outlast.checkpoint.policy.resolve import CopyState, CopyStatus, Mark
from outlast.checkpoint.replica.frames import PeerError
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers import tier
from outlast.checkpoint.tiers.inventory import verify
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.cluster.lease_file import LeaseFile, boot_time
from outlast.errors import CheckpointError, NoUsableCheckpoint
from outlast.recovery.policy.events import SaveLost
from tests.support.jobs import DEADLINE, Job, saver_process, staged
from tests.support.launching import until
from tests.support.memory_nodes import flip, remove
from tests.support.mounts import mounted, needs_root
from tests.support.teams import Team


@pytest.fixture
def team_of(tmp_path: Path) -> Callable[..., Team]:
    return lambda *nodes, **options: Team(tmp_path, nodes, **options)


class Replicas(Job):
    """Ranks that hold the same: every step depends on its number alone."""

    def train(self, steps: int = 1) -> list[float]:
        torch.manual_seed(self.scheduler.last_epoch)
        return super().train(steps)


@pytest.mark.parametrize(
    ("before", "after"), [("abc", "ab"), ("abc", "bc"), ("ab", "b"), ("ab", "acbd")], ids=lambda names: names
)
def test_another_number_of_nodes_loads_from_memory(
    before: str, after: str, team_of: Callable[..., Team]
) -> None:
    """Nodes are lost or come: the parts that are left in memory make a copy for another number of ranks."""
    team = team_of(*before, per_node=2, job=lambda seed: Replicas(3))
    team.start()
    team.train(2)
    team.replicated(2)
    replicated = min(node.status().replicated_step for node in team.nodes)
    for node in team.nodes:
        if node.name not in after:
            node.lose()
    team.have(*after)
    team.start()
    assert team.step >= replicated >= 2, team.notes()
    assert team.loaded().reason.endswith("from memory"), team.loaded()
    assert {job.content() for job in team.jobs} == {team.content[team.step][0]}
    assert not any(node.stage.joined.folder.exists() for node in team.nodes)
    team.train(2)


def test_a_node_that_comes_back_has_what_is_missing(team_of: Callable[..., Team]) -> None:
    """Without it nothing starts anew, however often it is tried."""
    team = team_of("a", "b", "c", job=lambda seed: Replicas(3))
    team.start(replication=False)
    team.train(2)
    for nodes in ("ab", "abd", "ab"):
        team.have(*nodes)
        with pytest.raises(NoUsableCheckpoint, match=r"2.*a node that has left"):
            team.start(replication=False)
    team.have("c", "b", "a")
    team.start(replication=False)
    assert team.step == 2, team.notes()
    assert {job.content() for job in team.jobs} == {team.content[2][0]}


def test_a_first_save_that_no_node_has_completed_is_a_new_start(team_of: Callable[..., Team]) -> None:
    """A node that left before that save began cannot have a part of it."""
    team = team_of("a", "b", "c")
    team.start(replication=False)
    team.have("a", "b", "d")
    team.start(replication=False)
    team.train(1)
    remove(team.known["d"].stage.tier.folder / copy_name(1, 2))
    team.start(replication=False)
    assert (team.step, "a new start" in team.notes()) == (0, True)


def test_saves_that_only_a_lost_writer_could_commit_take_no_buffers_from_later_ones(
    team_of: Callable[..., Team], tmp_path: Path
) -> None:
    team = team_of("a", "b", job=lambda seed: Replicas(3))
    leader, other = team.nodes
    lease = LeaseFile(tmp_path / "lease")
    leader.saver = saver_process(
        leader.memory.root, leader.events, credentials=leader.place.credentials, lease=str(lease.path)
    )
    lease.allow(1, boot_time() + 600)
    team.start(replication=False, buffers=3)
    team.train(1, durable=lambda _: True)
    until(lambda: team.on_disk() == [copy_name(1, 1)], "the copy on disk")
    lease.allow(0, 0.0)  # nobody may commit, as where the agent is stopped
    team.train(3, durable=lambda _: True)
    until(lambda: len(list(other.durable.glob(".tmp-*"))) >= 2, "parts on disk")
    team.have("c", "b")  # the ranks of b keep their numbers, and its buffers are of their files
    team.start(replication=False, buffers=3)
    assert team.step == 1, team.notes()
    team.train(6, durable=lambda _: True)
    until(lambda: all(node.status().durable_step == team.step for node in team.nodes), "word of the last")
    assert copy_name(team.step, 2) in team.on_disk()
    lease.close()


def test_a_writer_that_starts_again_leaves_what_it_has_reported_as_it_is(
    team_of: Callable[..., Team], tmp_path: Path
) -> None:
    team = team_of("a", "b")
    leader, other = team.nodes
    lease = LeaseFile(tmp_path / "lease")
    leader.saver = saver_process(
        leader.memory.root, leader.events, credentials=leader.place.credentials, lease=str(lease.path)
    )
    team.start(replication=False)
    team.train(1, durable=lambda _: True)

    def made(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
        """Return when each file was last changed, besides its number, which a new file may have again."""
        return {path.name: (path.stat().st_ino, path.stat().st_ctime_ns) for path in paths}

    def begun() -> dict[str, tuple[int, int]]:
        return made(other.durable.glob(".tmp-*/*"))

    ends = f".tmp-*/{COMMIT}"  # the last that is written
    until(lambda: any(path.stat().st_size for path in other.durable.glob(ends)), "all but the name of a copy")
    assert len(begun()) == 3 * 2 + 2
    before, pid = begun(), other.status().pid
    os.kill(other.saver.pid, signal.SIGKILL)
    until(other.saver.ended, "the end of the writer")
    other.saver.ensure()
    until(lambda: other.status().pid not in (0, pid) and other.status().port, "the next writer")
    lease.allow(1, boot_time() + 600)
    until(lambda: other.status().durable_step == 1, "word of the copy")
    files = made((other.durable / copy_name(1, 1)).iterdir())
    assert {name: files[name] for name in before} == before
    assert verify(DirectoryTier(other.durable), copy_name(1, 1), None).state is CopyState.WHOLE
    lease.close()


@pytest.mark.long
def test_a_node_that_has_written_very_many_parts_while_the_leader_was_stopped_is_heard_again(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b")
    leader, other = team.nodes
    team.start(replication=False, ckpt_fully_parallel_save=False, buffers=80)
    team.train(1)
    os.kill(leader.saver.pid, signal.SIGSTOP)
    for step in range(2, 70):
        assert team.savers[1].stage(Order(step, True, "a test"), team.jobs[1].state)
    until(lambda: len(list(other.durable.glob(".tmp-*"))) == 68, "parts on disk")
    os.kill(leader.saver.pid, signal.SIGCONT)
    team.step = 69
    team.train(1, durable=lambda _: True)
    until(lambda: all(node.status().durable_step == team.step for node in team.nodes), "word of the last")


@pytest.mark.parametrize("saves", [1, 3])
def test_without_the_node_that_has_a_part_there_is_no_new_start(
    saves: int, team_of: Callable[..., Team]
) -> None:
    team = team_of("a", "b", "c")
    team.start(replication=False)
    team.train(saves)
    team.known["c"].lose()
    team.have("a", "b")
    with pytest.raises(NoUsableCheckpoint, match=r"rank\(s\) 2.*a node that has left"):
        team.start(replication=False)


def test_a_copy_in_quarantine_is_no_reason_for_a_new_start_on_fewer_nodes(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b", "c")
    team.start(replication=False)
    team.train(1)
    team.have("a", "b")
    aside = Mark(f"memory/{copy_name(1, 1)}", CopyStatus.QUARANTINED, reason="NaN").to_text()
    with pytest.raises(NoUsableCheckpoint, match="NaN"):
        team.start(avoid=(aside,), replication=False)


def test_an_older_whole_copy_is_loaded_where_a_node_with_a_part_has_left(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b", "c", job=lambda seed: Replicas(3))
    team.start(replication=False)
    team.train(4, durable=lambda step: step == 2)
    until(lambda: team.on_disk() == [copy_name(2, 1)], "the copy on disk")
    team.known["c"].lose()
    team.have("a", "b")
    team.start(replication=False)
    assert team.step == 2
    assert "step-000000004.g1" in team.notes()
    assert "a node that has left" in team.notes()


def test_the_node_that_leads_may_be_the_one_that_is_lost(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start()
    team.replicated(1)
    team.nodes[0].lose()
    team.start()
    assert team.step >= 1
    assert team.right()


def test_without_replicas_a_lost_node_costs_what_was_not_on_disk(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start(replication=False)
    team.train(6, durable=lambda step: step == 2)
    until(lambda: team.on_disk() == [copy_name(2, 1)], "the copy on disk")
    team.nodes[1].lose()
    team.start(replication=False)
    assert (team.step, team.right()) == (2, True)


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_saver_goes_on_where_it_was(which: int, team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start()
    team.replicated(1)
    node = team.nodes[which]
    first = node.saver.pid
    os.kill(first, signal.SIGKILL)
    until(node.saver.ended, "its end")
    step = team.step + 2
    team.train(3, durable=lambda one: one == step)
    assert node.saver.pid != first
    until(lambda: copy_name(step, 1) in team.on_disk(), f"step {step} on disk")
    team.replicated(team.step)


def test_nodes_with_disks_of_their_own_keep_their_parts_there(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b", shared=False)
    team.start()
    team.train(4, durable=lambda step: step == 3)
    until(lambda: all(node.status().durable_step == 3 for node in team.nodes), "the copy on disk")
    team.end()
    team.start()
    assert (team.step, team.right()) == (4, True)
    assert team.loaded().reason.endswith("from local")


def test_when_the_job_ends_the_newest_copy_goes_to_disk_whole(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b", "c")
    team.start()
    team.train(5)
    team.end()
    assert copy_name(5, 1) in team.on_disk()
    assert not any(node.memory.root.exists() for node in team.nodes)
    team.start()
    assert (team.step, team.right()) == (5, True)


@pytest.mark.parametrize("shared", [True, False], ids=["one disk", "a disk each"])
def test_a_part_that_was_damaged_in_memory_takes_the_place_of_no_copy_on_disk(
    team_of: Callable[..., Team], shared: bool
) -> None:
    """The writer that brings it to disk is another one than that which took its digests."""
    team = team_of("a", "b", shared=shared)
    team.start(keep_last_n=1)
    team.train(1, durable=lambda _: True)
    until(lambda: all(node.status().durable_step == 1 for node in team.nodes), "the copy on disk")
    team.train(1)
    node = team.nodes[1]
    os.kill(node.saver.pid, signal.SIGKILL)
    until(node.saver.ended, "its end")
    flip(node.stage.tier.folder / copy_name(2, 1) / "rank-00001-of-00002.safetensors", 2000)
    node.saver.ensure()
    team.end()
    assert 2 in {one["step"] for node in team.nodes for one in node.logged("save_lost")}
    assert DirectoryTier(node.durable).names() == [copy_name(1, 1)]


@pytest.mark.long
def test_a_node_that_may_not_commit_any_more_finds_that_once_when_its_job_is_over(
    team_of: Callable[..., Team], tmp_path: Path
) -> None:
    """Not for each copy that all nodes have written: it would take so many times as long to end."""
    team = team_of("a", "b")
    leader, _ = team.nodes
    lease = str(tmp_path / "lease")  # nobody writes it
    credentials = leader.place.credentials
    leader.saver = saver_process(leader.memory.root, leader.events, credentials=credentials, lease=lease)
    team.start(replication=False)
    team.train(3, durable=lambda _: True)
    team.end()
    lost = leader.logged("save_lost")
    assert {one["step"] for one in lost} == {1, 2, 3}
    times = [one["clock"] for one in lost]
    assert max(times) - min(times) < 2 * tier._LEASE_PATIENCE
    assert team.on_disk() == []


@needs_root
@pytest.mark.parametrize("lost", [False, True], ids=["in memory", "lost before"])
@pytest.mark.parametrize("shared", [True, False], ids=["one disk", "a disk each"])
def test_a_disk_that_is_full_at_the_end_is_asked_again_for_the_last_copy(
    team_of: Callable[..., Team], shared: bool, lost: bool
) -> None:
    team = team_of("a", "b", shared=shared)
    disk = team.nodes[1].durable
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        team.start(max_failed_seconds=DEADLINE)
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(bytes(8 << 20))
        team.train(1, durable=lambda _: lost)
        until(lambda: not lost or all(node.status().lost_step == 1 for node in team.nodes), "the lost save")
        for saver in team.savers:
            saver.settle()
        for node in team.nodes:
            node.saver.hang_up()
        until(lambda: "is retried" in str(team.nodes[1].logged("note")), "a second attempt")
        ballast.unlink()
        for node in team.nodes:
            until(node.saver.ended, f"the end of {node.name}'s saver")
        assert DirectoryTier(disk).names() == [copy_name(1, 1)]
    assert len(team.nodes[0].logged("save_lost")) == lost
    assert [one["step"] for one in team.nodes[0].logged("saved")] == [1]
    assert not any(node.memory.root.exists() for node in team.nodes)


def test_a_durable_part_that_was_staged_for_several_nodes_holds_up_no_save_of_one_alone(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b", job=lambda seed: Replicas(3))
    team.start()
    team.train(1, durable=lambda _: True)
    alone, other = team.nodes
    until(lambda: other.status().durable_step == 1, "a copy on disk")
    os.kill(alone.saver.pid, signal.SIGSTOP)
    for job in team.jobs:
        job.train()
    assert staged(team.savers, team.jobs, Order(2, True, "a test")) == [True, True]
    for saver in team.savers:
        saver.settle()
    os.kill(alone.saver.pid, signal.SIGKILL)
    until(alone.saver.ended, "its end")
    other.lose()
    team.have("a")
    team.start()
    team.train(1, durable=lambda _: True)
    until(lambda: alone.status().durable_step == 2, "a copy of the node alone on disk")
    team.end()
    assert team.on_disk() == [copy_name(1, 1), copy_name(2, 2)]


def test_what_one_node_cannot_write_is_lost_for_all_and_said_with_its_reason(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b", shared=False)
    team.start()
    team.nodes[1].durable.write_bytes(b"not a folder")
    team.train(3, durable=lambda step: step == 2)
    until(lambda: all(node.status().lost_step == 2 for node in team.nodes), "word of it")
    assert all("node b: " in node.status().error for node in team.nodes)
    [lost] = team.nodes[0].logged("save_lost")
    assert "node b: " in lost["reason"]


def test_a_first_save_that_one_node_never_completed_is_no_checkpoint(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start(ckpt_fully_parallel_save=False)  # else node a would wait for node b
    team.jobs[0].train()
    assert team.savers[0].stage(Order(1, False, "a test"), team.jobs[0].state)
    until(lambda: team.nodes[0].status().memory_step == 1, "the part of node a")
    team.start()
    assert team.step == 0
    assert copy_name(1, 1) in team.notes()
    team.train(2)
    team.start()
    assert (team.step, team.right()) == (2, True)


def test_a_first_save_that_a_node_which_is_back_never_completed_is_no_checkpoint(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b")
    team.start(ckpt_fully_parallel_save=False)  # else node a would wait for node b
    team.jobs[0].train()
    assert team.savers[0].stage(Order(1, False, "a test"), team.jobs[0].state)
    until(lambda: team.nodes[0].status().memory_step == 1, "the part of node a")
    team.known["b"].lose()
    team.have("a")
    with pytest.raises(NoUsableCheckpoint, match="a node that has left"):
        team.start()
    team.have("a", "b")
    team.start()
    assert (team.step, "a new start" in team.notes()) == (0, True)


@pytest.mark.parametrize(
    ("part", "error"),
    [("_require_room", CheckpointError("no room")), ("_fetch", PeerError("refused")), ("_join", OSError(28))],
    ids=["room", "peer", "join"],
)
def test_a_copy_in_memory_that_does_not_come_is_no_reason_for_a_new_start(
    part: str, error: Exception, team_of: Callable[..., Team], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error

    team = team_of("a", "b", job=lambda seed: Replicas(3))
    team.start()
    team.replicated(1)
    team.nodes[1].lose()
    team.have("a", *(() if part == "_join" else "b"))
    with monkeypatch.context() as patch:
        patch.setattr(fetching, part, refused)
        with pytest.raises(NoUsableCheckpoint, match="start it again"):
            team.start()
    team.start()
    assert team.step >= 1
    assert {job.content() for job in team.jobs} == {team.content[team.step][0]}


def test_after_more_than_one_save_there_is_no_new_start_without_a_word(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start(replication=False)
    team.train(3)
    team.nodes[1].lose()
    with pytest.raises(NoUsableCheckpoint, match="rank 1"):
        team.start(replication=False)


def test_replicas_leave_the_rack(team_of: Callable[..., Team]) -> None:
    racks = {"a": {"rack": "r1"}, "b": {"rack": "r1"}, "c": {"rack": "r2"}, "d": {"rack": "r2"}}
    team = team_of("a", "b", "c", "d", domains=racks)
    team.start()
    team.replicated(2)
    for node in team.nodes[:2]:
        node.lose()
    team.start()
    assert team.step >= 2
    assert team.right()


@needs_root
def test_a_peer_without_room_costs_replicas_and_no_step(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start()
    team.replicated(1)
    with mounted(team.nodes[1].stage.replica("a").folder, "-t", "tmpfs", "-o", "size=4k", "tmpfs"):
        team.train(8)
        until(lambda: "No space left" in str(team.nodes[0].logged("note")), "word of it")
    team.replicated(team.step)
    assert team.step >= 8


@needs_root
def test_what_earlier_generations_left_never_takes_the_buffers_of_this_one(
    team_of: Callable[..., Team],
) -> None:
    team = team_of("a", "b")
    team.start()
    team.replicated(1)
    with mounted(team.nodes[1].stage.replica("a").folder, "-t", "tmpfs", "-o", "size=4k", "tmpfs"):
        for _ in range(3):
            team.train(7)
            team.start()
            assert team.right()


def test_a_durable_folder_that_is_removed_is_made_again(team_of: Callable[..., Team]) -> None:
    team = team_of("a", "b")
    team.start()
    team.train(2, durable=lambda step: step == 1)
    until(lambda: copy_name(1, 1) in team.on_disk(), "step 1 on disk")
    remove(team.nodes[0].durable)
    team.train(2, durable=lambda step: step == 3)
    until(lambda: team.on_disk() == [copy_name(3, 1)], "step 3 on disk")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_step_that_is_saved_twice_is_staged_once(team_of: Callable[..., Team], shared: bool) -> None:
    team = team_of("a", "b", shared=shared)
    team.start(keep_last_n=20)
    for step in range(1, 9):
        team.train(1, durable=lambda step: step % 3 == 0)
        for durable in (step % 2 == 0, False):
            for saver, job in zip(team.savers, team.jobs, strict=True):
                assert saver.stage(Order(step, durable, "again"), job.state)
    assert all(saver.durable(8) for saver in team.savers)
    until(lambda: team.on_disk() == [copy_name(step, 1) for step in (2, 3, 4, 6, 8)], "the copies on disk")
    team.start()
    assert (team.step, team.right()) == (8, True)
    lost = [record for record in team.records if isinstance(record, SaveLost)]
    assert not lost
    assert not [one["reason"] for node in team.nodes for one in node.logged("save_lost")]
