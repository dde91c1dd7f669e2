"""Frames between the checkpoint writers of two nodes: their codec, deadlines, digests and rate limit.

A frame is a header and a payload, whose kind bounds its size::

    magic (4) | version (2) | kind (2) | length (4) | xxh3_64 of the payload (8) | xxh32 of all these (4)

A file is sent as chunks of ``CHUNK_BYTES``, a frame each, so the digest of a chunk precedes it and is the one
that the copy's own documents hold. xxh3 finds accidents, not forgers: against somebody who can write into the
network there is TLS. Nothing that arrives is unpickled or used as a path.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, TypeVar

from xxhash import xxh3_64_intdigest, xxh32_intdigest

from outlast import codec
from outlast.errors import OutlastError

T = TypeVar("T")
CHUNK_BYTES = (
    1 << 20
)  # that of a copy's documents, so that their digests and those of the frames are the same
MESSAGE_BYTES = 1 << 20
TIMEOUT = 30.0
VERSION = 1
TEXT_CHARACTERS = 2000  # of a refusal
_MAGIC = b"OLsv"
_HEAD = struct.Struct("!4sHHIQ")
HEADER_BYTES = _HEAD.size + 4
BURST_BYTES = 4 << 20
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 64 << 20  # more than both sockets' buffers and a chunk


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # a JSON object: see handshake
    PROOF = 2  # a JSON object: see handshake
    REQUEST = 3  # a JSON object
    ANSWER = 4  # a JSON object
    REFUSED = 5  # a JSON object; the last frame of its sender
    CHUNK = 6  # bytes of a file


_LIMITS = {
    Kind.HELLO: 4096,
    Kind.PROOF: 1024,
    Kind.REQUEST: MESSAGE_BYTES + 1024,
    Kind.ANSWER: MESSAGE_BYTES,
    Kind.REFUSED: 1 << 14,
    Kind.CHUNK: CHUNK_BYTES,
}


class Refusal(str, Enum):
    """Why a peer refused."""

    TOKEN = "token"  # the two sides do not have the same token
    JOB = "job"  # it is of another run, version or protocol
    GENERATION = "generation"  # it is of another generation, or of other ranks of this one
    NODE = "node"  # it is none of the job's nodes, or asks in the name of another one
    LIMIT = "limit"  # it wants more than any peer may have
    MALFORMED = "malformed"  # no such request, name or range
    MISSING = "missing"  # no such folder, copy or file
    EXISTS = "exists"  # a copy of that name exists
    FULL = "full"  # no space is left
    WRONG_BYTES = "wrong bytes"
    FAILED = "failed"  # everything else; the text says what


_ERRNO = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO), Refusal.MISSING),
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), Refusal.EXISTS),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), Refusal.FULL),
}


class PeerError(OutlastError):
    """Something between two checkpoint writers failed; another peer or a later attempt may succeed."""

    refusal = Refusal.FAILED


class PeerLost(PeerError):
    """A peer could not be reached, closed the connection or stopped answering.

    Args:
        peer: its address.
        doing: what was under way.
        done: bytes of the current file that had been transferred.
        reason: what was seen.
    """

    def __init__(self, peer: str, doing: str, done: int, reason: str) -> None:
        super().__init__(f"peer {peer}: {reason} while {doing}; {done} bytes of it had been transferred")


class NotUnderstood(PeerError):
    """What a peer sent is not what this version of outlast says on such a connection."""

    refusal = Refusal.MALFORMED

    def __init__(self, peer: str, expected: str, found: str) -> None:
        super().__init__(f"peer {peer}: {expected} expected, {found[:200]} found; the connection was closed")


class PeerRefused(PeerError):
    """A peer refused; ``refusal`` says why."""

    def __init__(self, refusal: Refusal, text: str, peer: str = "") -> None:
        self.refusal = refusal
        self.text = text
        super().__init__(f"peer {peer} refused ({refusal.value}): {text}" if peer else text)


@dataclass(frozen=True)
class Mismatch:
    """Which bytes have which digest, and which one was expected."""

    file: str
    begin: int
    end: int
    expected: str
    found: str


class WrongBytes(PeerError):
    """Bytes are not those that their digest was taken of; what holds them is not used.

    Raised on the side that asked, also when the other one noticed. A range of one chunk was damaged
    on its way; a whole file that was sent was already wrong on the sender's disk.
    """

    refusal = Refusal.WRONG_BYTES

    def __init__(self, peer: str, mismatch: Mismatch) -> None:
        self.mismatch = mismatch
        super().__init__(
            f"peer {peer}: {mismatch.file}, bytes {mismatch.begin} to {mismatch.end}: digest"
            f" {mismatch.expected} expected, {mismatch.found} found; they are not used"
        )


@dataclass(frozen=True)
class Refused:
    """Why a side refuses, as it reports it to the other one."""

    refusal: Refusal
    text: str
    mismatch: Mismatch | None = None

    @classmethod
    def of(cls, error: PeerError | OSError) -> Refused:
        """Return the report of an error."""
        refusal = _ERRNO.get(error.errno or 0) if isinstance(error, OSError) else error.refusal
        mismatch = error.mismatch if isinstance(error, WrongBytes) else None
        return cls(refusal or Refusal.FAILED, str(error)[:TEXT_CHARACTERS], mismatch)

    def error(self, peer: str) -> PeerError:
        """Return the error of the side that is refused."""
        if self.mismatch is not None:
            return WrongBytes(peer, self.mismatch)
        return PeerRefused(self.refusal, self.text[:TEXT_CHARACTERS], peer)


class Throttle:
    """A token bucket that several connections share: what is taken beyond its content is waited for.

    Args:
        bytes_per_second: how fast it fills; None: no limit.
        burst: bytes that it holds at most, and at first.
        clock: seconds, monotonic.
        wait: sleeps.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        burst: float = BURST_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._burst = self._content = burst
        self._clock = clock
        self._wait = wait
        self._at = clock()
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """Take bytes out and return for how many seconds from now on they must be held back."""
        if self._rate is None:
            return 0.0
        with self._lock:
            passed, self._at = self._clock() - self._at, self._clock()
            self._content = min(self._content + passed * self._rate, self._burst) - nbytes
            return max(-self._content / self._rate, 0.0)

    def hold(self, nbytes: int) -> None:
        """Wait until the bytes may be sent."""
        seconds = self.reserve(nbytes)
        if seconds > 0:
            self._wait(seconds)


