"""What a channel does with its connections: greets, dials, delivers, and tells its owner what came of it."""

from __future__ import annotations

import errno
import math
import os
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from outlast.cluster.rpc.arrivals import Arrivals, Gone, Pong, Received, Refused, Tally
from outlast.cluster.rpc.connection import Line, Stage
from outlast.cluster.rpc.handshake import Greeting, Hello, Reason, Refusal, new_nonce
from outlast.cluster.rpc.loop import Loop, out_of_descriptors
from outlast.cluster.rpc.peers import Dial, Directory, Found, Resolver, split

_REPORT_EVERY = 60.0  # seconds between two reports of the same refusal of the same host
_MOST_REPORTS = 1000
_MANY = 32  # messages that wait for the end of a turn
_OPEN = Stage.OPEN
PING = b"ping"  # no JSON, so it is no message of the owner's
_PONG = b"pong "
_NOBODY = os.strerror(errno.ECONNREFUSED)
_LONGEST_IDLE = 1e9
_HERE = (Reason.UNREACHABLE, Reason.TLS, Reason.NO_WEBSOCKET, Reason.ENDED, Reason.DEADLINE)


class Outgoing(NamedTuple):
    """A text for a peer; ``address`` is dialled where there is no connection with it."""

    to: str
    text: bytes
    address: str = ""


@dataclass(frozen=True)
class ServerTerms:
    """Who this side is, and how it talks."""

    name: str
    boot: str
    version: str
    token: str
    serves: ssl.SSLContext | None = None
    dials: ssl.SSLContext | None = None
    certificate: bytes = b""


