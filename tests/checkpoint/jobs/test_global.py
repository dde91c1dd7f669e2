"""The global tier: what goes there, and what comes back when nothing nearer can be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import (
    CheckpointError,
    CheckpointMismatch,
    ExitCode,
    NoUsableCheckpoint,
    TierUnreachable,
)
from outlast.recovery.policy.events import Note, Quarantined
from tests.support.jobs import Job, save_steps
from tests.support.launching import until
from tests.support.memory_nodes import Node, flip, remove, train_and_save
from tests.support.s3_bucket import SECRETS, Answer, Bucket, proxy, s3_server

TENSORS = "rank-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


def use_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Set what the store's own tools read."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "AKIDOFTHETEST",
        "AWS_SECRET_ACCESS_KEY": SECRETS[0],
        "AWS_SESSION_TOKEN": SECRETS[1],
    }.items():
        monkeypatch.setenv(name, value)


def store(bucket: Bucket) -> dict[str, Any]:
    return {"global_url": bucket.url, "global_options": {"allow_http": "true"}}


def uploaded(node: Node, step: int) -> bool:
    said = f"{copy_name(step, 1)} is in the global tier"
    return any(note["reason"].startswith(said) for note in node.logged("note"))


def lose(node: Node) -> None:
    """Take its saver, its memory and its disk away."""
    node.saver.kill()
    node.saver.hang_up()
    remove(node.memory.root)
    shutil.rmtree(node.durable)


def notes(node: Node) -> str:
    return "\n".join(record.reason for record in node.records if isinstance(record, Note))


def test_a_run_that_lost_its_node_and_its_disk_goes_on_from_s3(
    node: Node, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, server)
    bucket = Bucket(server)
    bucket.create()
    job = Job(0)
    saver = node.join(job, **store(bucket))
    content = train_and_save(saver, job, range(1, 6), lambda step: step in (2, 4))
    until(lambda: uploaded(node, 4), "the copy in the bucket")
    lose(node)
    other = Job(99)
    node.join(other, generation=2, **store(bucket))
    assert node.loaded().step == 4
    assert other.content() == content[4]
    assert "came from the global tier s3://" in notes(node)


def test_when_all_that_is_near_is_damaged_the_global_copy_is_loaded(node: Node, tmp_path: Path) -> None:
    url = str(tmp_path / "global")
    job = Job(0)
    saver = node.join(job, global_url=url, global_every=2)
    content = train_and_save(saver, job, range(1, 4), lambda _: True)
    assert saver.durable(3)
    until(lambda: uploaded(node, 1) and uploaded(node, 3), "the copies in the global tier")
    node.cut_off(saver)
    assert sorted(os.listdir(url)) == [copy_name(1, 1), copy_name(3, 1)]
    for step in (1, 2, 3):
        flip(node.durable / copy_name(step, 1) / TENSORS, 200)
    flip(Path(url) / copy_name(3, 1) / TENSORS, 200)
    other = Job(99)
    node.join(other, generation=2, global_url=url)
    assert node.loaded().step == 1
    assert other.content() == content[1]
    found = [record.checkpoint for record in node.records if isinstance(record, Quarantined)]
    assert sorted(found) == [f"global/{copy_name(3, 1)}", *(copy_name(step, 1) for step in (1, 2, 3))]


def test_a_damaged_global_copy_is_set_aside_and_the_older_one_comes(node: Node, tmp_path: Path) -> None:
    remote = DirectoryTier(tmp_path / "global")
    content = save_steps(remote.folder, 1, 2)
    flip(remote.folder / copy_name(2, 1) / TENSORS, 200)
    other = Job(99)
    node.join(other, generation=2, global_url=str(remote.folder))
    assert node.loaded().step == 1
    assert other.content() == content[1]
    assert copy_name(2, 1) in remote.quarantined()
    assert [one.checkpoint for one in node.records if isinstance(one, Quarantined)] == [
        f"global/{copy_name(2, 1)}"
    ]


def test_a_store_that_refuses_is_no_reason_to_start_anew(
    node: Node, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(server)
    bucket.create()
    expired = b"<Error><Code>ExpiredToken</Code></Error>"
    with proxy(server, lambda *_: (403, expired)) as (port, _):
        use_s3(monkeypatch, port)
        with pytest.raises(CheckpointError, match="does not start anew while it may have checkpoints there"):
            node.join(Job(1), **store(bucket))
        content = save_steps(node.durable, 3)
        job = Job(99)
        saver = node.join(job, generation=2, **store(bucket))
        assert job.content() == content[3]
        assert "cannot be looked into" in notes(node)
        train_and_save(saver, job, range(4, 6), lambda _: True)
        assert saver.durable(5)
        until(lambda: any("did not go to" in note["reason"] for note in node.logged("note")), "word of it")
    assert not any(SECRETS[0] in note["reason"] for note in node.logged("note"))


def test_a_store_that_falls_silent_is_for_a_later_attempt_or_for_what_is_near(
    node: Node, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(server)
    bucket.create()

    def busy(method: str, path: str) -> Answer | None:
        wanted = method == "GET" and path.endswith(TENSORS)
        return (503, b"<Error><Code>SlowDown</Code></Error>") if wanted else None

    with proxy(server, busy) as (port, _):
        use_s3(monkeypatch, port)
        job = Job(0)
        saver = node.join(job, **store(bucket))
        train_and_save(saver, job, range(1, 3), lambda _: True)
        until(lambda: uploaded(node, 2), "step 2 in the bucket")
        lose(node)
        with pytest.raises(
            TierUnreachable, match=r"step-000000002\.g1 did not come from the global tier"
        ) as found:
            node.join(Job(99), generation=2, **store(bucket))
        assert found.value.exit_code == ExitCode.PREEMPTED
        content = save_steps(node.durable, 1)
        node.join(job, generation=3, **store(bucket))
    assert job.content() == content[1]
    assert "did not come from the global tier" in notes(node)


def test_another_runs_copies_are_refused(node: Node, tmp_path: Path) -> None:
    save_steps(tmp_path / "global", 2, run_id="run-b")
    with pytest.raises(CheckpointMismatch, match="each run needs its own URL"):
        node.join(Job(1), global_url=str(tmp_path / "global"))
    assert not node.durable.exists()


def test_the_newest_and_older_ancestors_stay_in_the_global_tier(node: Node, tmp_path: Path) -> None:
    url = str(tmp_path / "global")
    job = Job(0)
    saver = node.join(job, global_url=url, keep_last_n=2, keep_ancestors=2)
    for step in range(1, 20):
        train_and_save(saver, job, range(step, step + 1), lambda _: True)
        until(lambda: uploaded(node, step), f"step {step} in the global tier")  # noqa: B023
    kept = [int(name[5:14]) for name in sorted(os.listdir(url))]
    assert kept[-2:] == [18, 19]
    assert [19 - step for step in kept[:-2]] == [3]


def test_nothing_near_and_nothing_far_that_can_be_used_is_a_refusal(node: Node, tmp_path: Path) -> None:
    remote = tmp_path / "global"
    save_steps(remote, 1)
    flip(remote / copy_name(1, 1) / TENSORS, 200)
    save_steps(node.durable, 2)
    flip(node.durable / copy_name(2, 1) / TENSORS, 200)
    with pytest.raises(NoUsableCheckpoint):
        node.join(Job(1), generation=2, global_url=str(remote))
