"""The listening side: each connection is greeted in a thread of its own, and only a proven one is served.

A greeting takes a few seconds at most. Connections that have proven nothing are bounded in number and take no
place that a peer needs: where there are too many, the oldest of the host that has the most is closed.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from outlast.checkpoint.replica.frames import (
    TEXT_CHARACTERS,
    Channel,
    PeerError,
    PeerLost,
    PeerRefused,
    Refusal,
    address_text,
)
from outlast.checkpoint.replica.handshake import Party, Tls, welcome
from outlast.cluster.rpc.handshake import Hello
from outlast.strangers import Strangers

_CLOSING_SECONDS = 5.0
_PAUSE = 0.1  # seconds without accepting when no connection can be taken
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Reception:
    """How connections are greeted and what becomes of them; all calls come from several threads.

    Args:
        party: returns this side.
        admit: takes what the other side has proven to be and its address; raises PeerError.
        serve: takes a proven connection, which ends when it returns.
        report: takes a sentence about each connection that failed.
        patience: seconds in which the other side must have proven what it is.
        most: connections at once that have not.
        a_node: proven connections of one node at once; further ones are refused.
    """

    party: Callable[[], Party]
    admit: Callable[[Hello, str], None]
    serve: Callable[[Channel], None]
    report: Callable[[str], None]
    patience: float = 10.0
    most: int = 256
    a_node: int = 8


class _Connection:
    """A connection, its thread, and the node at its other end once that is proven."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection = connection
        self.peer = peer
        self.host = peer.rpartition(":")[0]
        self.node = ""
        self.ended = ""  # why this side has ended it
        self.thread: threading.Thread | None = None

    def encrypt(self, tls: Tls) -> None:
        """Agree on TLS; :meth:`end` ends this, too.

        Raises:
            PeerLost: the TLS handshake failed.
        """
        try:
            safe = tls.serves.wrap_socket(self.connection, server_side=True, do_handshake_on_connect=False)
            self.connection = safe
            safe.do_handshake()
        except OSError as error:
            raise PeerLost(self.peer, "agreeing on TLS", 0, str(error)) from error

    def end(self, why: str) -> None:
        """Wake the thread, which closes the connection."""
        self.ended = why
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Listener:
    """Listens until :meth:`close`.

    Args:
        listener: closed with this.
        reception: what becomes of connections.
    """

    def __init__(self, listener: socket.socket, reception: Reception) -> None:
        self._listener = listener
        self._reception = reception
        self._lock = threading.Lock()  # for what follows
        self._open: set[_Connection] = set()
        self._unproven: Strangers[_Connection] = Strangers(reception.most, reception.patience)
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
                    self._make_room(error)
                continue
            self._take(_Connection(connection, address_text(address)))

    def _make_room(self, error: OSError) -> None:
        """Stop accepting for a moment, and end a connection that has proven nothing."""
        self._say("peers", f"a connection could not be taken: {error}; the next one may be")
        with self._lock:
            surplus = self._unproven.surplus()
            if surplus is not None:
                self._unproven.remove(surplus)
        if surplus is not None:
            surplus.end("no descriptors are left")
        time.sleep(_PAUSE)

    def _take(self, one: _Connection) -> None:
        one.thread = threading.Thread(target=self._serve, args=(one,), daemon=True)
        with self._lock:
            self._open.add(one)
            surplus = self._unproven.add(one, one.host, time.monotonic())
            if surplus is not None:
                self._unproven.remove(surplus)
        if surplus is not None:
            surplus.end(f"more than {self._reception.most} unproven connections; the oldest is closed")
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
        reception = self._reception
        channel: Channel | None = None
        try:
            party = reception.party()
            one.connection.settimeout(reception.patience)  # also of the TLS handshake as a whole
            if party.tls is not None:
                one.encrypt(party.tls)
            channel = Channel(one.connection, one.peer, reception.patience)
            welcome(channel, party, lambda hello: self._admit(one, hello))
            with self._lock:
                self._unproven.remove(one)
            reception.serve(channel)
        except PeerLost as error:
            self._say(one.peer, one.ended or str(error))
        except Exception as error:  # noqa: BLE001 - what breaks one connection must not end the others
            told = error if isinstance(error, (PeerError, OSError)) else _unexpected(error)
            self._say(one.peer, one.ended or str(told))
            if channel is not None:
                channel.refuse(told)

    def _admit(self, one: _Connection, hello: Hello) -> None:
        """Check what the other side has proven to be.

        Raises:
            PeerRefused: nothing is served to it.
        """
        self._reception.admit(hello, one.host)
        with self._lock:
            count = sum(other.node == hello.name for other in self._open)
            if count >= self._reception.a_node:
                raise PeerRefused(
                    Refusal.LIMIT,
                    f"node {hello.name} has {count} connections, at most {self._reception.a_node}",
                )
            one.node = hello.name

    def _forget(self, one: _Connection) -> None:
        one.connection.close()
        with self._lock:
            self._open.discard(one)
            self._unproven.remove(one)

    def _say(self, peer: str, why: str) -> None:
        text = why[:300]
        text = text if peer in text else f"peer {peer}: {text}; its connection was closed"
        try:
            self._reception.report(text)
        except Exception:  # noqa: BLE001 - who cannot hear about a failure must not add one
            return


def _unexpected(error: Exception) -> PeerRefused:
    return PeerRefused(Refusal.FAILED, f"{type(error).__name__}: {str(error)[:TEXT_CHARACTERS]}")
