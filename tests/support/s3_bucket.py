"""An S3 server on loopback, buckets in it, and a proxy before it that answers as a test wants."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outlast.checkpoint.content.digest import chunk_digests, ends_of, file_digest, row_of
from outlast.checkpoint.policy.manifest import (
    COMMIT,
    MANIFEST,
    Manifest,
    copy_name,
    rank_files,
    runs_of,
)
from outlast.checkpoint.policy.resolve import Copy
from outlast.checkpoint.tiers.inventory import _looked, inspect
from outlast.checkpoint.tiers.object_access import Limits
from outlast.checkpoint.tiers.remote import ObjectTier
from outlast.fields import Damage, DamagedCopy
from tests.support.forging import SAID
from tests.support.jobs import DEADLINE
from tests.support.ports import free_port

SECRETS = ("SecretKeyOfTheTestItself0123456789", "SessionTokenOfTheTest/0123456789+abcdef==")
QUICK = Limits(connect=20, request=60, retries=3, retry_for=60)
Answer = tuple[int, bytes]
COPY = copy_name(5, 1)


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE} s for {what}"
        time.sleep(0.01)


def ask(port: int, method: str, path: str, body: bytes = b"") -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    with contextlib.closing(connection):
        connection.request(
            method,
            path,
            body,
            {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None, "the S3 server ended"
        with contextlib.suppress(OSError):
            return ask(port, "GET", "/moto-api/")[0] == 200
        return False

    try:
        wait_for(answers, "the S3 server")
        yield port
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE)


@dataclass
class Bucket:
    """A bucket of its own for each test, looked at from outside of outlast."""

    port: int
    name: str = field(default_factory=lambda: f"bucket-{uuid.uuid4().hex[:12]}")

    def create(self) -> None:
        assert ask(self.port, "PUT", f"/{self.name}")[0] == 200

    def tier(self, limits: Limits = QUICK, port: int = 0) -> ObjectTier:
        return ObjectTier(self.url, self.options(port), limits=limits)

    @property
    def url(self) -> str:
        return f"s3://{self.name}/runs/a"

    def options(self, port: int = 0) -> dict[str, str | bool]:
        return {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "region": "us-east-1",
            "access_key_id": "AKIDOFTHETEST",
            "secret_access_key": SECRETS[0],
            "session_token": SECRETS[1],
            "allow_http": True,
        }

    def read(self, path: str) -> bytes:
        status, content = ask(self.port, "GET", f"/{self.name}/runs/a/{path}")
        assert status == 200, content
        return content

    def write(self, path: str, content: bytes) -> None:
        assert ask(self.port, "PUT", f"/{self.name}/runs/a/{path}", content)[0] == 200

    def paths(self) -> list[str]:
        content = ask(self.port, "GET", f"/{self.name}?list-type=2")[1].decode()
        return sorted(key.removeprefix("runs/a/") for key in re.findall("<Key>(.*?)</Key>", content))

    def flip(self, path: str, at: int) -> None:
        content = bytearray(self.read(path))
        content[at] ^= 0x10
        self.write(path, bytes(content))


@contextlib.contextmanager
def proxy(server: int, answer: Callable[[str, str], Answer | None]) -> Iterator[tuple[int, list[str]]]:
    """Pass requests on but those that ``answer`` answers itself; yield the port and what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(f"{self.command} {self.path}")
            own = answer(self.command, self.path)
            if own is not None:
                self.reply(*own, {"ETag": '"0"'})
                return
            connection = http.client.HTTPConnection("127.0.0.1", server, timeout=DEADLINE)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                got = connection.getresponse()
                self.reply(got.status, got.read(), dict(got.getheaders()))

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                if key.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                    self.send_header(key, value)
            length = headers.get("Content-Length") or headers.get("content-length")
            self.send_header(
                "Content-Length", length if self.command == "HEAD" and length else str(len(content))
            )
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815 - names of http.server

        def log_message(self, *args: object) -> None:
            pass

    front = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    front.daemon_threads = True
    front.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients are killed on purpose
    thread = threading.Thread(target=front.serve_forever, daemon=True)
    thread.start()
    try:
        yield front.server_port, asked
    finally:
        front.shutdown()
        front.server_close()


def verified(tier: ObjectTier) -> Copy:
    """Look at the copy of a test and compare the digest of every file."""

    def check(folder: Any, manifest: Manifest, _: Copy) -> None:
        for entry in manifest.needed():
            digest = file_digest(folder.read(entry.name, entry.nbytes))
            if digest != entry.digest:
                raise DamagedCopy(Damage(entry.name, entry.digest, digest))

    reader: Any = tier
    return _looked(reader, inspect(reader, COPY, None), check)


def put(tier: ObjectTier, files: dict[str, bytes]) -> None:
    tier.upload(COPY, {file: content for file, content in files.items() if file not in (MANIFEST, COMMIT)})
    tier.commit(COPY, files[MANIFEST], files[COMMIT])


def written(content: bytes, step: int = 5, world: int = 1) -> dict[str, bytes]:
    """Make the files of a copy by hand, every document with the bytes of the tensors."""
    digests = chunk_digests(content)
    rows = (row_of(len(content), digests, content),) * world
    manifest = Manifest("run-a", 1, step, world, {"dp": world}, None, 1.0, rows, runs_of([SAID] * world))
    names = [rank_files(rank, world) for rank in range(world)]
    files = {file: content for one in names for file in (one.tensors, one.document)}
    return files | {one.digests: digests for one in names} | ends_of(manifest)
