"""A saver's server with folders of its own, and what stands between it and its peers in tests."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.replica import frames
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.handshake import Party
from outlast.checkpoint.replica.server import PeerServer, Terms
from outlast.checkpoint.tiers.tier import DirectoryTier

TOKEN = "a token of this test, 7e1d90"
COPY = copy_name(120, 7)
SHARD, _, DOCUMENT = rank_files(3, 8)
COMMITTED = commit_line(1, "0" * 32)
LOOPBACK = ("127.0.0.1", 0)


def party(node: str = "n0", token: str = TOKEN, **changed: Any) -> Party:
    """Return one side of a job in the generation of COPY."""
    return Party(node, token, **{"run": "r", "generation": 7, **changed})


class Node:
    """A server with its folders, and what it reported."""

    def __init__(self, root: Path, replica: Path | None = None, token: str = TOKEN, **terms: object) -> None:
        self.memory, self.replica = root / "memory", replica or root / "replica"
        self.memory.mkdir(exist_ok=True)
        self.reports: list[str] = []
        self.server = PeerServer(
            LOOPBACK,
            party("n9", token, tls=terms.pop("tls", None)),
            {"memory": self.memory, "replica": self.replica}.get,
            lambda *_: DirectoryTier(self.replica),
            self.answer,
            Terms(**{"timeout": 20.0, "report": self.reports.append, **terms}),  # type: ignore[arg-type]
        )

    def answer(self, _: str, message: dict[str, object]) -> dict[str, object]:
        if message.get("fail"):
            raise RuntimeError("the handler of this test")
        return {"echo": message}

    def client(self, **changed: object) -> PeerClient:
        names = ("node", "token", "generation", "session", "run", "tls")
        mine: Any = {name: changed.pop(name) for name in names if name in changed}
        given = {"address": self.server.address, "party": party(**mine), "timeout": 20.0, **changed}
        return PeerClient(**given)  # type: ignore[arg-type]

    def keep(self, content: bytes, copy: str = COPY) -> Path:
        (self.memory / copy).mkdir(exist_ok=True)
        for file, text in ((SHARD, content), (DOCUMENT, b"{}"), (MANIFEST, b"{}"), (COMMIT, COMMITTED)):
            (self.memory / copy / file).write_bytes(text)
        return self.memory / copy / SHARD

    def is_well(self) -> bool:
        return self.client().ask({"are you": "well"}) == {"echo": {"are you": "well"}}


def parcel(content: bytes | Path, digest: str | None = None) -> dict[str, tuple[bytes | Path, str]]:
    whole = content if isinstance(content, bytes) else content.read_bytes()
    files = {SHARD: (content, digest or file_digest(whole))}
    return files | {
        name: (text, file_digest(text)) for name, text in ((MANIFEST, b"{}"), (COMMIT, COMMITTED))
    }


def frame(kind: int, payload: bytes, *, version: int = frames.VERSION, length: int | None = None) -> bytes:
    """Return a frame as bytes."""
    size = len(payload) if length is None else length
    head = frames._HEAD.pack(b"OLsv", version, kind, size, frames.xxh3_64_intdigest(payload))
    return head + frames.xxh32_intdigest(head).to_bytes(4, "big") + payload


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@contextmanager
def proxy(target: tuple[str, int], alter: Callable[[str, int, bytearray], None]) -> Iterator[tuple[str, int]]:
    """Pass bytes on between one client and the target; ``alter`` sees direction, position and bytes."""
    with socket.create_server(LOOPBACK) as listener:
        listener.settimeout(20)

        def pump(source: socket.socket, sink: socket.socket, way: str) -> None:
            at = 0
            with suppress(OSError):
                while got := source.recv(1 << 18):
                    data = bytearray(got)
                    alter(way, at, data)
                    at += len(got)
                    sink.sendall(data)
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        def run() -> None:
            with listener.accept()[0] as near, socket.create_connection(target) as far:
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                up = threading.Thread(target=pump, args=(near, far, "up"))
                up.start()
                pump(far, near, "down")
                up.join(20)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()
        thread.join(20)
        assert not thread.is_alive()
