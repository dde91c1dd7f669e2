"""The listening side of savers: who connects is listened to here until it has proven who it is.

One thread serves all of those, however many and however slow they are. Each has a few seconds and a few KiB.
Who has proven who it is, is handed on at once.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from outlast.checkpoint.replica.frames import (
    HEADER_BYTES,
    Kind,
    NotUnderstood,
    PeerError,
    PeerLost,
    address_text,
    frame,
    read_header,
    refusal_values,
)
from outlast.checkpoint.replica.handshake import Party, refused
from outlast.cluster.rpc.handshake import Greeting, Hello
from outlast.cluster.rpc.handshake import Refusal as NotGreeted
from outlast.cluster.rpc.strangers import Strangers

_WAKE = 5.0
_ACCEPTS = 64  # a turn
_PAUSE = 0.1  # seconds without accepting when no connection can be taken
_PARTING_SECONDS = 1.0  # for a stranger that was refused to hear why
_PARTING_BYTES = 1 << 20
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_READ = (BlockingIOError, InterruptedError, ssl.SSLWantReadError)


@dataclass(frozen=True)
class Door:
    """Who comes in, and who hears of it; all calls come from the reception's thread.

    Args:
        party: returns this side.
        admit: takes what a stranger has proven to be and the address that it comes from; raises PeerError.
        take: takes a proven connection, what it is and its address; it blocks again.
        report: takes a sentence about each connection that failed.
        patience: seconds that a stranger is listened to.
        most: strangers at once.
    """

    party: Callable[[], Party]
    admit: Callable[[Hello, str], None]
    take: Callable[[socket.socket, Hello, str], None]
    report: Callable[[str], None]
    patience: float = 10.0
    most: int = 256


class Reception:
    """Listens until :meth:`close`.

    Args:
        listener: closed by the reception.
        door: see there.
    """

    def __init__(self, listener: socket.socket, door: Door) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._door = door
        self._strangers: Strangers[_Stranger] = Strangers(door.most, door.patience)
        self._parting: Strangers[_Stranger] = Strangers(door.most, _PARTING_SECONDS)
        self._by_descriptor: dict[int, _Stranger] = {}
        self._closing = False
        self._again = 0.0
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)
        self._thread.start()

    def close(self, patience: float = _WAKE) -> None:
        """Listen no more, and close the connections with strangers."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(patience)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for one in list(self._by_descriptor.values()):
                self._forget(one)
                one.connection.close()
            self._listener.close()
            self._epoll.close()

    def _turn(self) -> None:
        now = time.monotonic()
        limits = [self._strangers.deadline(), self._parting.deadline(), self._again or None]
        soonest = min((each for each in limits if each is not None), default=now + _WAKE)
        for descriptor, _ in self._epoll.poll(min(max(soonest - now, 0.0), _WAKE)):
            one = self._by_descriptor.get(descriptor)
            if one is not None:
                self._hear(one)
            elif descriptor == self._listener.fileno():
                self._accept()
        now = time.monotonic()
        while (late := self._strangers.late(now)) is not None:
            self._drop(late, f"timed out: nothing was proven within {self._door.patience:g} s")
        while (late := self._parting.late(now)) is not None:
            self._forget(late)
            late.connection.close()
        if self._again and self._again <= now:
            self._again = 0.0
            self._epoll.register(self._listener, select.EPOLLIN)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._make_room(error)
                    return
                continue
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                party = self._door.party()
                if party.tls is not None:
                    connection = party.tls.serves.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                one = _Stranger(connection, address_text(address), party.greeting(dials=False))
            except OSError:  # it has gone already
                connection.close()
                continue
            self._by_descriptor[connection.fileno()] = one
            self._epoll.register(connection, select.EPOLLIN)
            surplus = self._strangers.add(one, one.host, time.monotonic())
            if surplus is not None:
                self._drop(surplus, f"more than {self._door.most} strangers at once; the oldest has to go")

    def _make_room(self, error: OSError) -> None:
        """Stop accepting for a moment, and close a stranger's connection."""
        self._epoll.unregister(self._listener)
        self._again = time.monotonic() + _PAUSE
        self._door.report(f"peers: a connection could not be taken: {error}; the next one may be")
        for kept in (self._parting, self._strangers):
            surplus = kept.surplus()
            if surplus is not None:
                self._forget(surplus)
                surplus.connection.close()

    def _hear(self, one: _Stranger) -> None:
        if one in self._parting:
            if one.has_diverged():
                self._forget(one)
                one.connection.close()
            return
        try:
            proven = one.step(self._door.admit)
        except PeerLost as error:
            self._drop(one, str(error))
        except (PeerError, OSError) as error:
            self._refuse(one, error)
        except Exception as error:  # noqa: BLE001 - what breaks one connection must not end the others
            self._drop(one, f"{type(error).__name__}: {error}")
        else:
            if proven is not None:
                self._forget(one)
                try:
                    one.connection.setblocking(True)
                    self._door.take(one.connection, proven, one.peer)
                except OSError as error:
                    one.connection.close()
                    self._say(one, str(error))

    def _refuse(self, one: _Stranger, error: PeerError | OSError) -> None:
        """Tell a stranger why it was refused; read what it still sends, or a reset destroys the answer."""
        self._say(one, str(error))
        self._strangers.remove(one)
        try:
            one.connection.send(frame(Kind.REFUSED, json.dumps(refusal_values(error)).encode()))
            one.connection.shutdown(socket.SHUT_WR)
        except OSError:
            self._forget(one)
            one.connection.close()
            return
        surplus = self._parting.add(one, one.host, time.monotonic())
        if surplus is not None:
            self._forget(surplus)
            surplus.connection.close()

    def _drop(self, one: _Stranger, why: str) -> None:
        self._forget(one)
        one.connection.close()
        self._say(one, why)

    def _say(self, one: _Stranger, why: str) -> None:
        text = why[:300]
        self._door.report(text if one.peer in text else f"peer {one.peer}: {text}; its connection was closed")

    def _forget(self, one: _Stranger) -> None:
        self._strangers.remove(one)
        self._parting.remove(one)
        if self._by_descriptor.pop(one.descriptor, None) is not None:
            self._epoll.unregister(one.descriptor)


