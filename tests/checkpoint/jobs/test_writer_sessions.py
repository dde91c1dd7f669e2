"""Work on disk that the committer of one session began, and that ends in the time of the next."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.policy.joint import Complete, Report, Written
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.replica.handshake import NOBODY
from outlast.checkpoint.tiers.memory_folder import Members, Peer, Stage, Status, Together, staged_file
from outlast.checkpoint.writer.committer import CopyCommitter
from outlast.checkpoint.writer.durable import Task, Tasks
from outlast.recovery.policy.events import Record, Saved, SaveLost

NAME = copy_name(40, 1)
COMPLETE = Complete(NAME, blocked=0.5, session="first")


def done() -> Complete:
    return COMPLETE


def fails() -> None:
    raise OSError(5, "refused")


@pytest.mark.parametrize("leads", [True, False], ids=["leads", "does not lead"])
@pytest.mark.parametrize(
    ("kind", "job", "alone"),
    [
        ("commit", done, False),
        ("commit", fails, False),
        ("commit", done, True),
        ("commit", fails, True),
        ("part", lambda: None, True),
        ("part", fails, True),
    ],
    ids=["commit", "failed commit", "commit-alone", "failed commit-alone", "part-alone", "failed part-alone"],
)
def test_it_counts_for_no_step_of_the_next_session(
    tmp_path: Path, kind: str, job: Any, alone: bool, leads: bool
) -> None:
    """The leading node changed, or one node is left: nobody waits for the result."""
    members = Members(2, "second", "run-a", 2, (0,) if leads else (1,), "", "", 3, loaded=copy_name(30, 1))
    members = dataclasses.replace(members, tier=str(tmp_path / "disk"), stage=str(tmp_path / "memory"))
    records: list[Record] = []
    rang = threading.Event()
    disk = Tasks("disk", rang.set)
    disk.begin(Task(kind, NAME, job))
    assert rang.wait(60.0)
    if not alone:
        nodes = (Peer("a", (0,), "127.0.0.1", 9), Peer("b", (1,), "127.0.0.1", 9))
        together = Together("a" if leads else "b", "127.0.0.1", nodes=nodes)
        members = dataclasses.replace(members, together=together)
    committer = CopyCommitter(members, disk, Status(1), records.append, NOBODY)
    try:
        committer.look()
        assert disk.task is None
        assert (committer.status.durable_step, committer.status.lost_step) == (-1, -1)
        saved = [(one.step, one.nbytes) for one in records if isinstance(one, Saved)]
        assert saved == ([(40, 0)] if leads and (kind, job) == ("commit", done) else [])
        if committer.team is not None and committer.team.leader is not None:
            assert committer.team.leader.answer.durable_step == -1  # step 35 of this session is to be saved
    finally:
        committer.close()


@pytest.mark.parametrize(
    "record", ['{"ranks": [0], "world_size": 1, "durable": true, "error": "refused"}', "{", "no JSON"]
)
def test_a_loss_that_is_found_after_the_owner_has_gone_is_recorded(tmp_path: Path, record: str) -> None:
    members = Members(1, "only", "run-a", 1, (0,), str(tmp_path / "disk"), str(tmp_path / "memory"), 3)
    records: list[Record] = []
    committer = CopyCommitter(members, Tasks("disk", lambda: None), Status(1), records.append, NOBODY)
    try:
        committer.look()
        folder = Stage(Path(members.stage)).staging(copy_name(7, 1), members.session)
        folder.mkdir(parents=True)
        (folder / staged_file(0, 1)).write_text(record)
        committer.finish()
        while not committer.idle:
            committer.look()
            committer.finish()
        assert [one.step for one in records if isinstance(one, SaveLost)] == [7]
        assert committer.status.lost_step == 7
    finally:
        committer.close()


def test_what_is_being_written_is_not_removed_as_a_file_of_an_earlier_session(tmp_path: Path) -> None:
    """Each of two nodes has a disk of its own; a copy ends while the next one is written here."""
    nodes = (Peer("a", (0,), "127.0.0.1", 9), Peer("b", (1,), "127.0.0.1", 9))
    together = Together("a", "127.0.0.1", shared=False, nodes=nodes)
    members = Members(2, "now", "run-a", 2, (0,), str(tmp_path / "disk"), str(tmp_path / "memory"), 3)
    members = dataclasses.replace(members, together=together)
    over, rang = threading.Event(), threading.Event()
    disk, records = Tasks("disk", rang.set), list[Record]()
    committer = CopyCommitter(members, disk, Status(1), records.append, NOBODY)
    try:
        committer.look()
        path = Path(members.tier) / f".tmp-{copy_name(8, 2)}-0123abcd"
        path.mkdir(parents=True)
        disk.begin(Task("write", copy_name(8, 2), lambda: over.wait() and None))
        assert committer.team is not None
        assert committer.team.leader is not None
        for node in "ab":
            committer.team.leader.hear(
                Report(node, "now", written=(Written(copy_name(7, 2), session="now"),))
            )
        committer._complete[copy_name(7, 2)] = Complete(copy_name(7, 2), session="now")
        committer.look()
        assert [one.step for one in records if isinstance(one, Saved)] == [7]
        assert path.exists()
        over.set()
        assert rang.wait(60.0)
        committer.look()
        assert not path.exists(), "nothing is written any more"
    finally:
        over.set()
        committer.close()


def test_a_node_that_has_left_counts_until_it_is_back() -> None:
    members = Members(0, "s", "run-a", 2, (0,), "", "", 3)
    found = []
    for generation, nodes in enumerate(("ab", "a", "ac", "ab", "a")):
        left = members.left_by(tuple(nodes))
        members = dataclasses.replace(members, generation=generation, nodes=tuple(nodes), left=left)
        found.append(left)
    assert found == [{}, {"b": 0}, {"b": 0}, {"c": 2}, {"c": 2, "b": 3}]
