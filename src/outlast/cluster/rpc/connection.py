"""One connection of a channel: a socket that does not block, TLS if wanted, and WebSocket frames on it."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections import deque
from contextlib import suppress
from enum import IntEnum

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from outlast.cluster.rpc.arrivals import Tally
from outlast.cluster.rpc.handshake import Greeting, Reason, Refusal

MESSAGE_BYTES = 4 << 20  # a membership of 1,250 nodes is some 500 KB
_UNANSWERED_MS = 2000  # without it TCP stays silent after a cut for as long as the cut was
_UNACKED_AT = 24  # offset of tcpi_unacked in struct tcp_info, linux/tcp.h
STRANGER_BYTES = 16 << 10  # what somebody may send who has not proven to know the token
BOX_MESSAGES = 256
BOX_BYTES = 8 << 20
_BATCH_BYTES = 64 << 10
READ_BYTES = 256 << 10
_MOST_UNSENT = 2 * MESSAGE_BYTES  # of answers to pings
_REASON_BYTES = 123  # RFC 6455, 5.5: a control frame has 125 bytes at most
_EARLY = "the other side ended the connection before it was a WebSocket"
_PATH = "/outlast"
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stage(IntEnum):
    """How far a connection is."""

    CONNECTING = 0
    TLS = 1
    UPGRADE = 2
    STRANGER = 3  # WebSocket frames pass, the greeting does not have ended
    OPEN = 4
    ENDING = 5  # the close frame is on its way; what still arrives is thrown away
    CLOSED = 6


_OPEN = Stage.OPEN  # an attribute of an enumeration costs more than a name


class SendQueue:
    """What waits to be sent to one peer; where it is full, the oldest goes."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self._bytes = 0

    def put(self, payload: bytes) -> int:
        """Add a message and return how many were dropped for it."""
        self.waiting.append(payload)
        self._bytes += len(payload)
        dropped = 0
        while len(self.waiting) > BOX_MESSAGES or self._bytes > BOX_BYTES:
            self.take()
            dropped += 1
        return dropped

    def take(self) -> bytes:
        """Remove and return the oldest."""
        payload = self.waiting.popleft()
        self._bytes -= len(payload)
        return payload

    def clear(self) -> int:
        """Remove all and return how many there were."""
        count = len(self.waiting)
        self.waiting.clear()
        self._bytes = 0
        return count


