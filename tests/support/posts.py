"""Posts for tests: what arrives is waited for with a deadline; those to be killed have their own process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from websockets.sync.client import ClientConnection, connect

from outlast import files
from outlast.cluster.rpc.channel import Arrival, Gone, Pong, Post, Received, Refused
from outlast.cluster.rpc.handshake import PROTOCOL, Greeting, Hello, new_nonce

TOKEN = "a token of this test, 41c0"
DEADLINE = 60.0


class JsonPost(Post):
    """A post whose texts are JSON objects."""

    def send(self, to: str, message: Any, address: str = "") -> None:
        super().send(to, json.dumps(message).encode(), address)

    def knock(self, address: str, message: Any) -> None:
        super().knock(address, json.dumps(message).encode())


class Box:
    """A post and everything that it has told so far."""

    def __init__(self, name: str, token: str = TOKEN, **given: Any) -> None:
        self.post = JsonPost(name, "127.0.0.1", given.pop("port", 0), token, **given)
        self.address = f"127.0.0.1:{self.post.port}"
        self.seen: list[Arrival] = []

    def until(self, condition: Callable[[Box], object]) -> Box:
        """Read until something is so."""
        end = time.monotonic() + DEADLINE
        while not condition(self):
            assert time.monotonic() < end, (
                f"{self.post.name} has seen {self.seen[:20]}, {self.post.counters()}"
            )
            files.readable([self.post.fileno()], 0.05)
            self.seen += self.post.arrived()
        return self

    @property
    def messages(self) -> list[tuple[str, Any]]:
        return [(item.sender, said(item).get("n")) for item in self.seen if isinstance(item, Received)]

    @property
    def gone(self) -> list[Gone]:
        return [item for item in self.seen if isinstance(item, Gone)]

    @property
    def pongs(self) -> list[Pong]:
        return [item for item in self.seen if isinstance(item, Pong)]

    @property
    def refused(self) -> list[str]:
        return [item.reason for item in self.seen if isinstance(item, Refused)]

    def gets(self, sender: str, n: Any) -> Box:
        return self.until(lambda box: (sender, n) in box.messages)


def said(item: Arrival) -> dict[str, Any]:
    """Return the JSON object that arrived."""
    assert isinstance(item, Received)
    found: dict[str, Any] = json.loads(item.text)
    return found


@contextmanager
def boxes(*names: str, **given: Any) -> Iterator[list[Box]]:
    made = [Box(name, **given) for name in names]
    try:
        yield made
    finally:
        for box in made:
            box.post.close()


def meet(a: Box, b: Box) -> None:
    """Open a connection between two, dialled by the first."""
    n = new_nonce()
    a.post.knock(b.address, {"n": n})
    b.gets(a.post.name, n)
    b.post.send(a.post.name, {"n": n})
    a.gets(b.post.name, n)


def still_well(a: Box, b: Box) -> None:
    """See that two that have met can still talk, and lost nobody."""
    n = new_nonce()
    a.post.send(b.post.name, {"n": n})
    b.gets(a.post.name, n)
    assert not a.gone, a.gone
    assert not b.gone, b.gone


_CHILD = """
import json, os, select, sys
from outlast.cluster.rpc.channel import Post, Received
name, token, address, fork = sys.argv[1:]
post = Post(name, "127.0.0.1", 0, token)
post.knock(address, b'{"n": "child"}')
while True:
    select.select([post], [], [])
    for item in post.arrived():
        if isinstance(item, Received):
            post.send(item.sender, item.text)
            if fork and os.fork() == 0:
                print(json.dumps({"forked": os.getpid()}), flush=True)
                sys.stdin.read()
                os._exit(0)
"""


class Link:
    """Pass on what comes over one TCP connection, until it is told otherwise.

    While ``held``, what the side that dialled says is kept, to be passed on by pieces; while ``mute``, what
    the other one says stays where it is.

    Args:
        port: where to.
        hold_at: said by the side that was dialled, it makes the link hold.
    """

    def __init__(self, port: int, hold_at: bytes = b"") -> None:
        self.held = self.mute = self._ended = False
        self.kept: list[bytes] = []
        self.passes = 0
        self._hold_at = hold_at
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._port = port
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join(DEADLINE)
        self._server.close()

    def _work(self) -> None:
        far = socket.create_connection(("127.0.0.1", self._port))
        near, _ = self._server.accept()
        with near, far, suppress(OSError):
            while not self._ended:
                ready = files.readable([near.fileno(), far.fileno()], 0.01)
                if near.fileno() in ready:
                    data = near.recv(65536)
                    if not data and not self.held:
                        return
                    self.kept.append(data)
                if far.fileno() in ready and not self.mute:
                    data = far.recv(65536)
                    self.held = self.held or (bool(self._hold_at) and self._hold_at in data)
                    near.sendall(data)
                    if not data:
                        return
                while self.kept and (self.passes or not self.held):
                    self.passes -= self.held
                    far.sendall(self.kept.pop(0))


@contextmanager
def child(name: str, address: str, fork: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run a post that sends back what it gets; its standard input ends a fork that outlives it."""
    command = [sys.executable, "-c", _CHILD, name, TOKEN, address, fork]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


@contextmanager
def stranger(box: Box, name: str, protocol: int = PROTOCOL, token: str = TOKEN) -> Iterator[ClientConnection]:
    """Connect with another WebSocket implementation; greet as far as the other side plays along."""
    mine = Hello(name, new_nonce(), new_nonce(), "9.9.9", protocol)
    greeting = Greeting(mine, token, dials=True)
    with connect(
        f"ws://{box.address}/", compression=None, max_size=None, proxy=None, close_timeout=1
    ) as line:
        line.send(greeting.hello().decode())
        if protocol == PROTOCOL:
            greeting.take_hello(line.recv(DEADLINE).encode())  # type: ignore[union-attr]
            line.send(greeting.proof().decode())
            greeting.take_proof(line.recv(DEADLINE).encode())  # type: ignore[union-attr]
        yield line


def text(**message: Any) -> str:
    return json.dumps(message)


def sockets() -> set[str]:
    """Return the connected TCP sockets of this process; those of an earlier test may close at any time."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in list(table)[1:]]
    return inodes & {f"socket:[{row[9]}]" for row in rows if row[3] == "01"}
