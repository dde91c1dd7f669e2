"""The global tier: what goes there, and what comes back when nothing nearer can be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.policy.manifest import copy_name
from outlast.errors import CheckpointError, ExitCode, TierUnreachable
from tests.support.jobs import Job, save_steps
from tests.support.launching import until
from tests.support.memory_nodes import Node, remove, train_and_save
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
    return any(note["reason"].startswith(copy_name(step, 1)) for note in node.logged("note"))


def lose(node: Node) -> None:
    """Take its saver, its memory and its disk away."""
    node.saver.kill()
    node.saver.hang_up()
    remove(node.memory.root)
    shutil.rmtree(node.durable)


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


def test_a_store_that_refuses_is_no_reason_to_start_anew(
    node: Node, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(server)
    bucket.create()
    expired = b"<Error><Code>ExpiredToken</Code></Error>"
    with proxy(server, lambda *_: (403, expired)) as (port, _):
        use_s3(monkeypatch, port)
        with pytest.raises(CheckpointError):
            node.join(Job(1), **store(bucket))
        content = save_steps(node.durable, 3)
        job = Job(99)
        saver = node.join(job, generation=2, **store(bucket))
        assert job.content() == content[3]
        train_and_save(saver, job, range(4, 6), lambda _: True)
        assert saver.durable(5)
        until(lambda: any(bucket.url in note["reason"] for note in node.logged("note")), "word of it")
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
        with pytest.raises(TierUnreachable, match=r"step-000000002\.g1") as found:
            node.join(Job(99), generation=2, **store(bucket))
        assert found.value.exit_code == ExitCode.PREEMPTED
        content = save_steps(node.durable, 1)
        node.join(job, generation=3, **store(bucket))
    assert job.content() == content[1]


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