class ChannelServer:
    """Serves one loop, in its thread; ``tally`` may be read from any.

    Args:
        loop: carries the lines.
        terms: see there.
        arrivals: where to put what the owner gets.
    """

    def __init__(self, loop: Loop, terms: ServerTerms, arrivals: Arrivals) -> None:
        self.tally = Tally()
        self._loop = loop
        self._terms = terms
        self._arrivals = arrivals
        self._directory = Directory(terms.name)
        self._resolver = Resolver(lambda dial, found: loop.order(self._resolved, dial, found))
        self._dials: dict[tuple[str, bool], Dial] = {}  # knocks apart: who is expected may be gone
        self._dial_of: dict[Line, Dial] = {}
        self._reported: dict[tuple[str, str], float] = {}
        self._closing = False

    def post_all(self, messages: Iterable[Outgoing]) -> None:
        """Send to peers, in this order."""
        for one in messages:
            self.post(*one)

    def post(self, name: str, payload: bytes, address: str) -> None:
        """Send to a peer, over the connection that there is, or one to ``address``."""
        peer = self._directory.of(name)
        if peer.line is not None:
            self._loop.has_mail(peer.line)
            if len(peer.box.waiting) >= _MANY:
                peer.line.flush()  # what a peer takes is not dropped for what comes in the same turn
        elif not self._dial(address, name):
            self.tally.dropped += 1
            return
        self.tally.dropped += peer.box.put(payload)

    def knock(self, address: str, payload: bytes) -> None:
        """Send to the agent at an address."""
        dial = self._dials.get((address, False))
        line = self._directory.line(dial.peer) if dial is not None and dial.peer else None
        if line is not None and line.address == address:
            self.post(line.peer, payload, address)
        elif self._dial(address, ""):
            dial = self._dials[address, False]
            self.tally.dropped += dial.knocks.put(payload)
            self._move_knocks(dial)
        else:
            self.tally.dropped += 1

    def drop(self, name: str) -> None:
        """Close the connection with a peer, or what is on the way to be one."""
        peer = self._directory.of(name)
        self.tally.dropped += peer.box.clear()
        for line in (peer.line, peer.claim):
            if line is not None:
                self._forget(line)
                self._loop.part(line, Refusal(Reason.DROPPED, "the other side closed the connection"))

    def close(self) -> None:
        """Say goodbye to all and end the loop."""
        self._closing = True
        for line in self._loop.close():
            if line.stage is not Stage.ENDING:
                self._loop.part(line, Refusal(Reason.GOODBYE, "it said goodbye"))

    def welcome(self, connection: socket.socket, address: str) -> Line:
        """Return the line of somebody who has dialled."""
        greeting = self._new_greeting(dials=False)
        greeting.certificate = self._terms.certificate
        return Line(connection, address, greeting, self._terms.serves, False, self.tally)

    def take(self, line: Line, text: bytes | bytearray) -> None:
        """Read a text that arrived: a message, or a part of the greeting.

        Raises:
            Refusal: the line is of no use.
        """
        if line.stage is not _OPEN:
            self._greet(line, text)
            return
        self.tally.received += 1
        if text == PING:
            self.post(line.peer, _PONG + f"{self._arrivals.idle:.3f}".encode(), "")
        elif text.startswith(_PONG):
            self._arrivals.put(Pong(line.peer, _idle_in(text)))
        else:
            self._arrivals.put(Received(line.peer, bytes(text)), len(text))

    def ended(self, line: Line, refusal: Refusal) -> None:
        """Tell the owner, or try the next address."""
        name = self._directory.ended(line)
        dial = self._dial_of.pop(line, None)
        if self._closing:
            return
        if name:
            self.tally.dropped += self._directory.of(name).box.clear()
            if refusal.reason in (Reason.TOO_LONG, Reason.MALFORMED, Reason.FAILED):
                self.tally.refused[refusal.reason.name.lower()] += 1
            self._arrivals.put(Gone(name, refusal.text))
        elif refusal.reason is Reason.CROSSED:
            if dial is not None:
                dial.succeeded()
        elif dial is None:
            self.note(line.address, refusal)
        elif dial.candidates and refusal.reason in _HERE:
            self._next(dial)
        else:
            self._fail(dial, refusal)

    def note(self, address: str, refusal: Refusal) -> None:
        """Count a refusal; tell the owner, though not every time when somebody knocks again and again."""
        kind = refusal.reason.name.lower()
        self.tally.refused[kind] += 1
        now = time.monotonic()
        key = (address.rpartition(":")[0], kind)
        if now < self._reported.get(key, 0.0):
            return
        if len(self._reported) >= _MOST_REPORTS:
            self._reported.clear()
        self._reported[key] = now + _REPORT_EVERY
        self._arrivals.put(Refused(address, refusal.text))

    def failed(self, error: Exception) -> None:
        """Tell the owner that the loop has ended by a defect: nobody is connected any more."""
        for name, peer in self._directory.peers.items():
            if peer.line is not None:
                self._arrivals.put(Gone(name, "this side's channel has failed"))
        text = f"the channel has failed and is closed: {type(error).__name__}: {error}"
        self._arrivals.put(Refused("this side", text))
        self._arrivals.tell()

    def turned(self) -> bool:
        """Tell the owner; return whether it takes more."""
        self._arrivals.tell()
        return not self._arrivals.full

    def _new_greeting(self, dials: bool) -> Greeting:
        terms = self._terms
        return Greeting(Hello(terms.name, terms.boot, new_nonce(), terms.version), terms.token, dials)

    def _greet(self, line: Line, text: bytes | bytearray) -> None:
        greeting = line.greeting
        if greeting.peer is None:
            hello = greeting.take_hello(text)
            if not line.dials:
                line.send(greeting.hello())
            else:
                self._claim(line, hello)
        else:
            greeting.take_proof(text)
            if line.dials:
                self._open(line, [])
            else:
                replaced = self._directory.admit(line)
                line.send(greeting.proof())
                self._open(line, replaced)
        line.flush()

    def _claim(self, line: Line, hello: Hello) -> None:
        dial = self._dial_of[line]
        if dial.expected and dial.expected != hello.name:
            raise Refusal(Reason.OTHER_NAME, f"{dial.expected[:50]} expected, {hello.name[:50]} found")
        dial.peer = hello.name
        self._move_knocks(dial)
        last = self._directory.claim(line, hello)
        line.send(line.greeting.proof(last))

    def _open(self, line: Line, replaced: list[Line]) -> None:
        self._loop.greeted(line)
        old = self._directory.opened(line)
        dial = self._dial_of.pop(line, None)
        if dial is not None:
            dial.succeeded()
        for each in {*replaced, *([old] if old is not None else [])}:
            self._forget(each)
            open_one = each is old
            reason = Reason.REPLACED if open_one else Reason.CROSSED
            self._loop.part(each, Refusal(reason, "a newer connection of the same name took its place"))
        if line.box.waiting:
            self._loop.has_mail(line)

    def _forget(self, line: Line) -> None:
        """Have a line that ends be no matter of the owner's."""
        self._directory.ended(line)
        dial = self._dial_of.pop(line, None)
        if dial is not None:
            dial.succeeded()

    def _move_knocks(self, dial: Dial) -> None:
        """Hand over to a peer what was sent to its address before it was known; any connection will do."""
        if not dial.peer:
            return
        peer = self._directory.of(dial.peer)
        while dial.knocks.waiting:
            self.tally.dropped += peer.box.put(dial.knocks.take())
        if peer.line is not None:
            self._loop.has_mail(peer.line)

    def _dial(self, address: str, expected: str) -> bool:
        """See to it that an address is being dialled; say whether it is."""
        if not address or self._closing:
            return False
        dial = self._dials.setdefault((address, bool(expected)), Dial(address))
        if dial.busy:
            return True
        if time.monotonic() < dial.not_before:
            return False
        dial.busy, dial.expected, dial.peer = True, expected, ""
        try:
            self._resolver.ask(dial, *split(address))
        except ValueError as error:
            self._fail(dial, Refusal(Reason.NAME, str(error)))
            return False
        return True

    def _resolved(self, dial: Dial, found: Found | str) -> None:
        if self._closing:
            return
        if isinstance(found, str):
            self._fail(dial, Refusal(Reason.NAME, found))
        else:
            dial.candidates = found
            self._next(dial)

    def _next(self, dial: Dial) -> None:
        """Try the next address of a name."""
        refusal = Refusal(Reason.UNREACHABLE, "the name has no address")
        while dial.candidates:
            family, address = dial.candidates.pop(0)
            connection = None
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                code = connection.connect_ex(address)
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
            except OSError as error:
                short = connection is None
                reason = Reason.DESCRIPTORS if short else Reason.UNREACHABLE
                refusal = Refusal(
                    reason, out_of_descriptors(error) if short else os.strerror(error.errno or 0)
                )
                if connection is not None:
                    connection.close()
                continue
            greeting = self._new_greeting(dials=True)
            line = Line(connection, dial.address, greeting, self._terms.dials, True, self.tally)
            dial.line = line
            self._dial_of[line] = dial
            self._loop.begin(line)
            return
        self._fail(dial, refusal)

    def _fail(self, dial: Dial, refusal: Refusal) -> None:
        """Give up an address for a while; what waits for it is lost."""
        dial.failed(time.monotonic())
        self.tally.refused[refusal.reason.name.lower()] += 1
        self.tally.dropped += dial.knocks.clear()
        for name in {dial.expected, dial.peer} - {""}:
            peer = self._directory.of(name)
            if peer.line is None and peer.claim is None:
                self.tally.dropped += peer.box.clear()
        nobody = refusal.reason is Reason.UNREACHABLE and refusal.text == _NOBODY
        vacant = nobody or refusal.reason is Reason.OTHER_NAME
        self._arrivals.put(Refused(dial.address, refusal.text, vacant))


def _idle_in(pong: bytes | bytearray) -> float:
    try:
        idle = float(pong[len(_PONG) :])
    except ValueError:
        idle = math.nan
    if not 0 <= idle <= _LONGEST_IDLE:
        raise Refusal(Reason.MALFORMED, f"seconds in a pong expected, {bytes(pong[:30])!r} found")
    return idle
