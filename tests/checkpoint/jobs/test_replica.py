"""Files between savers: real sockets, real processes, bits that flip, peers that die half-way."""

from __future__ import annotations

import os
import random
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
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.replica import frames
from outlast.checkpoint.replica.files import file_digest as combined
from outlast.checkpoint.replica.frames import (
    NotUnderstood,
    PeerError,
    PeerLost,
    PeerRefused,
    RateLimit,
    Refusal,
    Throttle,
    WrongBytes,
)
from outlast.checkpoint.replica.server import PeerServer, Terms
from outlast.checkpoint.tiers.tier import DirectoryTier
from tests.support.peer_node import (
    COMMITTED,
    COPY,
    DOCUMENT,
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


def flip(way: str, position: int, bit: int = 0x10) -> Callable[[str, int, bytearray], None]:
    def alter(found: str, at: int, data: bytearray) -> None:
        if found == way and at <= position < at + len(data):
            data[position - at] ^= bit

    return alter


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_fetch_brings_the_bytes_and_the_digest_that_the_manifest_has(
    node: Node, seed: int, size: int
) -> None:
    content = random.Random(seed).randbytes(size)
    node.keep(content)
    memory = bytearray(size + 5)
    fetched = node.client().fetch("memory", COPY, SHARD, memory)
    assert (fetched.nbytes, fetched.digest) == (size, file_digest(content))
    assert memory == content + bytes(5)
    parts: dict[int, bytes] = {}
    begin, length = size // 3, size - size // 3
    node.client().fetch(
        "memory", COPY, SHARD, lambda at, chunk: parts.update({at: bytes(chunk)}), begin, length
    )
    assert sorted(parts) == list(range(begin, size, CHUNK_BYTES))
    assert b"".join(parts[at] for at in sorted(parts)) == content[begin:]


def test_parts_that_are_not_there_and_memory_that_is_too_small_are_refused(node: Node) -> None:
    node.keep(b"x" * 100)
    for offset, length in ((101, None), (0, 101), (-1, 2), (100, 1), (0, -1), (0.5, 1)):
        with pytest.raises(PeerRefused, match="from 0 to") as caught:
            node.client().fetch("memory", COPY, SHARD, bytearray(200), offset, length)  # type: ignore[arg-type]
        assert caught.value.refusal is Refusal.MALFORMED
    with pytest.raises(ValueError, match="memory for 100 bytes expected, 99 found"):
        node.client().fetch("memory", COPY, SHARD, bytearray(99))


def test_inventory_lists_copies_and_nothing_else(node: Node) -> None:
    node.keep(b"x" * 1000)
    node.keep(b"", copy_name(121, 7))
    (node.memory / copy_name(121, 7) / COMMIT).unlink()
    (node.memory / COPY / "notes.txt").write_text("not of the copy")
    (node.memory / COPY / rank_files(4, 8)[0]).symlink_to("/etc/passwd")
    (node.memory / copy_name(122, 7)).symlink_to(COPY)
    (node.memory / copy_name(123, 7)).write_text("no folder")
    (node.memory / ".tmp-step-000000124.g7-1").mkdir()
    first, second = node.client().inventory("memory")
    assert (first.name, first.commit) == (COPY, COMMITTED.decode())
    assert first.files == {SHARD: 1000, DOCUMENT: 2, MANIFEST: 2, COMMIT: len(COMMITTED)}
    assert (second.name, second.commit, COMMIT in second.files) == (copy_name(121, 7), "", False)
    assert node.client().inventory("replica") == []


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
    taken: dict[int, bytes] = {}
    with proxy(node.server.address, flip(way, 2 * CHUNK_BYTES + 5000)) as address:
        client = node.client(address=address)
        ways: dict[str, Callable[[], object]] = {
            "up": lambda: client.send("n0", COPY, parcel(content)),
            "down": lambda: client.fetch(
                "memory", COPY, SHARD, lambda at, chunk: taken.update({at: bytes(chunk)})
            ),
        }
        with pytest.raises(WrongBytes) as caught:
            ways[way]()
    mismatch = caught.value.mismatch
    assert mismatch.file == f"{COPY}/{SHARD}"
    assert (mismatch.begin, mismatch.end) == (2 * CHUNK_BYTES, 3 * CHUNK_BYTES)
    assert len(mismatch.expected) == len(mismatch.found) == 16
    assert f"127.0.0.1:{address[1]}" in str(caught.value)
    assert all(content[at : at + CHUNK_BYTES] == chunk for at, chunk in taken.items())
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
        memory, bit = bytearray(9000), 1 << draw.randrange(8)
        with proxy(node.server.address, flip(way, position, bit)) as address:
            try:
                node.client(address=address, timeout=2.0).fetch("memory", COPY, SHARD, memory)
                assert memory == content, (way, position, bit)
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
from outlast.checkpoint.replica.frames import RateLimit, Throttle
def stop(seconds):
    print("held", flush=True)
    sys.stdin.read()
throttle = Throttle(RateLimit(1 << 20), wait=stop)
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


def test_a_server_that_is_killed_is_lost_and_its_successor_gives_the_rest(node: Node, seed: int) -> None:
    size = 96 * CHUNK_BYTES  # more than the kernel's buffers hold
    path = node.keep(b"")
    with path.open("r+b") as file:
        file.truncate(size)
        for at in range(0, size, CHUNK_BYTES):
            os.pwrite(file.fileno(), random.Random(seed + at).randbytes(4096), at + 77)
    memory, digests = bytearray(size), []

    def take(at: int, chunk: memoryview) -> None:
        memory[at : at + len(chunk)] = chunk
        digests.append(file_digest(chunk))
        if len(digests) == 3:
            server.kill()
            server.wait()

    with process(_SERVE, node.memory, TOKEN) as server:
        port = int(server.stdout.readline())  # type: ignore[union-attr]
        with pytest.raises(PeerLost) as caught:
            node.client(address=("127.0.0.1", port)).fetch("memory", COPY, SHARD, take)
    done = caught.value.done
    assert done == len(digests) * CHUNK_BYTES
    assert 3 * CHUNK_BYTES <= done < size
    assert all(part in str(caught.value) for part in (f":{port}", f"{COPY}/{SHARD}", str(done)))
    rest = node.client().fetch("memory", COPY, SHARD, memoryview(memory)[done:], done)
    assert rest.nbytes == size - done
    assert file_digest(memory) == file_digest(path.read_bytes())


def test_a_client_that_is_killed_leaves_no_replica(node: Node) -> None:
    with process(_SEND, node.server.address[1], TOKEN, COPY, SHARD, MANIFEST, COMMIT) as client:
        assert client.stdout.readline() == b"held\n"  # type: ignore[union-attr]
        assert [name[:5] for name in left_in(node.replica)] == [".tmp-"]
        client.send_signal(signal.SIGKILL)
        wait_for(lambda: node.reports, "the server to notice")
    wait_for(lambda: left_in(node.replica) == [], "the replica to go")
    assert f"taking {COPY}/{SHARD}" in node.reports[0]
    assert node.is_well()


@given(
    st.floats(1, 1e10),
    st.integers(0, 1 << 24),
    st.lists(st.tuples(st.integers(0, 1 << 22), st.floats(0, 1e4)), max_size=30),
)
def test_a_rate_limit_lets_through_what_it_says_and_no_less(
    rate: float, burst: int, sends: list[tuple[int, float]]
) -> None:
    limit, now, sent = RateLimit(rate, burst), 1000.0, 0
    for nbytes, pause in sends:
        wait = limit.reserve(nbytes, now)
        sent += nbytes
        now += wait
        assert sent <= (burst + rate * (now - 1000.0)) * (1 + 1e-9) + 1e-3
        assert wait <= nbytes / rate * (1 + 1e-9) + 1e-9
        now += pause
    assert RateLimit(None).reserve(1 << 40, now) == 0.0


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def throttle(self, rate: float) -> Throttle:
        return Throttle(RateLimit(rate, CHUNK_BYTES), lambda: self.now, self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_both_sides_send_no_faster_than_their_limit(tmp_path: Path) -> None:
    served, sent = FakeTime(), FakeTime()
    node = Node(tmp_path, throttle=served.throttle(1 << 19))
    node.keep(bytes(5 * CHUNK_BYTES))
    with node.server:
        client = node.client(throttle=sent.throttle(1 << 20))
        client.fetch("memory", COPY, SHARD, bytearray(5 * CHUNK_BYTES))
        assert (served.now, sent.now) == (8.0, 0.0)
        client.send("n0", COPY, parcel(bytes(5 * CHUNK_BYTES)))
        assert (served.now, sent.now) == (8.0, pytest.approx(4.0, abs=0.001))


def test_a_file_that_shrinks_while_it_is_served_is_an_error(tmp_path: Path) -> None:
    node = Node(
        tmp_path, throttle=Throttle(RateLimit(1 << 20, CHUNK_BYTES), wait=lambda _: os.truncate(path, 5))
    )
    path = node.keep(bytes(5 * CHUNK_BYTES))
    with node.server, pytest.raises(PeerRefused, match="it ends at") as caught:
        node.client().fetch("memory", COPY, SHARD, bytearray(5 * CHUNK_BYTES))
    assert caught.value.refusal is Refusal.FAILED


class FullShelf(DirectoryTier):
    def open_for_write(self, temporary: str, file: str) -> int:
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
        throttle = Throttle(RateLimit(1 << 22, CHUNK_BYTES), wait=wait)
        client = node.client(address=full.address, throttle=throttle)
        with pytest.raises(PeerRefused, match="No space left") as caught:
            client.send("n0", COPY, parcel(bytes(20 * CHUNK_BYTES)))
    assert caught.value.refusal is Refusal.FULL
    assert len(held) < 5


def test_close_ends_all_threads_and_what_is_half_done(node: Node) -> None:
    with process(_SEND, node.server.address[1], TOKEN, COPY, SHARD, MANIFEST, COMMIT) as client:
        assert client.stdout.readline() == b"held\n"  # type: ignore[union-attr]
        begun = threading.active_count()
        node.server.close()
        assert threading.active_count() == begun - 2
    assert left_in(node.replica) == []
    with pytest.raises(PeerLost):
        node.client().ask({})


def test_digests_are_those_of_the_checkpoint_format() -> None:
    assert frames.CHUNK_BYTES == CHUNK_BYTES
    assert combined([]) == file_digest(b"")
