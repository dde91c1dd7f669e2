"""Messages between the agents of one job: texts over one authenticated WebSocket a pair of agents.

A :class:`Post` listens, dials and greets in a thread of its own; its owner waits for one descriptor. A
message goes over the connection that exists with a peer, no matter which side opened it. It may be lost
without notice: an agent that needs an answer asks again. The owner judges whether a silent peer is alive;
the end of a process shows at once as :class:`Gone`, and at the next
dial. The thread also answers pings, while its owner is busy.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import threading
import weakref
from collections.abc import Sequence

from outlast.cluster.rpc.arrivals import Arrival, Arrivals, Counters, Gone, Pong, Received, Refused
from outlast.cluster.rpc.connection import MESSAGE_BYTES
from outlast.cluster.rpc.handshake import BadSecurity, Security, contexts, new_nonce, own_version
from outlast.cluster.rpc.loop import Loop, out_of_descriptors
from outlast.cluster.rpc.server import PING, ChannelServer, Outgoing, ServerTerms
from outlast.errors import OutlastError, UsageError

__all__ = [
    "Arrival",
    "BadSecurity",
    "CannotListen",
    "Counters",
    "Gone",
    "MessageTooLong",
    "Outgoing",
    "Pong",
    "Post",
    "Received",
    "Refused",
    "Security",
    "TooFewDescriptors",
    "check_descriptors",
    "checked",
]

_BACKLOG = 4096
_SPARE_DESCRIPTORS = 64
_CLOSING_SECONDS = 3.0


class CannotListen(OutlastError):
    """An address cannot be listened at: it is taken, or not one of this node."""


class TooFewDescriptors(OutlastError):
    """This process may not open as many files as its connections need."""


class MessageTooLong(OutlastError):
    """A message has more bytes than a peer would take; it was not sent."""


class Post:
    """One agent's end of all its connections.

    Args:
        name: of this agent; no other one of the job has it.
        hosts: names or addresses of this node; one, or several with one port.
        port: 0 takes a free one; ``port`` says which.
        token: what all agents of the job know; "" only on a loopback address. It should be random: a
            peer that is dialled learns a proof, and may test guesses of the token with it.
        security: files for TLS; None: no TLS.
        patience: seconds to connect and to authenticate; then it is closed.

    Raises:
        UsageError: there is no name, or no token where others than this host can connect.
        CannotListen: the port is taken, or the host is no address of this node.
        TooFewDescriptors: not even these sockets could be made.
        BadSecurity: a file for TLS cannot be used.
    """

    def __init__(
        self,
        name: str,
        hosts: str | Sequence[str],
        port: int,
        token: str,
        *,
        security: Security | None = None,
        patience: float = 10.0,
    ) -> None:
        if not name:
            raise UsageError("channel: a name of this agent expected, '' found; nothing is listened to")
        tls = contexts(security) if security is not None else (None, None, b"")
        terms = ServerTerms(name, new_nonce(), own_version(), token, *tls)
        self.name = name
        self._closed = False
        with _making:
            names = (hosts,) if isinstance(hosts, str) else tuple(hosts)
            self.port = self._start(_listen_all(names, port, token), terms, patience)
            _posts.add(self)

    def _start(self, listeners: list[socket.socket], terms: ServerTerms, patience: float) -> int:
        port: int = listeners[0].getsockname()[1]
        try:
            self._arrivals = Arrivals()
            self._loop = Loop(listeners, patience)
        except OSError as error:
            for listener in listeners:
                listener.close()
            raise TooFewDescriptors(f"channel: {out_of_descriptors(error)}; nothing was started") from error
        self._office = ChannelServer(self._loop, terms, self._arrivals)
        self._thread = threading.Thread(
            target=self._loop.run, args=(self._office,), name="channel", daemon=True
        )
        self._thread.start()
        return port

    def __enter__(self) -> Post:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable while something waits."""
        return self._arrivals.descriptor

    def arrived(self) -> list[Arrival]:
        """Return what has arrived since the last call, in order; never waits."""
        return self._arrivals.take()

    def send(self, to: str, text: bytes, address: str = "") -> None:
        """Send a text to a peer, over the connection with it or a new one to ``address``; never waits.

        An address is host:port. Messages are dropped where there is no connection and none can be had, or
        where the last try at ``address`` failed a moment ago (0.1 s, doubling up to 2 s); the oldest are
        where the peer takes less than it is sent.

        Raises:
            MessageTooLong: it is longer than 4 MiB.
        """
        self.send_all((Outgoing(to, checked(text), address),))

    def send_all(self, messages: Sequence[Outgoing]) -> None:
        """Send :func:`checked` texts as :meth:`send` does.

        The channel's thread wakes once for all of them. If it woke for the first, it would compete with its
        owner for the interpreter while the owner writes the others.
        """
        if messages and not self._closed:
            self._loop.order(self._office.post_all, messages)

    def ping(self, to: str, address: str = "") -> None:
        """Ask whether a peer is there, as :meth:`send` does; its thread answers (:class:`Pong`)."""
        self.send_all((Outgoing(to, PING, address),))

    def knock(self, address: str, text: bytes) -> None:
        """Send a text to the agent that listens at an address (host:port); an answer comes under its name.

        Raises:
            MessageTooLong: see :meth:`send`.
        """
        if not self._closed:
            self._loop.order(self._office.knock, address, checked(text))

    def drop(self, peer: str) -> None:
        """Close the connection with a peer; a later message may open another one."""
        if not self._closed:
            self._loop.order(self._office.drop, peer)

    def counters(self) -> Counters:
        """Return what has passed since the start."""
        return self._office.tally.read()

    def close(self) -> None:
        """Send what waits and say goodbye, for a second at most; then close everything."""
        if self._closed:
            return
        self._closed = True
        self._loop.order(self._office.close)
        self._thread.join(_CLOSING_SECONDS)
        with _making:
            _posts.discard(self)
            if not self._thread.is_alive():
                self._arrivals.close()

    def _abandon(self) -> None:
        self._closed = True
        self._loop.abandon()
        self._arrivals.close()


