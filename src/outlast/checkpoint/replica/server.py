"""What a checkpoint writer serves to those of the job's other nodes, over TCP.

A connection is one request: both sides prove who they are, the client says what it wants, the answer follows,
the connection ends. Every frame has a deadline. The proofs cover the beginning of a connection; what follows
is as safe from forgers as the network is, unless there is TLS.

A peer names a copy and a file; both must have the form of such a name, and what has the name must be a
regular file in a copy in the tier that is offered. No path is ever put together from what a peer said, and no
symbolic link is followed.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    PeerRefused,
    Refusal,
    WrongBytes,
)
from outlast.checkpoint.replica.handshake import Party
from outlast.checkpoint.replica.listener import Listener, Reception
from outlast.checkpoint.tiers.tier import DirectoryTier, chunks_of
from outlast.cluster.rpc.handshake import Hello
from outlast.errors import UsageError
from outlast.fields import DamagedCopy

MOST_BYTES = 1 << 50  # of a file
_GREETING_SECONDS = 10.0
_MOST_FILES = 10_000
_MOST_PUTS = 2  # of one node at once: one whose sender was killed may not have ended yet
_BACKLOG = 1024
_NAME_BYTES = 255  # NAME_MAX of Linux
_FILE = re.compile(r"(?:rank|alike)-([0-9]{5,9})-of-([0-9]{5,9})\.(?:safetensors|digests|json)")

Handler = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Promise:
    """What a file must be when it has arrived; the digest is that of its entry in the manifest."""

    file: str
    nbytes: int
    digest: str


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


class PeerServer:
    """Serves copies, takes replicas and messages; its threads run from the start until :meth:`close`.

    Args:
        address: host and port; port 0 takes a free one.
        party: this side; its key may be "" only on a loopback address.
        folders: returns the tier that peers may read under a name, None where there is none.
        shelf: returns the tier that takes a replica of so many bytes of a node; None where none is taken.
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
        shelf: Callable[[str, int], DirectoryTier | None] = lambda _, __: None,
        handler: Handler | None = None,
        terms: Terms = Terms(),
    ) -> None:
        self.party = party
        self._folders = folders
        self._shelf = shelf
        self._handler = handler
        self._terms = terms
        self._operations = {"get": self._get, "put": self._put, "message": self._message}
        self._places = threading.BoundedSemaphore(terms.connections)
        self._lock = threading.Lock()
        self._puts: Counter[str] = Counter()
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
        patience = min(_GREETING_SECONDS, terms.timeout)
        self._listener = Listener(
            listener,
            Reception(
                lambda: self.party,
                self._admit,
                self._serve,
                terms.report,
                patience,
                terms.unproven,
                terms.a_node,
            ),
        )

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and the threads; a replica that is not complete is removed."""
        self._listener.close()

    def _admit(self, hello: Hello, host: str) -> None:
        self.party.check(hello)
        self._terms.admit(hello.name, host)

    def _serve(self, channel: Channel) -> None:
        with self._places:
            channel.timeout = self._terms.timeout
            request = channel.receive_json(Kind.REQUEST)
            operation = self._operations.get(str(request.get("op")))
            if operation is None:
                raise PeerRefused(
                    Refusal.MALFORMED, f"no operation is called {str(request.get('op'))[:100]!r}"
                )
            channel.doing = f"serving {request['op']}"
            operation(channel, request)

    def _get(self, channel: Channel, request: dict[str, Any]) -> None:
        label, copy = _label(request.get("folder")), _copy_name(request.get("copy"))
        file, folder = _file_name(request.get("file")), self._folders(label)
        if folder is None:
            raise PeerRefused(Refusal.MISSING, f"a folder of copies expected, {label!r} found")
        try:
            with DirectoryTier(folder).open(copy) as place, place.open(file) as (descriptor, size):
                channel.doing = f"serving {copy}/{file}"
                end: Any = size if request.get("end") is None else request["end"]
                begin: Any = request.get("begin")
                _count(end, "the end of a part", size)
                _count(begin, "the begin of a part", end)
                channel.send_json(Kind.ANSWER, {"length": end - begin})
                for chunk in chunks_of(descriptor, end, file, begin):
                    channel.send_chunk(chunk)
        except DamagedCopy as error:
            raise PeerRefused(Refusal.MISSING, str(error)) from error

    def _put(self, channel: Channel, request: dict[str, Any]) -> None:
        source = _label(request.get("source"))
        if source != channel.node:
            raise PeerRefused(
                Refusal.NODE, f"a replica of node {channel.node} expected, one of {source} found"
            )
        copy, promises = _copy_name(request.get("copy")), _promises(request.get("files"))
        generation = self.party.generation
        if place_of(copy)[1] != generation:
            raise PeerRefused(Refusal.GENERATION, f"a copy of generation {generation} expected, {copy} found")
        with self._puts_of(source):
            shelf = self._shelf(source, sum(promise.nbytes for promise in promises))
            if shelf is None:
                raise PeerRefused(Refusal.NODE, f"no replicas of {source} are taken here")
            with shelf.writing(copy) as temporary:
                channel.send_json(Kind.ANSWER, {})
                for promise in promises:
                    label = f"{copy}/{promise.file}"
                    channel.doing = f"taking {label}"
                    chunks = channel.receive_file(label, promise.nbytes)
                    found = shelf.write_chunks(temporary, promise.file, chunks)
                    if found != promise.digest:
                        mismatch = Mismatch(label, 0, promise.nbytes, promise.digest, found)
                        raise WrongBytes(channel.peer, mismatch)
                    channel.send_json(Kind.ANSWER, {"file": promise.file})
        channel.send_json(Kind.ANSWER, {"committed": copy})

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

    def _message(self, channel: Channel, request: dict[str, Any]) -> None:
        body = request.get("body")
        if self._handler is None or not isinstance(body, dict):
            raise PeerRefused(Refusal.MALFORMED, "a JSON object for somebody who takes messages expected")
        answer = json.dumps(self._handler(channel.node, body)).encode()
        if len(answer) > MESSAGE_BYTES:
            raise PeerRefused(Refusal.FAILED, f"the answer has {len(answer)} bytes, at most {MESSAGE_BYTES}")
        channel.send(Kind.ANSWER, answer)


def _count(value: object, what: str, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise PeerRefused(Refusal.MALFORMED, f"{what} from 0 to {most} expected, {str(value)[:100]!r} found")


def _copy_name(name: object) -> str:
    if isinstance(name, str) and len(name) <= _NAME_BYTES and parse_copy_name(name) is not None:
        return name
    raise PeerRefused(Refusal.MALFORMED, f"the name of a copy expected, {str(name)[:100]!r} found")


def _label(name: object) -> str:
    """Return a name that a folder of copies, or a node, can have."""
    if isinstance(name, str) and is_label(name):
        return name
    raise PeerRefused(Refusal.MALFORMED, f"the name of a folder expected, {str(name)[:100]!r} found")


def _file_name(name: object) -> str:
    """Return a name that a file of a copy can have."""
    if isinstance(name, str):
        match = _FILE.fullmatch(name)
        numbers = (int(match[1]), int(match[2])) if match else (0, 0)
        own = numbers[0] < numbers[1] and name in (*rank_files(*numbers), *alike_files(*numbers))
        if own or name in (MANIFEST, COMMIT):
            return name
    raise PeerRefused(Refusal.MALFORMED, f"the name of a copy's file expected, {str(name)[:100]!r} found")


def _promises(value: Any) -> list[Promise]:
    """Read which files of a copy a peer is going to send: with what makes it a copy, and none twice."""
    _count(len(value) if isinstance(value, list) else None, "a list of files", _MOST_FILES)
    try:
        promises = [Promise(**each) for each in value]
    except TypeError as error:
        raise PeerRefused(Refusal.MALFORMED, f"files with size and digest expected: {error}") from error
    names = [_file_name(promise.file) for promise in promises]
    if len(set(names)) < len(names) or not {MANIFEST, COMMIT} <= set(names):
        raise PeerRefused(
            Refusal.MALFORMED,
            f"each file once, {MANIFEST} and {COMMIT} among them, expected, {some(names)} found",
        )
    for promise in promises:
        _count(promise.nbytes, f"a size of {promise.file}", MOST_BYTES)
    return promises
