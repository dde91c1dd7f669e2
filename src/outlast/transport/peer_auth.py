"""How savers of a job's nodes, and ranks that fetch from them, prove who they are.

The proof is the agents' (:mod:`outlast.transport.channel_auth`), under a key of the run: it covers the random
numbers of both sides, so a recorded greeting is of no use, and the run, generation, session, node and version
that a side says of itself. Who knows the key and is of another generation, say, is refused with a sentence.
"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass, field

from outlast.transport.channel_auth import Greeting, Hello, Reason, new_nonce, own_version
from outlast.transport.channel_auth import Refusal as NotGreeted
from outlast.transport.credentials import Tls
from outlast.transport.peer_frames import Channel, Kind, PeerLost, PeerRefused, Refusal

_PURPOSE = b"outlast peer"
_REFUSALS = {
    Reason.TOKEN: Refusal.TOKEN,
    Reason.OTHER_JOB: Refusal.JOB,
    Reason.PROTOCOL: Refusal.JOB,
    Reason.OTHER_NAME: Refusal.NODE,
    Reason.ITSELF: Refusal.NODE,
}


@dataclass(frozen=True)
class Party:
    """One side of connections between savers.

    Args:
        node: its name; no other side has it.
        key: what all sides of the run know; "" only on a loopback address.
        run: id of the run.
        generation: of the ranks that the side serves, or is one of.
        session: likewise.
        host: the address that it listens at and dials from; "": any.
        tls: None: no TLS.
        boot: random, of this process.
    """

    node: str
    key: str
    run: str = ""
    generation: int = 0
    session: str = ""
    host: str = ""
    tls: Tls | None = None
    boot: str = field(default_factory=new_nonce)

    def greeting(self, dials: bool) -> Greeting:
        """Return this side's part of a greeting; each is used once."""
        mine = Hello(
            self.node,
            self.boot,
            new_nonce(),
            own_version(),
            run=self.run,
            generation=self.generation,
            session=self.session,
        )
        greeting = Greeting(mine, self.key, dials, _PURPOSE)
        if not dials and self.tls is not None:
            greeting.certificate = self.tls.certificate
        return greeting

    def check(self, peer: Hello) -> None:
        """Check what a peer has proven to be.

        Raises:
            PeerRefused: it is of another version, generation or session.
        """
        version = own_version()
        if peer.version != version:
            raise PeerRefused(
                Refusal.JOB, f"outlast {version} expected, {peer.version[:20]} found on node {peer.name}"
            )
        if (peer.generation, peer.session) != (self.generation, self.session):
            raise PeerRefused(
                Refusal.GENERATION,
                f"generation {self.generation} (session {self.session}) expected, {peer.generation}"
                f" (session {peer.session[:40]}) found on node {peer.name}; nothing was done",
            )


def refused(error: NotGreeted, peer: str = "") -> PeerRefused:
    """Return what a greeting that came to nothing is for a saver."""
    return PeerRefused(_REFUSALS.get(error.reason, Refusal.MALFORMED), error.text, peer)


def encrypt(connection: socket.socket, party: Party, peer: str) -> tuple[socket.socket, bytes]:
    """Return a connection that was dialled, under TLS if there is any, and the other side's certificate.

    Raises:
        PeerLost: TLS did not come about.
    """
    if party.tls is None:
        return connection, b""
    try:
        safe: ssl.SSLSocket = party.tls.dials.wrap_socket(connection)
        return safe, safe.getpeercert(binary_form=True) or b""
    except OSError as error:
        raise PeerLost(peer, "agreeing on TLS", 0, str(error)) from error


def greet(channel: Channel, party: Party, certificate: bytes = b"", expected: str = "") -> None:
    """Prove to a server who this side is, and have it prove the same.

    Args:
        channel: a new connection that this side dialled.
        party: this side.
        certificate: the other side's, where there is TLS.
        expected: the other side's node; "": any.

    Raises:
        PeerRefused: one of the two does not know the key, or is not what the other one expects.
        PeerError: see :class:`Channel`.
    """
    deadline = time.monotonic() + channel.timeout
    greeting = party.greeting(dials=True)
    greeting.certificate = certificate
    try:
        channel.send(Kind.HELLO, greeting.hello(), deadline)
        hello = greeting.take_hello(channel.receive(Kind.HELLO, deadline))
        if expected and hello.name != expected:
            raise PeerRefused(
                Refusal.NODE, f"node {expected} expected, {hello.name[:50]} found", channel.peer
            )
        channel.send(Kind.PROOF, greeting.proof(), deadline)
        greeting.take_proof(channel.receive(Kind.PROOF, deadline))
    except NotGreeted as error:
        raise refused(error, channel.peer) from error
    channel.node = hello.name
