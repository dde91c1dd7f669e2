"""Files and messages between the savers of a job, over TCP.

A connection is one request: both sides prove that they know the token, neither shows it; the client
says what it wants; the answer follows; the connection ends. Every frame has a deadline, so a peer
that is dead, slow or no peer at all costs its thread a few seconds and nobody else anything.
The proofs cover the beginning of a connection; what follows is as safe from forgers as the
network is, unless a TLS context is given. A token should be random: proofs allow guesses at it.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outlast.core.errors import OutlastError, UsageError
from outlast.transport.peer_files import (
    Listing,
    Promise,
    ReplicaWriter,
    Shelf,
    Target,
    check_copy_name,
    check_file_name,
    chunks_of_bytes,
    chunks_of_file,
    file_digest,
    list_copies,
    open_file,
    open_source,
    receive_file,
)
from outlast.transport.peer_frames import (
    MESSAGE_BYTES,
    Channel,
    Kind,
    NotUnderstood,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    WrongBytes,
)
from outlast.transport.throttle import RateLimit, Throttle

__all__ = [
    "Fetched",
    "Listing",
    "NotUnderstood",
    "PeerClient",
    "PeerError",
    "PeerLost",
    "PeerRefused",
    "PeerServer",
    "RateLimit",
    "Refusal",
    "Shelf",
    "Terms",
    "Throttle",
    "WrongBytes",
]

TIMEOUT = 30.0
_NONCE_BYTES = 32
_GREETING_SECONDS = 10.0  # how long a stranger is listened to
_WAKE = 5.0
_CLOSING_SECONDS = 5.0
_LAST_WORD_SECONDS = 1.0
_MOST_BYTES = 1 << 50
_MOST_FILES = 10_000

Handler = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Terms:
    """How a server treats its connections.

    Args:
        timeout: seconds for one frame to arrive or to be taken.
        connections: served at once; further ones wait in the kernel's queue.
        throttle: holds back what is sent, over all connections.
        tls: for the server's side; None: no TLS.
        report: takes a sentence about each connection that failed, in that connection's thread.
    """

    timeout: float = TIMEOUT
    connections: int = 16
    throttle: Throttle | None = None
    tls: ssl.SSLContext | None = None
    report: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Fetched:
    """What a fetch brought: its size, and the digest of each chunk from its offset on."""

    nbytes: int
    digests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of it all; of a whole file, the one in its manifest entry."""
        return file_digest(self.digests)


