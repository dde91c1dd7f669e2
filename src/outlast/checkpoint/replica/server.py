"""What a checkpoint writer serves to those of the job's other nodes, over TCP.

A connection is one request: both sides prove who they are, the client says what it wants, the answer follows,
the connection ends. Every frame has a deadline. The proofs cover the beginning of a connection; what follows
is as safe from forgers as the network is, unless there is TLS.

Each connection has a thread of its own. A greeting takes a few seconds at most. Connections that have proven
nothing are bounded in number and take no place that a peer needs: where there are too many, the oldest of the
host that has the most is closed.

A peer names a copy and a file; both must have the form of such a name, and what has the name must be a
regular file in a copy in the tier that is offered. No path is ever put together from what a peer said, and no
symbolic link is followed.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outlast import codec
from outlast.checkpoint.policy.manifest import (
    COMMIT,
    MANIFEST,
    alike_files,
    is_label,
    parse_copy_name,
    place_of,
    rank_files,
    some,
)
from outlast.checkpoint.replica.frames import (
    MESSAGE_BYTES,
    TIMEOUT,
    Channel,
    Kind,
    Mismatch,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    WrongBytes,
    address_text,
)
from outlast.checkpoint.replica.handshake import Party, welcome
from outlast.checkpoint.tiers.tier import DirectoryTier, chunks_of
from outlast.cluster.rpc.handshake import Hello
from outlast.errors import UsageError
from outlast.fields import DamagedCopy
from outlast.strangers import Strangers

MOST_BYTES = 1 << 50  # of a file
_GREETING_SECONDS = 10.0
_CLOSING_SECONDS = 5.0
_PAUSE = 0.1  # seconds without accepting when no connection can be taken
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MOST_FILES = 10_000
_MOST_PUTS = 2  # of one node at once: one whose sender was killed may not have ended yet
_BACKLOG = 1024
_NAME_BYTES = 255  # NAME_MAX of Linux
_FILE = re.compile(r"(?:rank|alike)-([0-9]{5,9})-of-([0-9]{5,9})\.(?:safetensors|digests|json)")

Handler = Callable[[str, dict[str, Any]], dict[str, Any]]
Operations = Mapping[str, tuple[type[Any], Callable[[Channel, Any], None]]]
Bytes = Annotated[int, codec.Meta(ge=0, le=MOST_BYTES)]


def _is_file(name: str) -> bool:
    """Return whether a file of a copy can have a name."""
    match = _FILE.fullmatch(name)
    numbers = (int(match[1]), int(match[2])) if match else (0, 0)
    own = numbers[0] < numbers[1] and name in (*rank_files(*numbers), *alike_files(*numbers))
    return own or name in (MANIFEST, COMMIT)


def _require_names(label: str, copy: str, files: Sequence[str]) -> None:
    if not is_label(label):
        raise ValueError(f"the name of a folder or node expected, {label[:100]!r} found")
    if len(copy) > _NAME_BYTES or parse_copy_name(copy) is None:
        raise ValueError(f"the name of a copy expected, {copy[:100]!r} found")
    for file in files:
        if not _is_file(file):
            raise ValueError(f"the name of a copy's file expected, {file[:100]!r} found")


@dataclass(frozen=True)
class Get:
    """A request for a part of a file; ``end`` is None for that of the file."""

    folder: str
    copy: str
    file: str
    begin: Bytes = 0
    end: Bytes | None = None

    def __post_init__(self) -> None:
        _require_names(self.folder, self.copy, (self.file,))


@dataclass(frozen=True)
class Promise:
    """What a file must be when it has arrived; the digest is that of its entry in the manifest."""

    file: str
    nbytes: Bytes
    digest: str


@dataclass(frozen=True)
class Put:
    """A replica that a node is going to send: each file once, with what makes it a copy."""

    source: str
    copy: str
    files: Annotated[tuple[Promise, ...], codec.Meta(max_length=_MOST_FILES)]

    def __post_init__(self) -> None:
        names = [promise.file for promise in self.files]
        _require_names(self.source, self.copy, names)
        if len(set(names)) < len(names) or not {MANIFEST, COMMIT} <= set(names):
            raise ValueError(
                f"each file once, {MANIFEST} and {COMMIT} among them, expected, {some(names)} found"
            )


@dataclass(frozen=True)
class Message:
    """A message for the handler."""

    body: dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """How a server treats its connections.

    Args:
        timeout: seconds for one frame to arrive or to be taken.
        connections: served at once; further ones wait.
        a_node: connections of one node at once; further ones are refused.
        unproven: connections at once that have not proven yet who they are.
        admit: takes a node's name and the address that it connects from; raises PeerRefused.
        report: takes a sentence about each connection that failed; called from several threads.
    """

    timeout: float = TIMEOUT
    connections: int = 16
    a_node: int = 8
    unproven: int = 256
    admit: Callable[[str, str], None] = lambda _, __: None
    report: Callable[[str], None] = lambda _: None


class _Connection(Channel):
    """A connection that another side has opened, and its thread."""

    def __init__(self, connection: socket.socket, address: tuple[Any, ...], timeout: float) -> None:
        super().__init__(connection, address_text(address), timeout)
        self.host = str(address[0])
        self.ended = ""  # why this side has ended it
        self.thread: threading.Thread | None = None

    def end(self, why: str) -> None:
        """Wake the thread, which closes the connection."""
        self.ended = why
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Listener:
    """Greets and serves connections; its threads run from the start until :meth:`close`.

    Args:
        address: host and port; port 0 takes a free one.
        party: this side; its key may be "" only on a loopback address.
        operations: by name, the form of a request and what serves it.
        terms: limits.

    Raises:
        UsageError: there is no key and others than this host could connect.
        OSError: the address cannot be used.
    """

    def __init__(
        self, address: tuple[str, int], party: Party, operations: Operations, terms: Terms = Terms()
    ) -> None:
        self.party = party
        self._operations = operations
        self._terms = terms
        self._places = threading.BoundedSemaphore(terms.connections)
        family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        host = str(resolved[0])
        if not party.key and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise UsageError(
                f"peers: a token is expected where others than this host can connect, none was given for"
                f" {host}; nothing is served"
            )
        self._listener = socket.create_server((host, int(resolved[1])), family=family, backlog=_BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._patience = min(_GREETING_SECONDS, terms.timeout)
        self._lock = threading.Lock()  # for what follows
        self._open: set[_Connection] = set()
        self._unproven: Strangers[_Connection] = Strangers(terms.unproven, self._patience)
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and end all connections and their threads."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + _CLOSING_SECONDS
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSING_SECONDS)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for one in left:
            one.end("this side has closed it")
        for one in left:
            if one.thread is not None:
                one.thread.join(max(deadline - time.monotonic(), 0.0))

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._say("peers", f"a connection could not be taken: {error}; the next one may be")
                    with self._lock:
                        surplus = self._unproven.surplus()
                    self._end(surplus, "no descriptors are left")
                    time.sleep(_PAUSE)
                continue
            self._take(_Connection(connection, address, self._patience))

    def _end(self, surplus: _Connection | None, why: str) -> None:
        """End a connection that has proven nothing, if there is one to end."""
        if surplus is not None:
            with self._lock:
                self._unproven.remove(surplus)
            surplus.end(why)

    def _take(self, one: _Connection) -> None:
        one.thread = threading.Thread(target=self._serve, args=(one,), daemon=True)
        with self._lock:
            self._open.add(one)
            surplus = self._unproven.add(one, one.host, time.monotonic())
        self._end(surplus, f"more than {self._terms.unproven} unproven connections; the oldest is closed")
        try:
            one.thread.start()
        except RuntimeError as error:
            self._forget(one)
            self._say(one.peer, f"no thread for a connection: {error}; it was closed")

    def _serve(self, one: _Connection) -> None:
        try:
            with suppress(PeerError, OSError):  # who is refused may have gone: that it was is known by then
                self._converse(one)
        finally:
            self._forget(one)

    def _converse(self, one: _Connection) -> None:
        try:
            welcome(one, self.party, lambda hello: self._admit(one, hello))
            with self._lock:
                self._unproven.remove(one)
            with self._places:
                one.timeout = self._terms.timeout
                self._carry_out(one, one.receive_json(Kind.REQUEST))
        except PeerLost as error:
            self._say(one.peer, one.ended or str(error))
        except Exception as error:  # noqa: BLE001 - what breaks one connection must not end the others
            text = f"{type(error).__name__}: {error}"
            told = error if isinstance(error, (PeerError, OSError)) else PeerError(text)
            self._say(one.peer, one.ended or str(told))
            one.refuse(told)

    def _admit(self, one: _Connection, hello: Hello) -> None:
        """Check what the other side has proven to be.

        Raises:
            PeerRefused: nothing is served to it.
        """
        self.party.check(hello)
        self._terms.admit(hello.name, one.host)
        with self._lock:
            count = sum(other.node == hello.name for other in self._open)
            if count >= self._terms.a_node:
                raise PeerRefused(
                    Refusal.LIMIT,
                    f"node {hello.name} has {count} connections, at most {self._terms.a_node}",
                )
            one.node = hello.name

    def _carry_out(self, one: _Connection, request: dict[str, Any]) -> None:
        name = str(request.get("op"))[:100]
        if name not in self._operations:
            raise PeerRefused(Refusal.MALFORMED, f"no operation is called {name!r}")
        kind, operation = self._operations[name]
        one.doing = f"serving {name}"
        try:
            wanted = codec.convert(request, kind)
        except codec.Malformed as error:
            raise PeerRefused(Refusal.MALFORMED, f"{name}: {error}, {str(request)[:200]} found") from error
        operation(one, wanted)

    def _forget(self, one: _Connection) -> None:
        one.close()
        with self._lock:
            self._open.discard(one)
            self._unproven.remove(one)

    def _say(self, peer: str, why: str) -> None:
        text = why[:300]
        text = text if peer in text else f"peer {peer}: {text}; its connection was closed"
        try:
            self._terms.report(text)
        except Exception:  # noqa: BLE001 - if the failure cannot be reported, no other one follows
            return


class PeerServer(Listener):
    """Serves copies, takes replicas and messages.

    Args:
        address, party, terms: see :class:`Listener`.
        folders: returns the tier that peers may read under a name, None where there is none.
        shelf: returns the tier that takes a replica of so many bytes of a node; None where none is taken.
        handler: answers messages of a node; called from several threads.

    Raises:
        UsageError, OSError: see :class:`Listener`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        party: Party,
        folders: Callable[[str], Path | None],
        shelf: Callable[[str, int], DirectoryTier | None] = lambda _, __: None,
        handler: Handler | None = None,
        terms: Terms = Terms(),
    ) -> None:
        self._folders = folders
        self._shelf = shelf
        self._handler = handler
        self._puts: Counter[str] = Counter()
        served: Operations = {
            "get": (Get, self._get),
            "put": (Put, self._put),
            "message": (Message, self._message),
        }
        super().__init__(address, party, served, terms)

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, channel: Channel, wanted: Get) -> None:
        folder = self._folders(wanted.folder)
        if folder is None:
            raise PeerRefused(Refusal.MISSING, f"a folder of copies expected, {wanted.folder!r} found")
        try:
            with DirectoryTier(folder).open(wanted.copy) as place, place.open(wanted.file) as (file, size):
                channel.doing = f"serving {wanted.copy}/{wanted.file}"
                begin, end = wanted.begin, size if wanted.end is None else wanted.end
                if not begin <= end <= size:
                    raise PeerRefused(
                        Refusal.MALFORMED, f"a part of {size} bytes expected, {begin} to {end} found"
                    )
                channel.send_json(Kind.ANSWER, {"length": end - begin})
                for chunk in chunks_of(file, end, wanted.file, begin):
                    channel.send_chunk(chunk)
        except DamagedCopy as error:
            raise PeerRefused(Refusal.MISSING, str(error)) from error

    def _put(self, channel: Channel, wanted: Put) -> None:
        source, copy, generation = wanted.source, wanted.copy, self.party.generation
        if source != channel.node:
            raise PeerRefused(
                Refusal.NODE, f"a replica of node {channel.node} expected, one of {source} found"
            )
        if place_of(copy)[1] != generation:
            raise PeerRefused(Refusal.GENERATION, f"a copy of generation {generation} expected, {copy} found")
        with self._puts_of(source):
            shelf = self._shelf(source, sum(promise.nbytes for promise in wanted.files))
            if shelf is None:
                raise PeerRefused(Refusal.NODE, f"no replicas of {source} are taken here")
            with shelf.writing(copy) as temporary:
                channel.send(Kind.ANSWER)
                for promise in wanted.files:
                    label = f"{copy}/{promise.file}"
                    channel.doing = f"taking {label}"
                    chunks = channel.receive_file(label, promise.nbytes)
                    found = shelf.write_chunks(temporary, promise.file, chunks)
                    if found != promise.digest:
                        mismatch = Mismatch(label, 0, promise.nbytes, promise.digest, found)
                        raise WrongBytes(channel.peer, mismatch)
                    channel.send(Kind.ANSWER)
        channel.send(Kind.ANSWER)

    @contextmanager
    def _puts_of(self, source: str) -> Iterator[None]:
        """Count the replicas of a node that are being taken.

        Raises:
            PeerRefused: there are too many.
        """
        with self._lock:
            if self._puts[source] >= _MOST_PUTS:
                raise PeerRefused(
                    Refusal.LIMIT, f"{_MOST_PUTS} replicas of node {source} are being taken already"
                )
            self._puts[source] += 1
        try:
            yield
        finally:
            with self._lock:
                self._puts[source] -= 1

    def _message(self, channel: Channel, wanted: Message) -> None:
        if self._handler is None:
            raise PeerRefused(Refusal.MALFORMED, "nobody takes messages here")
        answer = codec.encode(self._handler(channel.node, wanted.body))
        if len(answer) > MESSAGE_BYTES:
            raise PeerRefused(Refusal.FAILED, f"the answer has {len(answer)} bytes, at most {MESSAGE_BYTES}")
        channel.send(Kind.ANSWER, answer)
