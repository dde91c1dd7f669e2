"""Files between savers: real sockets, real processes, bits that flip, peers that die half-way."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.content.digest import CHUNK_BYTES, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name
from outlast.checkpoint.replica import frames
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import (
    NotUnderstood,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    Throttle,
    WrongBytes,
)
from outlast.checkpoint.replica.server import PeerServer, Terms
from outlast.checkpoint.tiers.tier import DirectoryTier
from tests.support.peer_node import (
    COMMITTED,
    COPY,
    LOOPBACK,
    SHARD,
    TOKEN,
    Node,
    left_in,
    parcel,
    party,
    proxy,
    wait_for,
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    with node.server:
        yield node


def greeting(way: str) -> int:
    """Return how many bytes a side says before the first request or answer."""
    said = party("n0" if way == "up" else "n9").greeting(dials=way == "up")
    return 2 * frames.HEADER_BYTES + len(said.hello()) + len(said.proof())


def fetched(client: PeerClient) -> bytes:
    return b"".join(map(bytes, client.fetch("memory", COPY, SHARD)))


def flip(way: str, position: int, bit: int = 0x10) -> Callable[[str, int, bytearray], None]:
    def alter(found: str, at: int, data: bytearray) -> None:
        if found == way and at <= position < at + len(data):
            data[position - at] ^= bit

    return alter


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_a_file_that_is_fetched_has_the_bytes_and_the_digest_of_the_manifest(
    node: Node, seed: int, size: int
) -> None:
    content = random.Random(seed).randbytes(size)
    node.keep(content)
    tier = DirectoryTier(node.replica)
    temporary = tier.begin(COPY)
    found = tier.write_chunks(temporary, SHARD, node.client().fetch("memory", COPY, SHARD))
    assert found == file_digest(content)
    assert (node.replica / temporary / SHARD).read_bytes() == content


def test_a_copy_that_was_sent_is_a_copy_and_is_not_overwritten(node: Node, tmp_path: Path, seed: int) -> None:
    content = random.Random(seed).randbytes(2 * CHUNK_BYTES + 9)
    source = tmp_path / "source"
    source.write_bytes(content)
    assert node.client().send("n0", COPY, parcel(source)) == len(content) + 2 + len(COMMITTED)
    assert (node.replica / COPY / SHARD).read_bytes() == content
    assert left_in(node.replica / COPY) == [COMMIT, MANIFEST, SHARD]
    with pytest.raises(PeerRefused) as caught:
        node.client().send("n0", COPY, parcel(b"other"))
    assert caught.value.refusal is Refusal.EXISTS
    assert (left_in(node.replica), (node.replica / COPY / SHARD).read_bytes()) == ([COPY], content)
    with pytest.raises(PeerRefused, match="COMMIT"):
        node.client().send("n0", copy_name(121, 7), {SHARD: (b"", file_digest(b""))})


def test_a_file_that_is_wrong_where_it_lies_is_not_taken(node: Node) -> None:
    with pytest.raises(WrongBytes) as caught:
        node.client().send("n0", COPY, parcel(b"rotten" * 1000, file_digest(b"sound" * 1200)))
    mismatch = caught.value.mismatch
    assert (mismatch.file, mismatch.begin, mismatch.end) == (f"{COPY}/{SHARD}", 0, 6000)
    assert (mismatch.expected, mismatch.found) == (
        file_digest(b"sound" * 1200),
        file_digest(b"rotten" * 1000),
    )
    wait_for(lambda: left_in(node.replica) == [], "the replica to go")


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_flipped_bit_in_a_chunk_is_named_and_never_used(node: Node, seed: int, way: str) -> None:
    content = random.Random(seed).randbytes(4 * CHUNK_BYTES)
    node.keep(content)
    taken: list[bytes] = []
    with proxy(node.server.address, flip(way, 2 * CHUNK_BYTES + 5000)) as address:
        client = node.client(address=address)
        ways: dict[str, Callable[[], object]] = {
            "up": lambda: client.send("n0", COPY, parcel(content)),
            "down": lambda: taken.extend(map(bytes, client.fetch("memory", COPY, SHARD))),
        }
        with pytest.raises(WrongBytes) as caught:
            ways[way]()
    mismatch = caught.value.mismatch
    assert mismatch.file == f"{COPY}/{SHARD}"
    assert (mismatch.begin, mismatch.end) == (2 * CHUNK_BYTES, 3 * CHUNK_BYTES)
    assert len(mismatch.expected) == len(mismatch.found) == 16
    assert f"127.0.0.1:{address[1]}" in str(caught.value)
    assert content.startswith(b"".join(taken))
    wait_for(lambda: left_in(node.replica) == [], "the replica to go")
    assert node.is_well()


@pytest.mark.parametrize(
    ("way", "position", "bit", "message", "named"),
    [
        ("up", 24 + 40, 0x10, {"word": "a word"}, WrongBytes),
        ("down", 24 + 22, 0x10, {"word": "a word"}, WrongBytes),
        ("down", 7, 0x01, {"fail": True}, NotUnderstood),  # makes an answer of a refusal
    ],
)
def test_a_flipped_bit_makes_no_other_message(
    node: Node, way: str, position: int, bit: int, message: dict[str, object], named: type[PeerError]
) -> None:
    altered = flip(way, greeting(way) + position, bit)
    with proxy(node.server.address, altered) as address, pytest.raises(named):
        node.client(address=address).ask(message)


def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(node: Node, seed: int) -> None:
    draw = random.Random(seed)
    content = draw.randbytes(9000)
    node.keep(content)
    outcomes = []
    for way, position in [(way, at) for way in ("up", "down") for at in (*range(0, 900, 16), 2000, 9000)]:
        bit = 1 << draw.randrange(8)
        with proxy(node.server.address, flip(way, position, bit)) as address:
            try:
                found = fetched(node.client(address=address, timeout=2.0))
                assert found == content, (way, position, bit)
                outcomes.append("untouched")
            except PeerError as error:
                outcomes.append(type(error).__name__)
    assert {"WrongBytes", "NotUnderstood", "PeerRefused"} <= set(outcomes), outcomes
    assert node.is_well()


_SERVE = """
import sys
from pathlib import Path
from outlast.checkpoint.replica.handshake import Party
from outlast.checkpoint.replica.server import PeerServer
party = Party("n9", sys.argv[2], "r", 7)
server = PeerServer(("127.0.0.1", 0), party, {"memory": Path(sys.argv[1])}.get)
print(server.address[1], flush=True)
sys.stdin.read()
"""
_SEND = """
import sys
from outlast.checkpoint.content.digest import file_digest
from outlast.checkpoint.replica.handshake import Party
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import Throttle
def stop(seconds):
    print("held", flush=True)
    sys.stdin.read()
