"""Copies in an object store: a real S3 server, a proxy that answers badly, writers that die half-way."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="object stores need the extra: pip install 'outlast[s3]'")
pytest.importorskip("moto.server", reason="the S3 server of these tests is moto: pip install 'moto[server]'")

from outlast.checkpoint.content.digest import CHUNK_BYTES, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, Manifest, copy_name, rank_files
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.object_access import Failure, Limits, ObjectStoreError, Store
from outlast.checkpoint.tiers.remote import ObjectTier, get
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.fields import DamagedCopy
from tests.support.jobs import DEADLINE, Job, checkpointer, save_steps
from tests.support.s3_bucket import (
    COPY,
    Answer,
    Bucket,
    ask,
    proxy,
    put,
    s3_server,
    verified,
    wait_for,
    written,
)

PARTS = Limits(connect=20, request=60, retries=3, retry_for=60, part_bytes=5 << 20, parts=2)
SHARD, DIGESTS, DOCUMENT = rank_files(0, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(server: int) -> Bucket:
    bucket = Bucket(server)
    bucket.create()
    return bucket


def saved(folder: Path) -> tuple[dict[str, bytes], Manifest]:
    """Save a real copy and return its files."""
    save_steps(folder, 5)
    files = {path.name: path.read_bytes() for path in (folder / COPY).iterdir()}
    return files, Manifest.from_json(files[MANIFEST])


def test_a_copy_comes_back_and_is_loaded(bucket: Bucket, tmp_path: Path) -> None:
    content = save_steps(tmp_path / "here", 5)
    files = {path.name: path.read_bytes() for path in (tmp_path / "here" / COPY).iterdir()}
    tier = bucket.tier()
    assert tier.names() == []
    put(tier, files)
    put_again = bucket.tier()
    put_again.commit(COPY, files[MANIFEST], files[COMMIT])
    assert {file: bucket.read(f"{COPY}/{file}") for file in files} == files
    assert tier.names() == [COPY]
    whole = inspect(DirectoryTier(tmp_path / "here"), COPY, None)
    assert whole.state is CopyState.WHOLE
    assert inspect(tier, COPY, None) == verified(tier) == whole

    there = DirectoryTier(tmp_path / "there")
    assert get(tier, COPY, there) == Manifest.from_json(files[MANIFEST]).nbytes
    assert {path.name: path.read_bytes() for path in (there.folder / COPY).iterdir()} == files
    job = Job(1)
    restored = checkpointer(there.folder, generation=2).restore(job.state)
    assert restored is not None
    assert (restored.step, job.content()) == (5, content[5])


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, (5 << 20) + 1, 3 * (5 << 20) + CHUNK_BYTES + 7])
def test_files_of_every_size_go_in_parts_and_come_back(
    bucket: Bucket, tmp_path: Path, seed: int, size: int
) -> None:
    files = written(random.Random(seed).randbytes(size))
    put(bucket.tier(PARTS), files)
    assert bucket.read(f"{COPY}/{SHARD}") == files[SHARD]
    get(bucket.tier(PARTS), COPY, DirectoryTier(tmp_path))
    assert (tmp_path / COPY / SHARD).read_bytes() == files[SHARD]
    assert verified(bucket.tier(PARTS)).state is CopyState.WHOLE


def test_what_comes_in_parts_of_any_size_has_the_digest_of_the_whole(tmp_path: Path, seed: int) -> None:
    draw, content = random.Random(seed), random.Random(seed).randbytes(2 * CHUNK_BYTES + 12345)
    tier = DirectoryTier(tmp_path)
    temporary = tier.begin(COPY)

    def deliver(take: Callable[[memoryview], None]) -> None:
        place = 0
        while place < len(content):
            size = draw.choice([1, 777, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
            take(memoryview(content)[place : place + size])
            place += size

    assert tier.receive(temporary, SHARD, deliver) == file_digest(content)
    assert (tmp_path / temporary / SHARD).read_bytes() == content


def test_a_flipped_bit_is_found_by_fetch_and_by_the_inventory(bucket: Bucket, tmp_path: Path) -> None:
    files, manifest = saved(tmp_path / "here")
    tier, entry = bucket.tier(), manifest.of_rank(0)[0]
    put(tier, files)
    bucket.flip(f"{COPY}/{SHARD}", entry.nbytes - 3)
    (tmp_path / "down").mkdir()
    with pytest.raises(DamagedCopy, match=f"{SHARD}.*{entry.digest}"):
        get(tier, COPY, DirectoryTier(tmp_path / "down"))
    assert os.listdir(tmp_path / "down") == []
    assert inspect(tier, COPY, None).state is CopyState.WHOLE
    found = verified(tier)
    assert (found.state, found.damage and found.damage.file) == (CopyState.DAMAGED, SHARD)

    bucket.write(f"{COPY}/{SHARD}", files[SHARD][:-1])
    with pytest.raises(DamagedCopy, match=f"{entry.nbytes}.*{entry.nbytes - 1}"):
        get(tier, COPY, DirectoryTier(tmp_path / "down"))
    assert os.listdir(tmp_path / "down") == []
    for file in (MANIFEST, COMMIT):
        bucket.write(f"{COPY}/{SHARD}", files[SHARD])
        bucket.flip(f"{COPY}/{file}", len(files[file]) // 2)
        damaged = inspect(tier, COPY, None)
        assert (damaged.state, damaged.damage and damaged.damage.file) == (CopyState.DAMAGED, file)
        bucket.write(f"{COPY}/{file}", files[file])


def test_without_commit_there_is_no_copy_and_a_false_commit_is_not_put(bucket: Bucket) -> None:
    files, tier = written(b"x" * 100), bucket.tier()
    tier.upload(COPY, {SHARD: files[SHARD], DIGESTS: files[DIGESTS]})
    with pytest.raises(DamagedCopy, match=re.escape(DOCUMENT)):
        tier.commit(COPY, files[MANIFEST], files[COMMIT])
    tier.upload(COPY, {DOCUMENT: b"too short"})
    with pytest.raises(DamagedCopy, match=r"100.*9"):
        tier.commit(COPY, files[MANIFEST], files[COMMIT])
    with pytest.raises(DamagedCopy):
        tier.commit(COPY, files[MANIFEST] + b" ", files[COMMIT])
    with pytest.raises(DamagedCopy, match="6"):
        tier.commit(COPY, *(written(b"x" * 100, step=6)[file] for file in (MANIFEST, COMMIT)))
    assert bucket.paths() == [f"{COPY}/{file}" for file in (DIGESTS, DOCUMENT, SHARD)]
    assert tier.names() == []
    found = inspect(tier, COPY, None)
    assert (found.state, found.damage and found.damage.file) == (CopyState.DAMAGED, COMMIT)
    tier.upload(COPY, {DOCUMENT: files[DOCUMENT]})
    tier.commit(COPY, files[MANIFEST], files[COMMIT])
    assert tier.names() == [COPY]


WRITER = """
import sys
from pathlib import Path
from outlast.checkpoint.tiers.object_access import Limits
from outlast.checkpoint.tiers.remote import ObjectTier
url, folder, *options = sys.argv[1:]
files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
ends = files.pop("MANIFEST.json"), files.pop("COMMIT")
settings = dict(option.split("=", 1) for option in options) | {"allow_http": True}
tier = ObjectTier(url, settings, limits=Limits(part_bytes=5 << 20, parts=2))
tier.upload(Path(folder).name, files)
tier.commit(Path(folder).name, *ends)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("where", [f"/{SHARD}?partNumber=", f"/{MANIFEST}", f"/{COMMIT}"])
def test_a_writer_that_is_killed_leaves_no_copy(bucket: Bucket, tmp_path: Path, where: str) -> None:
    files = written(b"x" * (11 << 20))
    folder = tmp_path / COPY
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    reached, hold = threading.Event(), threading.Event()

    def answer(method: str, path: str) -> Answer | None:
        if method == "PUT" and where in path:
            reached.set()
            hold.wait(DEADLINE)
            return 500, b""
        return None

    with proxy(bucket.port, answer) as (port, _):
        options = [f"{key}={value}" for key, value in bucket.options(port).items() if key != "allow_http"]
        process = subprocess.Popen([sys.executable, "-c", WRITER, bucket.url, str(folder), *options])
        try:
            wait_for(lambda: reached.is_set() or process.poll() is not None, "the writer to come so far")
            assert process.poll() is None
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(DEADLINE)
            hold.set()
    tier = bucket.tier(PARTS)
    assert f"{COPY}/{COMMIT}" not in bucket.paths()
    assert tier.names() == []
    if SHARD not in where:
        assert f"{COPY}/{SHARD}" in bucket.paths()
        tier.commit(COPY, files[MANIFEST], files[COMMIT])
        assert (tier.names(), verified(tier).state) == ([COPY], CopyState.WHOLE)
        return
    assert bucket.paths() == [f"{COPY}/{file}" for file in (DIGESTS, DOCUMENT)]
    put(tier, files)
    assert tier.names() == [COPY]


