"""Who is not welcome at a channel: refused with one reason on both sides, at nobody else's cost."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata

import pytest
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve
from websockets.uri import WebSocketURI

from outlast.cluster.rpc.channel import CannotListen, Post
from outlast.cluster.rpc.handshake import PROTOCOL, Greeting, Hello, new_nonce
from outlast.errors import UsageError
from tests.support.posts import DEADLINE, TOKEN, Box, boxes, meet, still_well, stranger, text


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Box, Box]]:
    """Two that have met, and must not notice anything of what happens beside them."""
    with boxes("a", "b", patience=getattr(request, "param", DEADLINE)) as (a, b):
        meet(a, b)
        yield a, b
        still_well(a, b)
        still_well(b, a)


def test_another_token_is_refused_on_both_sides(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    with boxes("c", token="another") as (c,):
        c.post.knock(a.address, {"n": 1})
        c.until(lambda box: box.refused)
        a.until(lambda box: box.refused)
        assert a.post.counters().refused == c.post.counters().refused == {"token": 1}
        assert c.post.counters().dropped == 1
        a.post.send("c", {"n": 1}, c.address)
        c.until(lambda box: len(box.refused) == 2)
        a.until(lambda box: len(box.refused) == 2)


@pytest.mark.parametrize("other", [1, PROTOCOL + 1])
def test_another_protocol_is_refused_on_both_sides(pair: tuple[Box, Box], other: int) -> None:
    a, _ = pair
    with stranger(a, "c", protocol=other) as line, pytest.raises(ConnectionClosed) as caught:
        line.recv(DEADLINE)
    assert caught.value.rcvd is not None
    a.until(lambda box: box.refused)
    assert (caught.value.rcvd.code, [caught.value.rcvd.reason]) == (4002, a.refused)
    expected = (f"{PROTOCOL}", metadata.version("outlast"), f"{other}", "9.9.9")
    assert [one for one in expected if one not in a.refused[0]] == []


def test_a_stranger_that_is_dialled_proves_nothing(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    answers = ['{"protocol": 7}', "[]", "no JSON", f'{{"protocol": {PROTOCOL}, "name": "x"}}']

    def answer(line: ServerConnection) -> None:
        line.recv(DEADLINE)
        line.send(answers.pop(0))
        with suppress(ConnectionClosed):
            line.recv(DEADLINE)

    with serve(answer, "127.0.0.1", 0, compression=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for count in range(1, 5):
            _knock_until_refused(a, f"127.0.0.1:{server.socket.getsockname()[1]}", count)
        assert len(set(a.refused)) == 4, a.refused
        server.shutdown()


def _knock_until_refused(box: Box, address: str, count: int) -> None:
    def refused(box: Box) -> bool:
        box.post.knock(address, {"n": 1})
        return len(box.refused) >= count

    box.until(refused)


def test_no_websocket_is_refused_whoever_dials(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    for count, hello in enumerate(
        (b"\x16\x03\x01\x00\x05hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), 1
    ):
        with socket.create_connection(("127.0.0.1", a.post.port), DEADLINE) as line:
            line.sendall(hello)
            while line.recv(4096):
                pass
        a.until(lambda box, count=count: box.refused and box.post.counters().refused["no_websocket"] == count)
    assert len(a.refused) == 1, "the same refusal of the same host is told once a minute"
    with _listener(b"SSH-2.0-OpenSSH_9.6\r\n") as address:
        a.post.knock(address, {"n": 1})
        a.until(lambda box: len(box.refused) == 2)
    assert a.post.counters().refused["no_websocket"] == 3


def test_a_page_in_a_browser_is_refused(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    with (
        pytest.raises(InvalidStatus, match="403"),
        connect(f"ws://{a.address}/", origin="http://x", proxy=None),
    ):  # type: ignore[arg-type]
        pass
    a.until(lambda box: box.post.counters().refused == {"no_websocket": 1})


@pytest.mark.parametrize("pair", [3.0], indirect=True)
def test_who_says_nothing_or_little_by_little_is_given_up(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    silent = [socket.create_connection(("127.0.0.1", a.post.port), DEADLINE) for _ in range(20)]
    slow = socket.create_connection(("127.0.0.1", a.post.port), DEADLINE)
    slow.settimeout(0.05)
    with _listener(b"") as address, slow:
        a.post.knock(address, {"n": 1})
        with suppress(OSError):
            while _goes_on(slow):
                slow.send(b"G")
        for line in silent:
            with line:
                assert line.recv(1) == b""
        a.until(lambda box: box.post.counters().refused == {"deadline": 22} and len(box.refused) == 2)


def _goes_on(line: socket.socket) -> bool:
    try:
        return bool(line.recv(1))
    except TimeoutError:
        return True


def test_too_much_from_a_stranger_is_refused(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    with connect(f"ws://{a.address}/", compression=None, proxy=None, close_timeout=1) as line:
        _send_until_closed(line, "x" * (1 << 20))
    a.until(lambda box: box.refused)
    assert "16384" in a.refused[0]


def _send_until_closed(line: ClientConnection, payload: str | bytes) -> ConnectionClosed:
    try:
        line.send(payload)
        line.recv(DEADLINE)
    except ConnectionClosed as closed:
        return closed
    raise AssertionError("the connection was not closed")


@pytest.mark.parametrize(
    ("payload", "code", "reason"),
    [
        ("x" * ((4 << 20) + 1), 1009, "4194304"),
        (b"{}", 4003, "BINARY"),
    ],
    ids=["oversized", "binary"],
)
def test_a_peer_that_sends_rubbish_is_gone(
    pair: tuple[Box, Box], payload: str | bytes, code: int, reason: str
) -> None:
    a, _ = pair
    with stranger(a, "c") as line:
        line.send(text(n="good"))
        a.gets("c", "good")
        closed = _send_until_closed(line, payload)
    assert closed.rcvd is not None
    assert closed.rcvd.code == code
    a.until(lambda box: box.gone)
    (gone,) = a.gone
    assert gone.peer == "c"
    assert reason in gone.reason
    a.seen.remove(gone)


def test_pings_are_answered_and_cost_nothing(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    with stranger(a, "c") as line:
        assert line.ping().wait(DEADLINE)
        line.send(text(n="good"))
        a.gets("c", "good")
        a.post.drop("c")
        with pytest.raises(ConnectionClosed):
            line.recv(DEADLINE)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("no-such-host.invalid:29400", "no-such-host.invalid"),
        ("127.0.0.1", "'127.0.0.1'"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("x" * 300 + ":1", "xxx"),
        ("127.0.0.1:1", "Connection refused"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(pair: tuple[Box, Box], address: str, reason: str) -> None:
    a, _ = pair
    a.post.send("c", {"n": 1}, address)
    a.until(lambda box: box.refused)
    assert reason in a.refused[0]


def test_itself_and_the_wrong_name_are_refused(pair: tuple[Box, Box]) -> None:
    a, b = pair
    with boxes("c", "a") as (c, twin):
        c.post.knock(c.address, {"n": 1})
        c.until(lambda box: len(box.refused) == 2)
        c.post.send("d", {"n": 1}, b.address)
        c.until(lambda box: len(box.refused) == 3)
        assert {"b", "d"} <= set(c.refused[-1].split())
        twin.post.knock(a.address, {"n": 1})
        twin.until(lambda box: box.refused)


def test_what_cannot_be_listened_at_is_named() -> None:
    with boxes("a") as (a,):
        for host, port, reason in (
            ("127.0.0.1", a.post.port, "Address already in use"),
            ("no-such-host.invalid", 0, "Name or service not known"),
            ("192.0.2.1", 0, "Cannot assign requested address"),
            ("127.0.0.1", 70000, ""),
        ):
            with pytest.raises(CannotListen, match=f"{host}:{port} .*{reason}"):
                Post("b", host, port, TOKEN)
    with pytest.raises(UsageError):
        Post("b", "0.0.0.0", 0, "")
    with pytest.raises(UsageError):
        Post("", "127.0.0.1", 0, "")


_FEW_FILES = """
import resource, select
from outlast.cluster.rpc.channel import Post, Received, Refused, TooFewDescriptors, check_descriptors
posts = [Post(name, "127.0.0.1", 0, "t") for name in "ab"]
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 4096))
try:
    check_descriptors(1250)