class Channel:
    """A connection on which frames are exchanged; no wait is longer than the timeout for one frame.

    Args:
        connection: a connected stream socket. Its buffers are the kernel's to size: 4 MiB by hand were no
            faster on loopback, and would fix the window of a long line.
        peer: what messages call the other side.
        timeout: seconds for a frame to arrive, or to be taken, as a whole.
        throttle: holds back chunks.

    Raises:
        PeerLost: from every method that sends or receives.
    """

    def __init__(
        self, connection: socket.socket, peer: str, timeout: float, throttle: Throttle | None = None
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.timeout = timeout
        self.doing = "shaking hands"
        self.done = 0
        self.node = ""  # the other side's, once it has proven it
        self._throttle = throttle

    def encrypt(self, context: ssl.SSLContext, dialled: bool) -> bytes:
        """Agree on TLS within the timeout, and return the other side's certificate.

        Args:
            context: of this side.
            dialled: the other side has opened the connection.
        """
        try:
            self.connection.settimeout(self.timeout)
            safe = context.wrap_socket(self.connection, server_side=dialled, do_handshake_on_connect=False)
            self.connection = safe  # what ends the connection ends the handshake, too
            safe.do_handshake()
            return safe.getpeercert(binary_form=True) or b""
        except OSError as error:
            raise PeerLost(self.peer, "agreeing on TLS", 0, str(error)) from error

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def send(self, kind: Kind, payload: memoryview | bytes = b"", deadline: float | None = None) -> None:
        """Send a frame."""
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        parts = (_header_of(kind, payload), payload)
        for part in parts if kind is Kind.CHUNK else (b"".join(parts),):
            self._move(part, deadline, self.connection.send)

    def send_json(self, kind: Kind, value: object) -> None:
        """Send a JSON object."""
        self.send(kind, codec.encode(value))

    def send_chunk(self, chunk: memoryview) -> None:
        """Send a chunk of a file as soon as the throttle lets it."""
        if self._throttle is not None:
            self._throttle.hold(len(chunk))
        self.send(Kind.CHUNK, chunk)
        self.done += len(chunk)

    def receive(self, kind: Kind, deadline: float | None = None) -> bytes:
        """Return the payload of the next frame.

        Raises:
            NotUnderstood: it is not a frame of this kind and version, or too long.
            PeerRefused: the other side refused; ``WrongBytes`` when that is why.
            WrongBytes: the payload's digest is wrong.
        """
        return bytes(self._receive(kind, f"a frame of {kind.name}", deadline=deadline))

    def receive_json(self, kind: Kind) -> dict[str, Any]:
        """Return the JSON object of the next frame; see :meth:`receive`."""
        return self._parsed(self.receive(kind), dict[str, Any])

    def receive_file(self, file: str, nbytes: int) -> Iterator[memoryview]:
        """Yield the verified chunks of a file, each in the same memory; see :meth:`receive`.

        Args:
            file: what errors call it.
            nbytes: its size.
        """
        buffer = memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
        self.done = 0
        for begin in range(0, nbytes, CHUNK_BYTES):
            chunk = buffer[: nbytes - begin]
            self._receive(Kind.CHUNK, file, begin, chunk)
            yield chunk
            self.done += len(chunk)

    def has_answer(self) -> bool:
        """Return whether something has arrived: before it is due, it is a refusal or the end."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def refuse(self, error: PeerError | OSError) -> None:
        """Send why this side refuses, and read what is still under way: a reset would destroy the answer."""
        self.send_json(Kind.REFUSED, Refused.of(error))
        deadline = time.monotonic() + min(self.timeout, _LINGER_SECONDS)
        try:
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(_LINGER_BYTES >> 16):
                self.connection.settimeout(_left(deadline))
                if not self.connection.recv(1 << 16):
                    return
        except OSError:
            return

    def _receive(
        self,
        expected: Kind,
        file: str,
        begin: int = 0,
        into: memoryview | None = None,
        deadline: float | None = None,
    ) -> memoryview:
        """Return the verified payload of the next frame, in ``into`` if given; a refusal is raised."""
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        header = bytearray(HEADER_BYTES)
        self._move(header, deadline, self.connection.recv_into)
        kind, length, digest = _read_header(header, expected, self.peer)
        if kind is Kind.REFUSED:
            file, begin, into = "a refusal", 0, None
        if into is None:
            into = memoryview(bytearray(length))
        elif length != len(into):
            raise NotUnderstood(self.peer, f"a chunk of {len(into)} bytes of {file}", f"one of {length}")
        self._move(into, deadline, self.connection.recv_into)
        found = xxh3_64_intdigest(into)
        if found != digest:
            mismatch = Mismatch(file, begin, begin + length, f"{digest:016x}", f"{found:016x}")
            raise WrongBytes(self.peer, mismatch)
        if kind is Kind.REFUSED:
            raise self._parsed(bytes(into), Refused).error(self.peer)
        return into

    def _move(
        self, content: memoryview | bytes | bytearray, deadline: float, move: Callable[[memoryview], int]
    ) -> None:
        """Send or receive all of it."""
        rest = memoryview(content)
        try:
            while rest:
                self.connection.settimeout(_left(deadline))
                moved = move(rest)
                if not moved:
                    raise ConnectionError("the connection was closed")
                rest = rest[moved:]
        except OSError as error:
            raise PeerLost(self.peer, self.doing, self.done, str(error)) from error

    def _parsed(self, payload: bytes, kind: type[T]) -> T:
        try:
            return codec.decode(payload, kind)
        except codec.Malformed as error:
            raise NotUnderstood(self.peer, "a JSON object", str(error)) from error


def _header_of(kind: Kind, payload: memoryview | bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, VERSION, kind, len(payload), xxh3_64_intdigest(payload))
    return head + xxh32_intdigest(head).to_bytes(4, "big")


def _read_header(header: bytes | bytearray, expected: Kind, peer: str) -> tuple[Kind, int, int]:
    """Return kind, length and digest of the frame that follows.

    Raises:
        NotUnderstood: it is not a frame of this kind and version, or too long.
    """
    magic, version, number, length, digest = _HEAD.unpack_from(header)
    if magic != _MAGIC:
        raise NotUnderstood(peer, "a frame of outlast", repr(bytes(header)))
    if xxh32_intdigest(header[: _HEAD.size]) != int.from_bytes(header[_HEAD.size :], "big"):
        raise NotUnderstood(peer, "the header of a frame", repr(bytes(header)))
    if version != VERSION:
        raise NotUnderstood(peer, f"version {VERSION}", f"version {version}")
    if number not in (Kind.REFUSED, expected) or length > _LIMITS[Kind(number)]:
        limit = f"a frame of {expected.name} of at most {_LIMITS[expected]} bytes"
        raise NotUnderstood(peer, limit, f"kind {number} of {length} bytes")
    return Kind(number), length, digest


def address_text(address: tuple[Any, ...]) -> str:
    """Return host and port as messages show them."""
    return f"{address[0]}:{address[1]}"


def _left(deadline: float) -> float:
    """Return the seconds until a deadline, which must not have come."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