class Line:
    """One connection; after each :meth:`step`, ``end`` says whether and why it is over.

    Args:
        connection: does not block; connected, or about to be if this side dials.
        address: of the other side, for messages.
        greeting: this side's part of it.
        context: for TLS; None: none.
        dials: whether this side opened the connection.
        tally: where messages and bytes are counted.
    """

    def __init__(
        self,
        connection: socket.socket,
        address: str,
        greeting: Greeting,
        context: ssl.SSLContext | None,
        dials: bool,
        tally: Tally,
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        self.address = address
        self.greeting = greeting
        self.dials = dials
        self.stage = Stage.CONNECTING if dials else Stage.TLS if context else Stage.UPGRADE
        self.end: Refusal | None = None
        self.peer = ""  # its name, once the line is open
        self.box = SendQueue()
        self.descriptor = connection.fileno()
        self.interest = 0  # what the selector was told
        self._tally = tally
        self._heard = 0  # bytes before the line was open
        self._waits_for_reader = False
        self._socket = connection
        self._context = context
        self._unsent: deque[memoryview] = deque()
        self._shut = False
        self._tls_writes = False
        self._protocol: ClientProtocol | ServerProtocol
        if dials:
            uri = WebSocketURI(
                context is not None, address.rpartition(":")[0].strip("[]") or "localhost", 80, _PATH, ""
            )
            self._protocol = ClientProtocol(uri, max_size=MESSAGE_BYTES)
        else:
            # A browser names the origin of a page; no page has any business here.
            self._protocol = ServerProtocol(origins=[None], max_size=MESSAGE_BYTES)
            if context is not None:
                self._wrap(context)

    @property
    def wants_write(self) -> bool:
        """Whether there is something that the socket did not take yet."""
        if self.stage is _OPEN or self.stage is Stage.ENDING:
            return bool(self._unsent)
        return self._tls_writes or self.stage is Stage.CONNECTING or bool(self._unsent)

    def step(self, into: memoryview) -> list[bytes | bytearray]:
        """Do what the socket allows and return the texts that arrived.

        Args:
            into: where a read puts its bytes; of no use afterwards. A new one for each read costs more.
        """
        texts: list[bytes | bytearray] = []
        try:
            if self.stage < _OPEN:
                if self.stage <= Stage.TLS:
                    self._connect()
                self.flush()
            with suppress(*_LATER):
                self._read(texts, into)
            self.flush()
        except _LATER:
            pass
        except Refusal as refusal:
            self.end = self.end or refusal
        except ssl.SSLError as error:
            said = str(error.reason or error).replace("_", " ").lower()
            self.end = self.end or Refusal(Reason.TLS, f"TLS: {said}")
        except OSError as error:
            self.end = self.end or self._lost(error)
        return texts

    def review_window(self) -> None:
        """Lift the limit on unanswered data while the peer acknowledges everything and reads nothing.

        Linux counts the time in which a peer's window is closed as unanswered, too, although its kernel
        answers every probe. A stopped or busy process is not a cut: the pings decide about it.
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_AT + 4)
        (unacked,) = struct.unpack_from("I", info, _UNACKED_AT)
        waits = bool(self._unsent) and not unacked
        if waits != self._waits_for_reader:
            self._waits_for_reader = waits
            limit = 0 if waits else _UNANSWERED_MS
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)

    def send(self, text: bytes) -> None:
        """Send a text of the greeting."""
        self._protocol.send_text(text)
        self._collect()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        try:
            while self._unsent or self._encode():
                head = self._unsent[0]
                count = self._socket.send(head)
                if count == len(head):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = head[count:]
        except _LATER:
            return
        except OSError as error:
            self.end = self.end or self._lost(error)
            return
        if self.stage is Stage.ENDING and not self._shut and self._context is None:
            self._shut = True
            self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self, reason: Reason, text: str) -> None:
        """Say why this side ends the connection; :meth:`close` follows when the other side has, too."""
        parting = self._protocol.close_rcvd is not None  # the library would take a second close for a defect
        if self.stage in (Stage.STRANGER, Stage.OPEN) and self._protocol.state is State.OPEN and not parting:
            if reason is Reason.GOODBYE:
                while self._encode():
                    pass
            if reason < Reason.NO_WEBSOCKET:
                self._protocol.send_close(int(reason), text.encode()[:_REASON_BYTES].decode(errors="ignore"))
        self._collect()
        self.end = None
        self.stage = Stage.ENDING if self._unsent else Stage.CLOSED
        if self.stage is Stage.ENDING:
            try:
                self.flush()
            except OSError:
                self.stage = Stage.CLOSED

    def close(self) -> None:
        """Close the socket."""
        self.stage = Stage.CLOSED
        self._unsent.clear()
        self._socket.close()

    def abandon(self) -> None:
        """Close the descriptor in a process that was forked: the connection is the parent's and goes on."""
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)

    def _lost(self, error: OSError) -> Refusal:
        said = os.strerror(error.errno) if error.errno else str(error)
        if self.stage is Stage.CONNECTING:
            return Refusal(Reason.UNREACHABLE, said)
        return Refusal(Reason.ENDED, _EARLY if self.stage is Stage.UPGRADE else said)

    def _wrap(self, context: ssl.SSLContext) -> None:
        self._socket = context.wrap_socket(
            self._socket, server_side=not self.dials, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self.stage = Stage.TLS

    def _connect(self) -> None:
        if self.stage is Stage.CONNECTING:
            trouble = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if trouble:
                raise OSError(trouble, os.strerror(trouble))
            if self._context is not None:
                self._wrap(self._context)
            else:
                self._upgrade()
        if self.stage is Stage.TLS:
            assert isinstance(self._socket, ssl.SSLSocket)
            try:
                self._tls_writes = False
                self._socket.do_handshake()
            except ssl.SSLWantWriteError:
                self._tls_writes = True
                raise
            if self.dials:
                self.greeting.certificate = self._socket.getpeercert(binary_form=True) or b""
            self._upgrade()

    def _upgrade(self) -> None:
        self.stage = Stage.UPGRADE
        if isinstance(self._protocol, ClientProtocol):
            self._protocol.send_request(self._protocol.connect())
            self._collect()

    def _read(self, texts: list[bytes | bytearray], into: memoryview) -> None:
        while self.end is None:
            stranger = self.stage < _OPEN
            if stranger and self._heard >= STRANGER_BYTES:
                raise Refusal(Reason.TOO_LONG, f"more than {STRANGER_BYTES} bytes before the proof")
            count = self._socket.recv_into(into, STRANGER_BYTES if stranger else READ_BYTES)
            if self.stage is not Stage.ENDING:
                self._tally.received_bytes += count
                self._heard += count if stranger else 0
                self._feed(into[:count], texts)
            elif not count:
                raise Refusal(Reason.ENDED, "the connection ended")
            if not isinstance(self._socket, ssl.SSLSocket) or not self._socket.pending():
                return

    def _feed(self, data: memoryview, texts: list[bytes | bytearray]) -> None:
        protocol = self._protocol
        if not data:
            raise Refusal(Reason.ENDED, _EARLY if self.stage < Stage.STRANGER else "the connection ended")
        protocol.receive_data(data)  # type: ignore[arg-type]
        for event in protocol.events_received():
            if isinstance(event, Frame):
                self._take(event, texts)
            else:
                if isinstance(event, Request) and isinstance(protocol, ServerProtocol):
                    protocol.send_response(protocol.accept(event))
                if protocol.handshake_exc is None:
                    self.stage = Stage.STRANGER
                    if self.dials:
                        self.send(self.greeting.hello())
        if protocol.writes:
            self._collect()
        if protocol.handshake_exc is not None:
            said = "an HTTP answer" if self.dials else "something else"
            raise Refusal(
                Reason.NO_WEBSOCKET, f"a WebSocket expected, {said} found: {protocol.handshake_exc}"
            )
        if protocol.parser_exc is not None and self.end is None:
            sent = protocol.close_sent
            reason = (
                Reason.TOO_LONG if sent is not None and sent.code == Reason.TOO_LONG else Reason.MALFORMED
            )
            raise Refusal(reason, f"a frame of at most {MESSAGE_BYTES} bytes expected: {protocol.parser_exc}")

    def _take(self, frame: Frame, texts: list[bytes | bytearray]) -> None:
        if frame.opcode is Opcode.TEXT and frame.fin:
            texts.append(frame.data)  # type: ignore[arg-type]
        elif frame.opcode is Opcode.CLOSE:
            found = self._protocol.close_rcvd
            code, said = (found.code, found.reason) if found is not None else (0, "")
            reason = Reason(code) if code in set(Reason) else Reason.ENDED
            self.end = Refusal(reason, said or f"the other side closed the connection ({code})")
        elif frame.opcode not in (Opcode.PING, Opcode.PONG):
            raise Refusal(Reason.MALFORMED, f"a whole text expected, a frame of {frame.opcode.name} found")
        elif sum(map(len, self._unsent)) > _MOST_UNSENT:
            raise Refusal(Reason.MALFORMED, "it sends pings and reads no answers")

    def _encode(self) -> bool:
        """Turn the next messages into frames; say whether there were any."""
        waiting = self.box.waiting
        if not waiting or self.stage is not _OPEN or self._protocol.state is not State.OPEN:
            return False
        size = 0
        frames: list[bytes] = []
        while waiting and size < _BATCH_BYTES:
            payload = self.box.take()
            size += len(payload)
            self._tally.sent += 1
            if self.dials:
                self._protocol.send_text(payload)
            else:
                frames += (_head(len(payload)), payload)
        self._tally.sent_bytes += size
        self._collect()
        if frames:
            self._unsent.append(memoryview(b"".join(frames)))
        return True

    def _collect(self) -> None:
        joined = b"".join(self._protocol.data_to_send())
        if joined:
            self._unsent.append(memoryview(joined))


def _head(size: int) -> bytes:
    """Return what comes before a text of so many bytes from the side that was dialled: it masks nothing.

    RFC 6455, 5.2. The library takes four times as long, and a leader sends a thousand at once.
    """
    if size < 126:
        return bytes((0x81, size))
    return b"\x81\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x81\x7f" + size.to_bytes(8, "big")