class _Stranger:
    """A connection that has not proven yet who is at its other end."""

    def __init__(self, connection: socket.socket, peer: str, greeting: Greeting) -> None:
        self.connection = connection
        self.descriptor = connection.fileno()
        self.peer = peer
        self.host = peer.rpartition(":")[0]
        self._greeting = greeting
        self._secure = not isinstance(connection, ssl.SSLSocket)
        self._header: tuple[Kind, int, int] | None = None
        self._got = bytearray()
        self._diverged = 0

    def step(self, admit: Callable[[Hello, str], None]) -> Hello | None:
        """Read what there is; return what the other side is once it has proven it.

        Raises:
            PeerError: it is of no use.
            OSError: likewise.
        """
        try:
            if not self._secure:
                assert isinstance(self.connection, ssl.SSLSocket)
                try:
                    self.connection.do_handshake()
                except ssl.SSLError as error:
                    if isinstance(error, ssl.SSLWantReadError):
                        raise
                    raise PeerLost(self.peer, "agreeing on TLS", 0, str(error)) from error
                self._secure = True
            while True:
                payload = self._frame(Kind.HELLO if self._greeting.peer is None else Kind.PROOF)
                hello = self._greet(payload, admit)
                if hello is not None:
                    return hello
        except _READ:
            return None

    def _greet(self, payload: bytes, admit: Callable[[Hello, str], None]) -> Hello | None:
        try:
            if self._greeting.peer is None:
                self._greeting.take_hello(payload)
                self.connection.send(frame(Kind.HELLO, self._greeting.hello()))
                return None
            self._greeting.take_proof(payload)
        except NotGreeted as error:
            raise refused(error) from error
        admit(self._greeting.peer, self.host)
        self.connection.send(frame(Kind.PROOF, self._greeting.proof()))
        return self._greeting.peer

    def _frame(self, kind: Kind) -> bytes:
        """Return the payload of the next frame; not a byte after it is read."""
        if self._header is None:
            header = self._read(HEADER_BYTES)
            self._header = read_header(header, kind, self.peer)
            if self._header[0] is not kind:
                raise PeerLost(self.peer, "shaking hands", 0, "it refused")
        payload = self._read(self._header[1])
        if xxh3_64_intdigest(payload) != self._header[2]:
            raise NotUnderstood(self.peer, f"a frame of {kind.name}", "one with another digest")
        self._header = None
        return payload

    def _read(self, count: int) -> bytes:
        while len(self._got) < count:
            found = self.connection.recv(count - len(self._got))
            if not found:
                raise PeerLost(self.peer, "shaking hands", 0, "the connection was closed")
            self._got += found
        payload, self._got = bytes(self._got), bytearray()
        return payload

    def has_diverged(self) -> bool:
        """Read and forget what is still sent; say whether the other side has ended, or says too much."""
        with suppress(*_READ):
            while self._diverged < _PARTING_BYTES:
                try:
                    found = self.connection.recv(1 << 16)
                except OSError as error:
                    if isinstance(error, _READ):
                        raise
                    return True
                if not found:
                    return True
                self._diverged += len(found)
            return True
        return False