except TooFewDescriptors as error:
    print(error)
import os, socket
kept = []
try:
    while True:
        kept.append(os.dup(0))
except OSError:
    os.close(kept.pop())
posts[0].knock(f"127.0.0.1:{posts[1].port}", b"{}")
seen = []
while not (seen := [item for post in posts for item in post.arrived()]):
    select.select(posts, [], [], 1)
print(seen[0].reason)
try:
    Post("c", "127.0.0.1", 0, "t")
except Exception as error:
    print(type(error).__name__)
for descriptor in kept:
    os.close(descriptor)
while not any(isinstance(item, Received) for item in posts[1].arrived()):
    posts[0].knock(f"127.0.0.1:{posts[1].port}", b"{}")
    select.select([posts[1]], [], [], 0.05)
print("heals")
"""


def test_a_lack_of_descriptors_is_named_and_heals() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FEW_FILES], capture_output=True, text=True, timeout=60, check=False
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert [one for one in ("1250", "20", "4096") if one not in lines[0]] == []
    assert [one for one in ("20", "4096") if one not in lines[1]] == []
    assert lines[2:] == ["TooFewDescriptors", "heals"]


@contextmanager
def _listener(says: bytes) -> Iterator[str]:
    """Accept one connection, say something, and keep it until the test is over."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                kept.append(server.accept()[0])
                kept[0].sendall(says)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE)
        for line in kept:
            line.close()


def test_a_stranger_that_closes_at_once_after_a_false_proof_ends_nothing_but_its_line(
    pair: tuple[Box, Box],
) -> None:
    a, _ = pair
    said = ClientProtocol(WebSocketURI(False, "localhost", 80, "/outlast", ""))
    said.send_request(said.connect())
    said.state = State.OPEN
    said.send_text(Greeting(Hello("c", new_nonce(), new_nonce(), "9.9.9"), "false", True).hello())
    said.send_text(b'{"proof": "false"}')
    said.send_close(1000, "")
    with socket.create_connection(("127.0.0.1", a.post.port), DEADLINE) as raw:
        raw.sendall(b"".join(said.data_to_send()))
        with suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    a.until(lambda box: box.post.counters().refused == {"token": 1})


_CROWD = """
import os, resource, select, socket, time
from outlast.cluster.rpc.channel import Post
from outlast.ipc.descriptors import raise_limit

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700))
raise_limit()
post = Post("a", "127.0.0.1", 0, "x" * 32)
held = []
child = os.fork()
if not child:  # the limit is of a process
    for _ in range(1500):
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(("127.0.0.1", post.port))
        held = [*held, line][-600:]
        time.sleep(0.001)
    os._exit(0)
most = 0
while os.waitpid(child, os.WNOHANG)[0] == 0:
    os.close(os.pidfd_open(os.getpid()))
    most = max(most, len(os.listdir("/proc/self/fd")))
    select.select([post], [], [], 0.01)
print(most < 256, post.counters().refused)
"""


def test_a_crowd_of_strangers_leaves_descriptors_to_the_agent() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _CROWD], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("True {'deadline': "), run.stdout
