"""The side of a saver that other savers of the job talk to, over TCP.

A connection is one request: both sides prove that they know the token, neither shows it; the client
says what it wants; the answer follows; the connection ends. Every frame has a deadline, so a peer
that is dead, slow or no peer at all costs its thread a few seconds and nobody else anything.
The proofs cover the beginning of a connection; what follows is as safe from forgers as the
network is, unless a TLS context is given. A token should be random: proofs allow guesses at it.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outlast.core.errors import UsageError
from outlast.core.manifest import COMMIT, MANIFEST, some
from outlast.transport.peer_files import (
    Promise,
    ReplicaWriter,
    Shelf,
    check_copy_name,
    check_file_name,
    check_label,
    chunks_of_file,
    list_copies,
    open_file,
)
from outlast.transport.peer_frames import (
    MESSAGE_BYTES,
    MOST_BYTES,
    TIMEOUT,
    Channel,
    Kind,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    address_text,
    hear_greeting,
)
from outlast.transport.throttle import Throttle

_GREETING_SECONDS = 10.0  # how long a stranger is listened to
_WAKE = 5.0
_CLOSING_SECONDS = 5.0
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
        report: takes a sentence about each connection that failed; never called twice at once.
    """

    timeout: float = TIMEOUT
    connections: int = 16
    throttle: Throttle | None = None
    tls: ssl.SSLContext | None = None
    report: Callable[[str], None] = lambda _: None


class PeerServer:
    """Serves copies, takes replicas and messages; its threads run from the start until :meth:`close`.

    Args:
        address: host and port; port 0 takes a free one.
        token: what all savers of the job know; "" only on a loopback address.
        folders: returns the tier that peers may read under a name, None where there is none.
        shelf: returns what takes the replicas of a node, given its name; None where none are taken.
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
        folders: Callable[[str], Path | None],
        shelf: Callable[[str], Shelf | None] = lambda _: None,
        handler: Handler | None = None,
        terms: Terms = Terms(),
    ) -> None:
        self._token = token
        self._folders = folders
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
        self.unreported = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(terms.connections)
        self._open: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name="peers", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trust(self, token: str) -> None:
        """Know another token from now on: that of the ranks that have met last."""
        self._token = token

    def close(self) -> None:
        """End all connections and the threads; a replica that is not complete goes."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSING_SECONDS
        self._hang_up(deadline)  # where every slot was taken, this frees the acceptor
        self._acceptor.join(max(deadline - time.monotonic(), 0.0))
        self._listener.close()
        self._hang_up(deadline)

    def _hang_up(self, deadline: float) -> None:
        for thread, connection in list(self._open.items()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with suppress(RuntimeError):  # it is about to be started, and finds its connection closed
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
                    self._say(f"peers: a connection could not be taken: {error}; the next one may be")
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, address_text(address)), daemon=True
            )
            self._open[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:
                self._forget(thread, connection)
                self._say(f"peers: no thread for a connection: {error}; it was closed")

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
            except Exception as error:  # noqa: BLE001 - what breaks one connection must not end the server
                named = error if isinstance(error, (PeerError, OSError)) else _named(error)
                self._report(peer, named)
                channel.refuse(named)
        except (PeerError, OSError) as error:
            self._report(peer, error)
        finally:
            self._forget(thread, connection)

    def _report(self, peer: str, error: Exception) -> None:
        text = str(error)
        self._say(text if peer in text else f"peer {peer}: {text}; its connection was closed")

    def _say(self, text: str) -> None:
        with self._lock:
            try:
                self._terms.report(text)
            except Exception:  # noqa: BLE001 - who cannot hear about a failure must not add one
                self.unreported += 1

    def _converse(self, channel: Channel) -> None:
        hear_greeting(channel, self._token, min(self._terms.timeout, _GREETING_SECONDS))
        request = channel.receive_json(Kind.REQUEST)
        operation = self._operations.get(str(request.get("op")))
        if operation is None:
            raise PeerRefused(Refusal.MALFORMED, f"no operation is called {str(request.get('op'))[:100]!r}")
        channel.doing = f"serving {request['op']}"
        operation(channel, request)

    def _folder(self, request: dict[str, Any]) -> Path:
        name = check_label(request.get("folder"))
        folder = self._folders(name)
        if folder is None:
            raise PeerRefused(Refusal.MISSING, f"a folder of copies expected, {name!r} found")
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
        source = check_label(request.get("source"))
        shelf = self._shelf(source)
        if shelf is None:
            raise PeerRefused(Refusal.MISSING, f"no replicas of {source} are taken here")
        copy, promises = check_copy_name(request.get("copy")), _promises(request.get("files"))
        with ReplicaWriter(shelf, copy) as writer:
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
        answer = json.dumps(self._handler(body)).encode()
        if len(answer) > MESSAGE_BYTES:
            raise PeerRefused(Refusal.FAILED, f"the answer has {len(answer)} bytes, at most {MESSAGE_BYTES}")
        channel.send(Kind.ANSWER, answer)


def _named(error: Exception) -> PeerRefused:
    return PeerRefused(Refusal.FAILED, f"{type(error).__name__}: {error}")


def _count(value: object, what: str, most: int) -> int:
    if type(value) is int and 0 <= value <= most:
        return value
    raise PeerRefused(Refusal.MALFORMED, f"{what} from 0 to {most} expected, {str(value)[:100]!r} found")


def _promises(value: Any) -> list[Promise]:
    """Read which files of a copy a peer is going to send: with what makes it a copy, and none twice."""
    _count(len(value) if isinstance(value, list) else None, "a list of files", _MOST_FILES)
    try:
        promises = [Promise(**each) for each in value]
    except TypeError as error:
        raise PeerRefused(Refusal.MALFORMED, f"files with size and digest expected: {error}") from error
    names = [check_file_name(promise.file) for promise in promises]
    if len(set(names)) < len(names) or not {MANIFEST, COMMIT} <= set(names):
        raise PeerRefused(
            Refusal.MALFORMED,
            f"each file once, {MANIFEST} and {COMMIT} among them, expected, {some(names)} found",
        )
    for promise in promises:
        _count(promise.nbytes, f"a size of {promise.file}", MOST_BYTES)
    return promises
