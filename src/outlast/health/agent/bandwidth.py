"""How fast bytes cross between two nodes: one connection, both ways, one after the other.

Both sides prove that they know the token, as savers do. Every chunk is digested on both sides and Python sits
in between, so the number is what one connection of a saver would get. It does not measure RDMA or NCCL.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from dataclasses import dataclass, replace
from typing import Annotated

from outlast.checkpoint.replica.frames import (
    CHUNK_BYTES,
    Channel,
    Kind,
    PeerError,
    address_text,
)
from outlast.checkpoint.replica.handshake import Party, greet
from outlast.checkpoint.replica.server import Listener, Terms
from outlast.cluster.rpc.handshake import new_nonce
from outlast.codec import Meta
from outlast.health.policy.preflight import Findings, Preflight, bandwidth

CHUNKS = 64  # of 1 MiB: more than the buffers on the way, half a second at 1 Gbit/s
MOST_CHUNKS = 4096
_AGAIN = 0.1  # seconds between two tries to reach a node that does not listen yet


@dataclass(frozen=True)
class Wanted:
    """A request to measure with so many chunks each way."""

    chunks: Annotated[int, Meta(ge=1, le=MOST_CHUNKS)]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes/s to and from a node; ``error``: why there is no result."""

    peer: str
    sent: float = 0.0
    received: float = 0.0
    error: str = ""
    seconds: float = 0.0

    def findings(self, limits: Preflight) -> Findings:
        """Return it compared with the limit."""
        found = bandwidth(self.peer, self.sent, self.received, limits, self.error)
        return [replace(one, seconds=self.seconds) for one in found]


def measure(address: tuple[str, int], token: str, deadline: float, chunks: int = CHUNKS) -> Bandwidth:
    """Send ``chunks`` MiB to a node that runs :func:`serve` and take as many from it.

    A failure is the result's error; nothing is raised.

    Args:
        address: host and port.
        token: what both sides know.
        deadline: monotonic time at which it has failed.
        chunks: 1 to ``MOST_CHUNKS``.
    """
    peer = address_text(address)
    began = time.monotonic()
    try:
        with _connect(address, deadline) as connection:
            channel = Channel(connection, peer, _left(deadline))
            greet(channel, Party(new_nonce(), token))
            channel.send_json(Kind.REQUEST, {"op": "bandwidth", "chunks": chunks})
            channel.receive(Kind.ANSWER)
            channel.doing = "measuring the bandwidth"
            sent = _send(channel, chunks, deadline)
            received = _receive(channel, chunks, deadline)
    except socket.gaierror as error:
        return Bandwidth(peer, error=f"the name does not resolve: {error.strerror}", seconds=_since(began))
    except (PeerError, OSError) as error:
        return Bandwidth(peer, error=str(error), seconds=_since(began))
    return Bandwidth(peer, sent, received, seconds=_since(began))


def serve(address: tuple[str, int], token: str, deadline: float) -> Bandwidth:
    """Wait for one node that measures, and return the rates as seen from here.

    A client that cannot prove the token, or breaks off, is refused and the next one is served.

    Raises:
        UsageError: there is no token and others than this host could connect.
        OSError: the address cannot be used.
    """
    began = time.monotonic()
    measured: queue.SimpleQueue[Bandwidth] = queue.SimpleQueue()
    refusals = ["nobody connected"]

    def take(channel: Channel, wanted: Wanted) -> None:
        measured.put(_serve(channel, wanted.chunks, deadline))

    operations = {"bandwidth": (Wanted, take)}
    listener = Listener(address, Party(new_nonce(), token), operations, Terms(report=refusals.append))
    try:
        return measured.get(timeout=_left(deadline))
    except queue.Empty:
        failed = refusals[-1]
    finally:
        listener.close()
    waited = f"{failed}; waited {_since(began):.0f} s"
    return Bandwidth(f"port {address[1]}", error=waited, seconds=_since(began))


def _serve(channel: Channel, chunks: int, deadline: float) -> Bandwidth:
    began = time.monotonic()
    channel.timeout = _left(deadline)
    channel.send_json(Kind.ANSWER, {})
    channel.doing = "measuring the bandwidth"
    received = _receive(channel, chunks, deadline)
    sent = _send(channel, chunks, deadline)
    return Bandwidth(channel.peer, sent, received, seconds=_since(began))


def _send(channel: Channel, chunks: int, deadline: float) -> float:
    """Send chunks, wait until all have been taken, and return the bytes/s."""
    content = os.urandom(CHUNK_BYTES)
    began = time.monotonic()
    for _ in range(chunks):
        channel.timeout = _left(deadline)
        channel.send_chunk(memoryview(content))
    channel.receive(Kind.ANSWER, deadline)
    return chunks * CHUNK_BYTES / _since(began)


def _receive(channel: Channel, chunks: int, deadline: float) -> float:
    """Take chunks, say so, and return the bytes/s."""
    began = time.monotonic()
    channel.timeout = _left(deadline)
    for _ in channel.receive_file("bandwidth", chunks * CHUNK_BYTES):
        channel.timeout = _left(deadline)
    rate = chunks * CHUNK_BYTES / _since(began)
    channel.send_json(Kind.ANSWER, {})
    return rate


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address, _left(deadline))
        except ConnectionRefusedError:
            if time.monotonic() + _AGAIN >= deadline:
                raise
            time.sleep(_AGAIN)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _since(began: float) -> float:
    return max(1e-9, time.monotonic() - began)
