"""What a saver refuses to its peers and to strangers: tokens, names, rubbish, silence, a full disk."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outlast import files
from outlast.checkpoint.content.digest import CHUNK_BYTES, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, copy_name, rank_files
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import (
    Channel,
    Kind,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    WrongBytes,
)
from outlast.checkpoint.replica.handshake import Credentials, greet
from outlast.checkpoint.replica.server import PeerServer
from outlast.errors import UsageError
from tests.support.agents import certificate
from tests.support.peer_node import (
    COPY,
    LOOPBACK,
    SHARD,
    TOKEN,
    Node,
    frame,
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


def test_a_silent_peer_and_no_peer_are_lost_in_time() -> None:
    with socket.create_server(LOOPBACK) as silent:
        client = PeerClient(silent.getsockname(), party(), timeout=0.2)
        with pytest.raises(PeerLost):
            client.ask({})
    with pytest.raises(PeerLost):
        client.ask({})


@pytest.mark.parametrize("token", ["", TOKEN + "x", TOKEN[:-1]])
def test_a_wrong_token_opens_nothing(node: Node, token: str) -> None:
    with pytest.raises(PeerRefused) as caught:
        node.client(token=token).ask({})
    assert caught.value.refusal is Refusal.TOKEN
    with pytest.raises(UsageError):
        PeerServer(("0.0.0.0", 0), party(token=""), lambda _: None)


def test_a_proof_that_is_none_opens_nothing(node: Node) -> None:
    with socket.create_connection(node.server.address, 10) as connection:
        channel = Channel(connection, "the server", 20.0)
        channel.send(Kind.HELLO, party().greeting(dials=True).hello())
        channel.receive(Kind.HELLO)
        channel.send_json(Kind.PROOF, {"proof": "0" * 64})
        with suppress(PeerLost):
            channel.send_json(Kind.REQUEST, {"op": "get", "folder": "memory"})
        with pytest.raises(PeerRefused) as caught:
            channel.receive(Kind.PROOF)
    assert caught.value.refusal is Refusal.TOKEN


def test_the_token_never_travels_and_a_server_must_know_it_too(node: Node) -> None:
    seen = {"up": bytearray(), "down": bytearray()}
    with proxy(node.server.address, lambda way, _, data: seen[way].extend(data)) as address:
        node.client(address=address).ask({"word": "heard"})
    assert b"heard" in seen["up"]
    assert TOKEN.encode() not in seen["up"] + seen["down"]
    with socket.create_server(LOOPBACK) as listener:

        def impostor() -> None:
            with listener.accept()[0] as connection, suppress(PeerError):
                channel = Channel(connection, "client", 20.0)
                channel.receive(Kind.HELLO)
                channel.send(Kind.HELLO, party("n9").greeting(dials=False).hello())
                channel.send(Kind.PROOF, channel.receive(Kind.PROOF))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(PeerRefused) as caught:
            node.client(address=listener.getsockname()).ask({})
        thread.join(10)
    assert caught.value.refusal is Refusal.TOKEN


def test_names_reach_nothing_but_files_of_copies(node: Node, tmp_path: Path) -> None:
    node.keep(b"x")
    (tmp_path / "secret").write_text("secret")
    copies = ("..", ".", "", "/", "/etc", f"../memory/{COPY}", f"{COPY}/", f"{COPY}\0", "step-1.g1", 7, None)
    files = (
        "../../secret",
        "/etc/passwd",
        "",
        "..",
        "notes.txt",
        f"../{COPY}/{SHARD}",
        f"{SHARD}\n",
        f"{SHARD}\0",
    )
    outside = (
        rank_files(8, 8)[0],
        "rank-3-of-8.json",
        "rank-000003-of-00008.json",
        "COMMIT/",
        ["COMMIT"],
        None,
    )
    for copy, file in [(copy, SHARD) for copy in (*copies, f"step-{'9' * 5000}.g1")] + [
        (COPY, file) for file in (*files, *outside)
    ]:
        with pytest.raises(PeerRefused) as caught:
            list(node.client().fetch("memory", copy, file))  # type: ignore[arg-type]
        assert caught.value.refusal is Refusal.MALFORMED, (copy, file)
        with pytest.raises(PeerRefused) as caught:
            node.client().send("n0", copy, {str(file): (b"", file_digest(b"")), **parcel(b"")})  # type: ignore[arg-type]
        assert caught.value.refusal is Refusal.MALFORMED, (copy, file)
    for folder in ("..", "/", "", "local", str(node.memory)):
        with pytest.raises(PeerRefused, match="folder") as caught:
            list(node.client().fetch(folder, COPY, SHARD))
    assert (left_in(node.replica), left_in(tmp_path)) == ([], ["memory", "secret"])


def test_links_pipes_and_what_is_not_there_are_not_served(node: Node, tmp_path: Path) -> None:
    path = node.keep(b"")
    path.unlink()
    (tmp_path / "secret").write_text("secret")
    (node.memory / copy_name(121, 7)).symlink_to(node.memory / COPY)
    os.mkfifo(node.memory / COPY / rank_files(5, 8)[0])
    (node.memory / COPY / rank_files(6, 8)[0]).mkdir()
    path.with_name(rank_files(4, 8)[0]).symlink_to(tmp_path / "secret")
    tries = [(COPY, rank_files(rank, 8)[0]) for rank in (3, 4, 5, 6)]
    for copy, file in [*tries, (copy_name(121, 7), COMMIT), (copy_name(999, 7), COMMIT)]:
        with pytest.raises(PeerRefused) as caught:
            list(node.client().fetch("memory", copy, file))
        assert caught.value.refusal in (Refusal.MISSING, Refusal.MALFORMED), (copy, file)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: nobody\r\n\r\n", ""),
        (random.Random(1).randbytes(4096), ""),
        (frame(Kind.HELLO, bytes(32), version=2), "2"),
        (frame(Kind.HELLO, b"", length=0xFFFFFFFF), "4096"),
        (frame(Kind.HELLO, bytes(32)), "JSON"),
        (frame(Kind.REQUEST, b'{"op": "get", "folder": "memory"}'), "HELLO"),
        (frame(99, b""), "99"),
    ],
)
def test_strangers_are_shown_the_door(node: Node, said: bytes, named: str) -> None:
    with socket.create_connection(node.server.address, 10) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    wait_for(lambda: node.reports, "the server to report")
    assert named in node.reports[0]
    assert node.is_well()


def test_silent_and_slow_strangers_only_delay(tmp_path: Path) -> None:
    node = Node(tmp_path, timeout=1.5, connections=2)
    with node.server:
        silent = [socket.create_connection(node.server.address, 10) for _ in range(5)]
        assert node.client(timeout=60.0).ask({"are you": "well"})
        with socket.create_connection(node.server.address, 10) as slow:
            slow.settimeout(0.1)
            deadline, ended, drops = time.monotonic() + 60, False, iter(frame(Kind.HELLO, bytes(32)))
            while not ended:  # a byte now and then must not keep the connection
                assert time.monotonic() < deadline
                with suppress(TimeoutError):
                    try:
                        slow.send(bytes([next(drops)]))
                        ended = slow.recv(4096) == b""
                    except ConnectionError:
                        ended = True
            assert len(list(drops)) > 0
        wait_for(lambda: len(node.reports) >= 6, "all six to be given up")
        for each in silent:
            each.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_of_too_many_connections_that_prove_nothing_the_oldest_is_closed(
    tmp_path: Path, encrypted: bool
) -> None:
    files_of_tls = tuple(certificate(tmp_path).split(",")) if encrypted else ()
    known = Credentials(TOKEN, tls=files_of_tls).encryption()
    node = Node(tmp_path, unproven=3, tls=known)
    with node.server:
        silent = []
        for _ in range(5):
            silent.append(socket.create_connection(node.server.address, 10))
            assert node.client(tls=known).ask({"are you": "well"})
        ended = [one for one in silent if files.readable([one.fileno()], 0.0)]
        assert 2 <= len(ended) <= 3, "the last client may have had the place of one"
        assert ended == silent[: len(ended)]
        for each in silent:
            each.close()


def test_requests_that_make_no_sense_are_refused_and_the_server_lives(node: Node) -> None:
    bad = (
        b"no json",
        b"[]",
        b"[" * 100_000,
        b'{"op": ["get"]}',
        b'{"op": "message"}',
        b'{"op": "put", "files": 1}',
    )
    for payload in (*bad, b'{"op": "put", "copy": "step-000000120.g7", "files": [{"x": 1}]}', b"\x80\x04N."):
        with socket.create_connection(node.server.address, 10) as connection:
            channel = Channel(connection, "the server", 20.0)
            greet(channel, party())
            channel.send(Kind.REQUEST, payload)
            with pytest.raises(PeerRefused) as caught:
                channel.receive(Kind.ANSWER)
        assert caught.value.refusal is Refusal.MALFORMED, payload
    with socket.create_connection(node.server.address, 10) as connection:
        channel = Channel(connection, "the server", 20.0)
        greet(channel, party())
        connection.sendall(frame(Kind.REQUEST, b"", length=2 << 20))
        with pytest.raises(PeerRefused):
            channel.receive(Kind.ANSWER)
    with pytest.raises(ValueError, match="1048576"):
        node.client().ask({"long": "x" * (1 << 20)})
    with pytest.raises(PeerRefused, match="RuntimeError: the handler of this test"):
        node.client().ask({"fail": True})
    assert node.is_well()


def test_who_is_refused_hears_it_after_what_was_under_way(node: Node) -> None:
    with socket.create_connection(node.server.address, 10) as connection:
        channel = Channel(connection, "the server", 20.0)
        greet(channel, party())
        channel.send_json(Kind.REQUEST, {"op": "put", "source": "n0", "copy": "no copy"})
        connection.sendall(bytes(24 * CHUNK_BYTES))
        with pytest.raises(PeerRefused, match="no copy"):
            channel.receive(Kind.ANSWER)


def test_a_full_disk_is_named_and_left_clean(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        node = Node(tmp_path, replica=place / "replica")
        with node.server:
            with pytest.raises(PeerRefused, match="No space left") as caught:
                node.client().send("n0", COPY, parcel(bytes(24 * CHUNK_BYTES)))
            assert caught.value.refusal is Refusal.FULL
            wait_for(lambda: left_in(place / "replica") == [], "the replica to go")
            node.client().send("n0", COPY, parcel(bytes(1000)))
            assert left_in(place / "replica") == [COPY]
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_over_tls(tmp_path: Path) -> None:
    own, key, of_all = certificate(tmp_path).split(",")
    known = Credentials(TOKEN, tls=(own, key, of_all)).encryption()
    open_to_all = Credentials(TOKEN, tls=(own, key)).encryption()
    assert known is not None
    node = Node(tmp_path, tls=known)
    node.keep(bytes(3 * CHUNK_BYTES))
    with node.server:
        client = node.client(tls=known)
        assert sum(map(len, client.fetch("memory", COPY, SHARD))) == 3 * CHUNK_BYTES
        client.send("n0", COPY, parcel(bytes(3 * CHUNK_BYTES)))
        with pytest.raises(WrongBytes):
            client.send("n0", copy_name(121, 7), parcel(bytes(3 * CHUNK_BYTES), "0" * 32))
        assert node.client(tls=open_to_all).ask({"are you": "well"})
        others = dataclasses.replace(known, dials=ssl.create_default_context())
        others.dials.check_hostname = False
        with pytest.raises(PeerLost):
            node.client(tls=others).ask({})
        with pytest.raises(PeerLost):
            node.client().ask({})
        assert left_in(node.replica) == [COPY]
