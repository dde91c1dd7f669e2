"""The side of a checkpoint writer that asks another one; see :mod:`outlast.checkpoint.replica.server`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from outlast import codec
from outlast.checkpoint.replica.frames import (
    CHUNK_BYTES,
    MESSAGE_BYTES,
    TIMEOUT,
    Channel,
    Kind,
    NotUnderstood,
    PeerLost,
    Throttle,
    address_text,
)
from outlast.checkpoint.replica.handshake import Party, greet
from outlast.checkpoint.replica.server import MOST_BYTES, Promise
from outlast.checkpoint.tiers.tier import READ_FLAGS, chunks_of

_LAST_WORD_SECONDS = 1.0


class PeerClient:
    """Asks one peer; each call is a connection of its own and raises :class:`PeerError` when it fails.

    ``PeerLost``: no connection, or it ended or fell silent. ``PeerRefused``: the peer refused.
    ``WrongBytes``: a digest is wrong. ``NotUnderstood``: what answered is no peer of this version.

    Args:
        address: host and port.
        party: this side.
        timeout: seconds to connect, and for every single frame; a peer that takes a replica brings each
            file down to its disk within one.
        throttle: holds back what is sent; clients may share one.
        expected: the peer's node; "": any.
    """

    def __init__(
        self,
        address: tuple[str, int],
        party: Party,
        timeout: float = TIMEOUT,
        throttle: Throttle | None = None,
        expected: str = "",
    ) -> None:
        self._address = address
        self._party = party
        self._timeout = timeout
        self._throttle = throttle
        self._expected = expected
        self._peer = address_text(address)

    def fetch(
        self, folder: str, copy: str, file: str, begin: int = 0, end: int | None = None
    ) -> Iterator[memoryview]:
        """Yield the chunks of a file of a copy, or of a part of it, each in the same memory.

        Each chunk was as the peer read it; whether the file is the one that its manifest means, the digest
        of all of them says.

        Args:
            folder: the peer's name of it.
            copy: name of the copy.
            file: name of the file.
            begin: of the part.
            end: of the part; None: that of the file.

        Raises:
            PeerError: see the class.
        """
        label = f"{copy}/{file}"
        request: dict[str, Any] = {"op": "get", "folder": folder, "copy": copy, "file": file}
        request |= {"begin": begin, "end": end}
        with self._ask(f"fetching {label} from {folder}", request) as channel:
            found = channel.receive_json(Kind.ANSWER).get("length")
            if type(found) is not int or not 0 <= found <= MOST_BYTES:
                raise NotUnderstood(self._peer, "the length of what follows", repr(found))
            if end is not None and found != end - begin:
                raise NotUnderstood(self._peer, f"{end - begin} bytes", f"{found} bytes")
            yield from channel.receive_file(label, found)

    def send(self, source: str, copy: str, files: Mapping[str, tuple[Path | bytes, str]]) -> int:
        """Send a whole copy to the peer and return its size; on an error nothing of it stays there.

        Only a ``PeerLost`` after the last file leaves open whether the copy is there.

        Args:
            source: name of the node whose copy it is.
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
                    descriptor = os.open(content, READ_FLAGS)
                    stack.callback(os.close, descriptor)
                    size = os.fstat(descriptor).st_size
                    chunks = chunks_of(descriptor, size, file)
                else:
                    size, chunks = len(content), _slices(content)
                sources.append((Promise(file, size, digest), chunks))
            promises = [promise for promise, _ in sources]
            request = {"op": "put", "source": source, "copy": copy, "files": promises}
            channel = stack.enter_context(self._ask(f"sending {copy}", request))
            channel.receive(Kind.ANSWER)
            for promise, chunks in sources:
                channel.doing, channel.done = f"sending {copy}/{promise.file}", 0
                _send_chunks(channel, chunks)
                channel.receive(Kind.ANSWER)
            channel.doing = f"committing {copy}"
            channel.receive(Kind.ANSWER)
        return sum(promise.nbytes for promise in promises)

    def greet(self) -> None:
        """Connect, prove who this side is and have the peer prove the same; ask for nothing.

        Raises:
            PeerError: see the class.
        """
        with self._ask("greeting", None):
            pass

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the peer's answer to a message; after ``PeerLost`` it may have been heard all the same.

        Raises:
            PeerError: see the class.
            ValueError: the message is larger than 1 MiB.
        """
        size = len(codec.encode(message))
        if size > MESSAGE_BYTES:
            raise ValueError(
                f"message: at most {MESSAGE_BYTES} bytes expected, {size} found; it was not sent"
            )
        with self._ask("asking", {"op": "message", "body": message}) as channel:
            return channel.receive_json(Kind.ANSWER)

    @contextmanager
    def _ask(self, doing: str, request: dict[str, Any] | None) -> Iterator[Channel]:
        """Connect, greet and say what is wanted."""
        source = (self._party.host, 0) if self._party.host else None  # peers compare it with their table
        try:
            connection = socket.create_connection(self._address, self._timeout, source)
        except OSError as error:
            raise PeerLost(self._peer, "connecting", 0, str(error)) from error
        with closing(Channel(connection, self._peer, self._timeout, self._throttle)) as channel:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(channel, self._party, self._expected)
            channel.doing = doing
            if request is not None:
                channel.send_json(Kind.REQUEST, request)
            yield channel


def _slices(content: bytes) -> Iterator[memoryview]:
    for begin in range(0, len(content), CHUNK_BYTES):
        yield memoryview(content)[begin : begin + CHUNK_BYTES]


def _send_chunks(channel: Channel, chunks: Iterator[memoryview]) -> None:
    """Send a file; what the peer says before its end is why it does not want the rest."""
    try:
        for chunk in chunks:
            if channel.has_answer():
                channel.receive(Kind.ANSWER)
                expected = "a refusal or nothing"
                raise NotUnderstood(channel.peer, expected, "an answer before the end of a file")
            channel.send_chunk(chunk)
    except PeerLost:
        with suppress(PeerLost):
            channel.receive(Kind.ANSWER, time.monotonic() + _LAST_WORD_SECONDS)
        raise