def check_descriptors(peers: int) -> None:
    """Check that this process may open a connection with so many peers.

    Raises:
        TooFewDescriptors: the limit is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + peers + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        raise TooFewDescriptors(
            f"open files: at least {needed} expected for connections with {peers} agents,"
            f" 'ulimit -n' is {soft} (it may be raised to {hard}); nothing was started"
        )


def checked(text: bytes) -> bytes:
    """Return a text that a peer takes.

    Raises:
        MessageTooLong: it is longer than 4 MiB.
    """
    if len(text) > MESSAGE_BYTES:
        raise MessageTooLong(
            f"a message of at most {MESSAGE_BYTES} bytes expected, one of {len(text)} found; it was not sent"
        )
    return text


def _listen_all(hosts: tuple[str, ...], port: int, token: str) -> list[socket.socket]:
    """Listen at each host, all with the port of the first."""
    found: list[socket.socket] = []
    try:
        for host in hosts:
            found.append(_listen(host, found[0].getsockname()[1] if found else port, token))
    except OutlastError:
        for listener in found:
            listener.close()
        raise
    return found


def _listen(host: str, port: int, token: str) -> socket.socket:
    where = f"channel: {host or '*'}:{port}"
    if not 0 <= port < 65536:
        raise CannotListen(f"{where} cannot be listened at: no such port; nothing was started")
    try:
        info = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        address = str(info[4][0])
        if not token and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise UsageError(
                f"{where}: a token is expected where others than this host can connect, none was given;"
                " nothing is listened to"
            )
        both = info[0] == socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((address, port), family=info[0], backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise TooFewDescriptors(f"{where}: {out_of_descriptors(error)}; nothing was started") from error
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotListen(f"{where} cannot be listened at: {said}; nothing was started") from error


_making = threading.Lock()  # held while a post is made and unmade; a fork waits for it
_posts: weakref.WeakSet[Post] = weakref.WeakSet()
_held: list[Post] = []


def _before_fork() -> None:
    _making.acquire()
    _held.extend(_posts)
    for post in _held:
        post._loop.turn.acquire()


def _after_fork(in_child: bool) -> None:
    held, _held[:] = list(_held), []
    for post in held:
        if in_child:
            post._abandon()
            _posts.discard(post)
        post._loop.turn.release()
    _making.release()


# A forked process would keep the connections open when this one dies, and no peer would see it end.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(False),
    after_in_child=lambda: _after_fork(True),
)