def test_what_another_writer_has_committed_stays(bucket: Bucket) -> None:
    mine, yours = written(b"mine" * 100), written(b"your" * 100)
    first, second = bucket.tier(), bucket.tier()
    first.upload(COPY, {file: mine[file] for file in (SHARD, DIGESTS, DOCUMENT)})
    second.upload(COPY, {SHARD: yours[SHARD]})
    first.commit(COPY, mine[MANIFEST], mine[COMMIT])
    for act in (
        lambda: second.commit(COPY, yours[MANIFEST], yours[COMMIT]),
        lambda: second.upload(COPY, {DOCUMENT: yours[DOCUMENT]}),
    ):
        with pytest.raises(ObjectStoreError) as caught:
            act()
        assert caught.value.kind is Failure.CONFLICT
    for file in (MANIFEST, COMMIT, DOCUMENT):
        assert bucket.read(f"{COPY}/{file}") == mine[file]
    assert first.names() == [COPY]
    found = verified(first)
    assert (found.state, found.damage and found.damage.file) == (CopyState.DAMAGED, SHARD)


@pytest.mark.parametrize("alike", [True, False])
def test_of_two_writers_at_once_one_commits(tmp_path: Path, alike: bool) -> None:
    contents = [written(b"same"), written(b"same" if alike else b"else")]
    start, outcomes = threading.Barrier(2), [""] * 2

    def write(one: int) -> None:
        tier = ObjectTier(f"file://{tmp_path}/store")
        tier.upload(COPY, {file: contents[one][file] for file in (SHARD, DIGESTS, DOCUMENT)})
        start.wait(DEADLINE)
        try:
            tier.commit(COPY, contents[one][MANIFEST], contents[one][COMMIT])
        except ObjectStoreError as error:
            outcomes[one] = error.kind.value

    threads = [threading.Thread(target=write, args=(one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(outcomes) == ["", "" if alike else "conflict"]
    winner = contents[outcomes.index("")]
    with ObjectTier(f"file://{tmp_path}/store").open(COPY) as copy:
        assert {file: copy.read(file) for file in (MANIFEST, COMMIT)} == {
            file: winner[file] for file in (MANIFEST, COMMIT)
        }


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_quarantine_keeps_the_bytes_and_its_first_reason(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    tier = bucket.tier() if kind == "s3" else ObjectTier(f"{kind}://{tmp_path}/store")
    files, other = written(b"x" * 100), copy_name(6, 1)
    put(tier, files)
    tier.upload(other, {SHARD: b"y"})
    assert tier.quarantine(COPY, {"reason": "a bit flipped"}) == COPY
    tier.quarantine(COPY, {"reason": "seen again"})
    tier.quarantine(other, {"note": "without a reason"})
    assert tier.names() == []
    if kind == "s3":
        assert json.loads(bucket.read(f"quarantine/{COPY}.reason.json")) == {"reason": "a bit flipped"}
    assert verified(tier).state is CopyState.WHOLE
    with pytest.raises(ObjectStoreError) as caught:
        tier.quarantine(copy_name(9, 1), {"reason": "none"})
    assert caught.value.kind is Failure.MISSING
    with pytest.raises(ValueError):  # noqa: PT011 - an empty name
        tier.discard("")
    tier.discard(other)
    tier.discard(COPY)
    tier.discard(COPY)
    assert tier.names() == []
    if kind == "s3":
        assert bucket.paths() == []


def test_a_copy_of_more_files_than_a_listing_has(bucket: Bucket) -> None:
    files, tier = written(b"x" * 10, world=501), bucket.tier()
    for file, content in files.items():
        if file not in (MANIFEST, COMMIT):
            bucket.write(f"{COPY}/{file}", content)
    tier.commit(COPY, files[MANIFEST], files[COMMIT])
    assert inspect(tier, COPY, None).state is CopyState.WHOLE
    last = rank_files(500, 501)[0]
    ask(bucket.port, "DELETE", f"/{bucket.name}/runs/a/{COPY}/{last}")
    found = inspect(tier, COPY, None)
    assert (found.state, found.damage and found.damage.file) == (CopyState.DAMAGED, last)
    tier.discard(COPY)
    assert (tier.names(), bucket.paths()) == ([], [])


def test_a_timeout_of_the_work_itself_is_not_taken_for_one_of_the_store() -> None:
    store = Store("memory://", {}, "global", Limits(request=0.1, retry_for=0.1))

    async def works() -> None:
        raise OSError(errno.ETIMEDOUT, "a local disk")

    with pytest.raises(TimeoutError, match="a local disk") as local:
        store.run(works())
    assert not isinstance(local.value, ObjectStoreError)
    with pytest.raises(ObjectStoreError) as late:
        store.run(asyncio.sleep(DEADLINE))
    assert late.value.kind is Failure.TIMED_OUT
