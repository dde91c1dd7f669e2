"""The side of a saver that other savers of the job talk to, over TCP.

A connection is one request: both sides prove who they are (see :mod:`.peer_auth`); the client says what it
wants; the answer follows; the connection ends. Every frame has a deadline. Who has proven nothing yet is kept
apart (see :mod:`.reception`) and takes no place that a peer needs; a peer has a bounded number of places. The
proofs cover the beginning of a connection; what follows is as safe from forgers as the network is, unless
there is TLS.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, parse_copy_name, some
from outlast.checkpoint.replica.files import (
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
from outlast.checkpoint.replica.frames import (
    MESSAGE_BYTES,
    MOST_BYTES,
    TEXT_CHARACTERS,
    TIMEOUT,
    Channel,
    Kind,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    Throttle,
)
from outlast.checkpoint.replica.handshake import Party
from outlast.checkpoint.replica.reception import Door, Reception
from outlast.cluster.rpc.handshake import Hello
from outlast.errors import UsageError

GREETING_SECONDS = 10.0  # how long a stranger is listened to
_CLOSING_SECONDS = 5.0
_MOST_FILES = 10_000
_MOST_PUTS = 2  # of one node at once: one whose sender was killed may not have ended yet
_BACKLOG = 1024

Handler = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Terms:
    """How a server treats its connections.

    Args:
        timeout: seconds for one frame to arrive or to be taken.
        connections: served at once; further ones wait.
        a_node: connections of one node at once; further ones are refused.
        strangers: connections at once that have not proven yet who they are.
        throttle: holds back what is sent, over all connections.
        admit: takes a node's name and the address that it connects from; raises PeerRefused.
        report: takes a sentence about each connection that failed; never called twice at once.
    """

    timeout: float = TIMEOUT
    connections: int = 16
    a_node: int = 8
    strangers: int = 256
    throttle: Throttle | None = None
    admit: Callable[[str, str], None] = lambda _, __: None
    report: Callable[[str], None] = lambda _: None


class PeerServer:
    """Serves copies, takes replicas and messages; its threads run from the start until :meth:`close`.

    Args:
        address: host and port; port 0 takes a free one.
        party: this side; its key may be "" only on a loopback address.
        folders: returns the tier that peers may read under a name, None where there is none.
        shelf: returns what takes a replica of so many bytes of a node; None where none is taken.
        handler: answers messages of a node; called from several threads.
        terms: limits.

    Raises:
        UsageError: there is no key and others than this host could connect.
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        party: Party,
        folders: Callable[[str], Path | None],
        shelf: Callable[[str, int], Shelf | None] = lambda _, __: None,
        handler: Handler | None = None,
        terms: Terms = Terms(),
    ) -> None:
        self.party = party
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
        if not party.key and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise UsageError(
                f"peers: a token is expected where others than this host can connect, none was given for"
                f" {host}; nothing is served"
            )
        listener = socket.create_server((host, int(resolved[1])), family=family, backlog=_BACKLOG)
        name = listener.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self.unreported = 0
        self._lock = threading.Lock()
        self._closing = False
        self._places = threading.Lock()  # for what follows
        self._open: dict[threading.Thread, tuple[str, socket.socket]] = {}
        self._waiting: deque[tuple[socket.socket, str, str]] = deque()
        self._puts: Counter[str] = Counter()
        door = Door(
            lambda: self.party,
            self._admit,
            self._enter,
            self._say,
            min(GREETING_SECONDS, terms.timeout),
            terms.strangers,
        )
        self._reception = Reception(listener, door)

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and the threads; a replica that is not complete goes."""
        self._closing = True
        deadline = time.monotonic() + _CLOSING_SECONDS
        self._reception.close(_CLOSING_SECONDS)
        with self._places:
            waiting, opened = list(self._waiting), dict(self._open)
            self._waiting.clear()
        for connection, _, _ in waiting:
            connection.close()
        for thread, (_, connection) in opened.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _admit(self, hello: Hello, host: str) -> None:
        """Check what somebody has proven to be.

        Raises:
            PeerRefused: nothing is served to it.
        """
        self.party.check(hello)
        self._terms.admit(hello.name, host)
        with self._places:
            count = sum(node == hello.name for node, _ in self._open.values())
            count += sum(node == hello.name for _, node, _ in self._waiting)
        if count >= self._terms.a_node:
            raise PeerRefused(
                Refusal.LIMIT, f"node {hello.name} has {count} connections, at most {self._terms.a_node}"
            )

    def _enter(self, connection: socket.socket, hello: Hello, peer: str) -> None:
        """Serve a connection as soon as there is a place; called by the reception."""
        with self._places:
            if len(self._open) >= self._terms.connections:
                self._waiting.append((connection, hello.name, peer))
                return
            thread = threading.Thread(target=self._serve, args=(connection, hello.name, peer), daemon=True)
            self._open[thread] = (hello.name, connection)
        try:
            thread.start()
        except RuntimeError as error:
            with self._places:
                del self._open[thread]
            connection.close()
            self._say(f"peers: no thread for a connection: {error}; it was closed")

    def _serve(self, connection: socket.socket, node: str, peer: str) -> None:
        """Serve a connection, then those that wait for a place."""
        thread = threading.current_thread()
        while True:
            with connection:
                self._serve_one(connection, node, peer)
            with self._places:
                if self._closing or not self._waiting:
                    del self._open[thread]
                    return
                connection, node, peer = self._waiting.popleft()
                self._open[thread] = (node, connection)

    def _serve_one(self, connection: socket.socket, node: str, peer: str) -> None:
        channel = Channel(connection, peer, self._terms.timeout, self._terms.throttle)
        channel.node = node
        try:
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
        if source != channel.node:
            raise PeerRefused(
                Refusal.NODE, f"a replica of node {channel.node} expected, one of {source} found"
            )
        copy, promises = check_copy_name(request.get("copy")), _promises(request.get("files"))
        generation = self.party.generation
        if (parse_copy_name(copy) or (-1, -1))[1] != generation:
            raise PeerRefused(Refusal.GENERATION, f"a copy of generation {generation} expected, {copy} found")
        with self._puts_of(source):
            shelf = self._shelf(source, sum(promise.nbytes for promise in promises))
            if shelf is None:
                raise PeerRefused(Refusal.NODE, f"no replicas of {source} are taken here")
            with ReplicaWriter(shelf, copy) as writer:
                channel.send_json(Kind.ANSWER, {})
                for promise in promises:
                    channel.doing = f"taking {copy}/{promise.file}"
                    writer.receive(channel, promise)
                    channel.send_json(Kind.ANSWER, {"file": promise.file})
                writer.commit()
        channel.send_json(Kind.ANSWER, {"committed": copy})

    @contextmanager
    def _puts_of(self, source: str) -> Iterator[None]:
        """Count the replicas of a node that are being taken.

        Raises:
            PeerRefused: there are too many.
        """
        with self._places:
            if self._puts[source] >= _MOST_PUTS:
                raise PeerRefused(
                    Refusal.LIMIT, f"{_MOST_PUTS} replicas of node {source} are being taken already"
                )
            self._puts[source] += 1
        try:
            yield
        finally:
            with self._places:
                self._puts[source] -= 1

    def _message(self, channel: Channel, request: dict[str, Any]) -> None:
        body = request.get("body")
        if self._handler is None or not isinstance(body, dict):
            raise PeerRefused(Refusal.MALFORMED, "a JSON object for somebody who takes messages expected")
        answer = json.dumps(self._handler(channel.node, body)).encode()
        if len(answer) > MESSAGE_BYTES:
            raise PeerRefused(Refusal.FAILED, f"the answer has {len(answer)} bytes, at most {MESSAGE_BYTES}")
        channel.send(Kind.ANSWER, answer)


def _named(error: Exception) -> PeerRefused:
    return PeerRefused(Refusal.FAILED, f"{type(error).__name__}: {str(error)[:TEXT_CHARACTERS]}")


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