throttle = Throttle(1 << 20, wait=stop)
client = PeerClient(("127.0.0.1", int(sys.argv[1])), Party("n0", sys.argv[2], "r", 7), throttle=throttle)
client.send("n0", sys.argv[3], {name: (bytes(8 << 20), file_digest(bytes(8 << 20))) for name in sys.argv[4:]})
"""


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_server_that_is_killed_is_lost_and_its_successor_serves_the_file(node: Node) -> None:
    size = 96 * CHUNK_BYTES  # more than the kernel's buffers hold
    os.truncate(node.keep(b""), size)
    taken = 0
    with process(_SERVE, node.memory, TOKEN) as server:
        port = int(server.stdout.readline())  # type: ignore[union-attr]
        chunks = node.client(address=("127.0.0.1", port)).fetch("memory", COPY, SHARD)
        for chunk in itertools.islice(chunks, 3):
            taken += len(chunk)
        server.kill()
        server.wait()
        with pytest.raises(PeerLost) as caught:  # noqa: PT012
            for chunk in chunks:
                taken += len(chunk)
    assert 3 * CHUNK_BYTES <= taken < size
    assert all(part in str(caught.value) for part in (f":{port}", f"{COPY}/{SHARD}", str(taken)))
    assert fetched(node.client()) == bytes(size)


def test_a_client_that_is_killed_leaves_no_replica(node: Node) -> None:
    with process(_SEND, node.server.address[1], TOKEN, COPY, SHARD, MANIFEST, COMMIT) as client:
        assert client.stdout.readline() == b"held\n"  # type: ignore[union-attr]
        assert [name[:5] for name in left_in(node.replica)] == [".tmp-"]
        client.send_signal(signal.SIGKILL)
        wait_for(lambda: node.reports, "the server to notice")
    wait_for(lambda: left_in(node.replica) == [], "the replica to go")
    assert f"{COPY}/{SHARD}" in node.reports[0]
    assert node.is_well()


@given(
    st.floats(1, 1e10),
    st.integers(0, 1 << 24),
    st.lists(st.tuples(st.integers(0, 1 << 22), st.floats(0, 1e4)), max_size=30),
)
def test_a_rate_limit_lets_through_what_it_says_and_no_less(
    rate: float, burst: int, sends: list[tuple[int, float]]
) -> None:
    time, sent = FakeTime(), 0
    limit = Throttle(rate, burst, lambda: time.now)
    for nbytes, pause in sends:
        wait = limit.reserve(nbytes)
        sent += nbytes
        time.now += wait
        assert sent <= (burst + rate * time.now) * (1 + 1e-9) + 1e-3
        assert wait <= nbytes / rate * (1 + 1e-9) + 1e-9
        time.now += pause
    assert Throttle(None).reserve(1 << 40) == 0.0


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def throttle(self, rate: float) -> Throttle:
        return Throttle(rate, CHUNK_BYTES, lambda: self.now, self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_file_that_shrinks_while_it_is_served_is_an_error(node: Node) -> None:
    path = node.keep(b"")
    os.truncate(path, 96 * CHUNK_BYTES)  # more than the kernel's buffers hold
    chunks = node.client().fetch("memory", COPY, SHARD)
    next(chunks)
    os.truncate(path, 5)
    with pytest.raises(PeerRefused, match=SHARD):
        list(chunks)


class FullShelf(DirectoryTier):
    def _create(self, temporary: str, file: str) -> int:
        return os.open("/dev/full", os.O_WRONLY)


def test_a_client_that_is_refused_sends_no_more(node: Node) -> None:
    held: list[float] = []

    def wait(seconds: float) -> None:
        held.append(seconds)
        wait_for(lambda: reports, "the server to run into its full disk")

    reports: list[str] = []
    terms = Terms(report=reports.append)
    with PeerServer(
        LOOPBACK, party("n9"), lambda _: None, lambda *_: FullShelf(node.replica), terms=terms
    ) as full:
        throttle = Throttle(1 << 22, CHUNK_BYTES, wait=wait)
        client = node.client(address=full.address, throttle=throttle)
        with pytest.raises(PeerRefused, match="No space left") as caught:
            client.send("n0", COPY, parcel(bytes(20 * CHUNK_BYTES)))
    assert caught.value.refusal is Refusal.FULL
    assert len(held) < 5


def test_close_ends_all_threads_and_what_is_half_done(node: Node) -> None:
    with process(_SEND, node.server.address[1], TOKEN, COPY, SHARD, MANIFEST, COMMIT) as client:
        assert client.stdout.readline() == b"held\n"  # type: ignore[union-attr]
        ours = [one for one in threading.enumerate() if re.search(r"^listener$|\(_serve\)$", one.name)]
        assert len(ours) == 2, ours
        node.server.close()
        assert not any(one.is_alive() for one in ours)
    assert left_in(node.replica) == []
    with pytest.raises(PeerLost):
        node.client().ask({})