class PeerServer:
    """Serves copies, takes replicas and messages; its threads run from the start until :meth:`close`.

    Args:
        address: host and port; port 0 takes a free one.
        token: what all savers of the job know; "" only on a loopback address.
        folders: tiers that peers may read, by the name that they know them by.
        shelf: takes replicas; None: none are taken.
        handler: answers messages; called from several threads.
        terms: limits.

    Raises:
        UsageError: there is no token and others than this host could connect.
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        folders: Mapping[str, Path],
        shelf: Shelf | None = None,
        handler: Handler | None = None,
        terms: Terms = Terms(),  # noqa: B008 - frozen
    ) -> None:
        self._token = token
        self._folders = dict(folders)
        self._shelf = shelf
        self._handler = handler
        self._terms = terms
        self._operations = {
            "inventory": self._inventory,
            "get": self._get,
            "put": self._put,
            "message": self._message,
        }
        family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        host = str(resolved[0])
        if not token and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise UsageError(
                f"peers: a token is expected where others than this host can connect, none was given for"
                f" {host}; nothing is served"
            )
        self._listener = socket.create_server((host, int(resolved[1])), family=family, backlog=64)
        self._listener.settimeout(_WAKE)
        name = self._listener.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(terms.connections)
        self._open: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name="peers", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and the threads; a replica that is not complete goes."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSING_SECONDS
        self._acceptor.join(_CLOSING_SECONDS)
        self._listener.close()
        for thread, connection in list(self._open.items()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _accept(self) -> None:
        while not self._closing.is_set():
            if not self._slots.acquire(timeout=_WAKE):
                continue
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                self._slots.release()
                if not isinstance(error, TimeoutError) and not self._closing.wait(0.1):
                    self._terms.report(f"peers: a connection could not be taken: {error}; the next one may be")
                continue
            thread = threading.Thread(target=self._serve, args=(connection, _display(address)), daemon=True)
            self._open[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:
                self._forget(thread, connection)
                self._terms.report(f"peers: no thread for a connection: {error}; it was closed")

    def _forget(self, thread: threading.Thread, connection: socket.socket) -> None:
        connection.close()
        self._open.pop(thread, None)
        self._slots.release()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        thread = threading.current_thread()
        try:
            if self._terms.tls is not None:
                connection.settimeout(min(self._terms.timeout, _GREETING_SECONDS))
                connection = self._open[thread] = self._terms.tls.wrap_socket(connection, server_side=True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection, peer, self._terms.timeout, self._terms.throttle)
            try:
                self._converse(channel)
            except PeerLost:
                raise
            except (PeerError, OSError) as error:
                channel.refuse(error)
                raise
        except (OutlastError, OSError) as error:
            self._terms.report(f"peer {peer}: {error}")
        except Exception as error:  # noqa: BLE001 - what breaks one connection must not end the server
            self._terms.report(f"peer {peer}: {type(error).__name__}: {error}; its connection was closed")
        finally:
            self._forget(thread, connection)

    def _converse(self, channel: Channel) -> None:
        _greet(channel, self._token, b"server")
        request = channel.receive_json(Kind.REQUEST)
        operation = self._operations.get(str(request.get("op")))
        if operation is None:
            raise PeerRefused(Refusal.MALFORMED, f"no operation is called {str(request.get('op'))[:100]!r}")
        channel.doing = f"serving {request['op']}"
        operation(channel, request)

    def _folder(self, request: dict[str, Any]) -> Path:
        folder = self._folders.get(str(request.get("folder")))
        if folder is None:
            known = ", ".join(sorted(self._folders))
            raise PeerRefused(
                Refusal.MISSING, f"one of the folders {known} expected, {str(request.get('folder'))[:100]!r} found"
            )
        return folder

    def _inventory(self, channel: Channel, request: dict[str, Any]) -> None:
        copies = [asdict(listing) for listing in list_copies(self._folder(request))]
        channel.send_json(Kind.ANSWER, {"copies": copies})

    def _get(self, channel: Channel, request: dict[str, Any]) -> None:
        copy, file = check_copy_name(request.get("copy")), check_file_name(request.get("file"))
        with open_file(self._folder(request), copy, file) as (descriptor, size):
            begin = _count(request.get("offset"), "an offset", size)
            rest = size - begin
            length = rest if request.get("length") is None else _count(request["length"], "a length", rest)
            channel.doing = f"serving {copy}/{file}"
            channel.send_json(Kind.ANSWER, {"length": length})
            for chunk in chunks_of_file(descriptor, begin, begin + length, file):
                channel.send_chunk(chunk)

    def _put(self, channel: Channel, request: dict[str, Any]) -> None:
        if self._shelf is None:
            raise PeerRefused(Refusal.MISSING, "no replicas are taken here")
        copy, promises = check_copy_name(request.get("copy")), _promises(request.get("files"))
        with ReplicaWriter(self._shelf, copy) as writer:
            channel.send_json(Kind.ANSWER, {})
            for promise in promises:
                channel.doing = f"taking {copy}/{promise.file}"
                writer.receive(channel, promise)
                channel.send_json(Kind.ANSWER, {"file": promise.file})
            writer.commit()
        channel.send_json(Kind.ANSWER, {"committed": copy})

    def _message(self, channel: Channel, request: dict[str, Any]) -> None:
        body = request.get("body")
        if self._handler is None or not isinstance(body, dict):
            raise PeerRefused(Refusal.MALFORMED, "a JSON object for somebody who takes messages expected")
        try:
            answer = json.dumps(self._handler(body)).encode()
        except Exception as error:  # noqa: BLE001 - the asker is told, and the server goes on
            raise PeerRefused(Refusal.FAILED, f"{type(error).__name__}: {error}") from error
        if len(answer) > MESSAGE_BYTES:
            raise PeerRefused(Refusal.FAILED, f"the answer has {len(answer)} bytes, at most {MESSAGE_BYTES}")
        channel.send(Kind.ANSWER, answer)


class PeerClient:
    """Asks one peer; each call is a connection of its own and raises :class:`PeerError` when it fails.

    ``PeerLost``: no connection, or it ended or fell silent. ``PeerRefused``: the peer said no.
    ``WrongBytes``: a digest is wrong. ``NotUnderstood``: what answered is no peer of this version.

    Args:
        address: host and port.
        token: the job's.
        timeout: seconds to connect, and for every single frame.
        throttle: holds back what is sent; clients may share one.
        tls: for the client's side; None: no TLS.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        timeout: float = TIMEOUT,
        throttle: Throttle | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._token = token
        self._timeout = timeout
        self._throttle = throttle
        self._tls = tls
        self._peer = _display(address)

    def inventory(self, folder: str) -> list[Listing]:
        """Return the copies in one of the peer's folders, sound or not."""
        with self._ask(f"listing {folder}", {"op": "inventory", "folder": folder}) as channel:
            answer = channel.receive_json(Kind.ANSWER)
        try:
            return [_listing(each) for each in answer["copies"]]
        except (KeyError, TypeError, AttributeError, PeerRefused) as error:
            raise NotUnderstood(self._peer, "a list of copies", str(error)) from error

    def fetch(  # noqa: PLR0913 - what, from where, which part, where to
        self, folder: str, copy: str, file: str, into: Target, offset: int = 0, length: int | None = None
    ) -> Fetched:
        """Fetch a file of a copy, or a part of it.

        Each chunk was as the peer read it; whether the file is the one that its manifest means, the
        digest of what was fetched says. ``PeerLost.done`` bytes have gone into ``into`` when it is raised.

        Args:
            folder: the peer's name of it.
            copy: name of the copy.
            file: name of the file.
            into: called with each chunk's place in the file and the chunk, whose memory the next one
                overwrites; or memory for all of it.
            offset: first byte.
            length: bytes; None: to the end.

        Raises:
            PeerError: see the class.
            ValueError: it does not fit into the memory.
        """
        request = {"op": "get", "folder": folder, "copy": copy, "file": file, "offset": offset, "length": length}
        label = f"{copy}/{file}"
        with self._ask(f"fetching {label} from {folder}", request) as channel:
            found = channel.receive_json(Kind.ANSWER).get("length")
            if type(found) is not int or not 0 <= found <= _MOST_BYTES or length not in (None, found):
                raise NotUnderstood(self._peer, "the length of what follows", repr(found))
            if not callable(into) and memoryview(into).nbytes < found:
                room = memoryview(into).nbytes
                raise ValueError(f"{label}: memory for {found} bytes expected, {room} found; nothing was fetched")
            return Fetched(found, receive_file(channel, label, offset, offset + found, into))

    def send(self, copy: str, files: Mapping[str, tuple[Path | memoryview | bytes, str]]) -> int:
        """Send a whole copy onto the peer's shelf and return its size; on an error nothing of it stays there.

        Only a ``PeerLost`` after the last file leaves open whether the copy is there.

        Args:
            copy: its name.
            files: by name, MANIFEST.json and COMMIT among them; each with its content, or where that
                lies, and the digest that its manifest entry has.

        Raises:
            PeerError: see the class.
            OSError: a file cannot be read here.
        """
        with ExitStack() as stack:
            sources = []
            for file, (content, digest) in files.items():
                if isinstance(content, Path):
                    descriptor, size = stack.enter_context(open_source(content))
                    chunks = chunks_of_file(descriptor, 0, size, str(content))
                else:
                    size, chunks = memoryview(content).nbytes, chunks_of_bytes(content)
                sources.append((Promise(file, size, digest), chunks))
            request = {"op": "put", "copy": copy, "files": [asdict(promise) for promise, _ in sources]}
            channel = stack.enter_context(self._ask(f"sending {copy}", request))
            channel.receive_json(Kind.ANSWER)
            for promise, chunks in sources:
                channel.doing, channel.done = f"sending {copy}/{promise.file}", 0
                _send_chunks(channel, chunks)
                channel.receive_json(Kind.ANSWER)
            channel.doing = f"committing {copy}"
            channel.receive_json(Kind.ANSWER)
        return sum(promise.nbytes for promise, _ in sources)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the peer's answer to a message; after ``PeerLost`` it may have been heard all the same.

        Raises:
            PeerError: see the class.
            ValueError: the message is larger than 1 MiB.
        """
        size = len(json.dumps(message))
        if size > MESSAGE_BYTES:
            raise ValueError(f"message: at most {MESSAGE_BYTES} bytes expected, {size} found; it was not sent")
        with self._ask("asking", {"op": "message", "body": message}) as channel:
            return channel.receive_json(Kind.ANSWER)
