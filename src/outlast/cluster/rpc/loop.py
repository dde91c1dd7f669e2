"""The thread of a channel: one selector over all its connections; what they are for is the office's business.

It wakes its owner once a turn, not once a message, and with many connections it makes a short pause between
two turns: a hundred messages that arrive within one cost one wake-up. What the owner sends ends the pause.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from outlast.cluster.rpc.connection import READ_BYTES, Line, Stage
from outlast.cluster.rpc.handshake import Reason, Refusal
from outlast.ipc.descriptors import for_strangers
from outlast.strangers import Strangers

_LINGER_SECONDS = 2.0
_CLOSING_SECONDS = 1.0
_REVIEW_SECONDS = 0.5  # shorter than what TCP leaves unanswered
_WAKE = 5.0
_MOST_STRANGERS, _SHARE = 2048, 4  # of the descriptors: as many may be ending as are listened to
_UNBOUNDED = 1 << 62
_ACCEPTS = 256  # a turn
_EVENTS = 4096
_PAUSE_A_LINE, _LONGEST_PAUSE, _FEW = 0.08, 100.0, 32  # ms
_OWNER_BEHIND = 0.02
_ENDING = Stage.ENDING
_IN, _BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Duties(Protocol):
    """What the loop asks of the one who knows what connections are for."""

    def welcome(self, connection: socket.socket, address: str) -> Line:
        """Return the connection with somebody who has dialled."""

    def take(self, line: Line, text: bytes | bytearray) -> None:
        """Read a text that arrived; raise ``Refusal`` to end the connection."""

    def ended(self, line: Line, refusal: Refusal) -> None:
        """Note that a connection has ended, or is about to."""

    def note(self, address: str, refusal: Refusal) -> None:
        """Note that something was refused before there was a connection."""

    def failed(self, error: Exception) -> None:
        """Tell the owner that the loop ends by a defect."""

    def turned(self) -> bool:
        """Tell the owner what has happened in a turn; return whether it takes more."""


class Loop:
    """Lines, deadlines and orders; :meth:`order` is for any thread, all else for the loop's own.

    Args:
        listeners: closed by the loop.
        patience: seconds to connect and to authenticate.
    """

    def __init__(self, listeners: Sequence[socket.socket], patience: float) -> None:
        self.turn = threading.Lock()  # held while descriptors are made and closed; a fork waits for it
        self._listeners = {listener.fileno(): listener for listener in listeners}
        for listener in listeners:
            listener.setblocking(False)
        self._lines: dict[int, Line] = {}
        most = for_strangers(_MOST_STRANGERS, _SHARE)
        self._strangers: Strangers[Line] = Strangers(most, patience)  # that have dialled
        self._dialled: Strangers[Line] = Strangers(_UNBOUNDED, patience)  # by this side
        self._ending: dict[Line, float] = {}
        self._blocked: dict[Line, float] = {}  # more to send than the socket takes: when that is reviewed
        self._fresh: set[Line] = set()  # that have got something to send in this turn
        self._orders: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._into = memoryview(bytearray(READ_BYTES))
        self._woken = False
        self._closing_by = 0.0
        self._listen_again = 0.0
        self._epoll = select.epoll()
        self._wake_lock = threading.Lock()  # the descriptor is not closed while it is written to
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._orders_come = select.poll()
        self._orders_come.register(self._wake, select.POLLIN)
        for descriptor in self._listeners:
            self._epoll.register(descriptor, select.EPOLLIN)

    def order(self, call: Callable[..., None], *args: Any) -> None:
        """Have something done in the loop's thread; never waits."""
        self._orders.append((call, args))
        if not self._woken:
            self._woken = True
            with self._wake_lock:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def run(self, duties: Duties) -> None:
        """Serve until :meth:`close` was ordered and all lines have ended, or a second has passed since."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        try:
            self._serve_all(duties)
        except Exception as error:  # noqa: BLE001 - the last frame of the thread
            duties.failed(error)
        with self.turn:
            for line in list(self._lines.values()):
                self.close_line(line)
            for listener in self._listeners.values():
                listener.close()
            self._epoll.close()
            with self._wake_lock:
                wake, self._wake = self._wake, -1
                os.close(wake)

    def _serve_all(self, duties: Duties) -> None:
        while not self._done():
            events = self._epoll.poll(self._until_next(), _EVENTS)
            with self.turn:
                self._take_turn(duties, events)
            while not duties.turned() and not self._closing_by and not self._orders:
                time.sleep(_OWNER_BEHIND)  # the owner is behind: the peers have to wait
            if len(self._lines) > _FEW and not self._closing_by:
                self._orders_come.poll(min(len(self._lines) * _PAUSE_A_LINE, _LONGEST_PAUSE))

    def abandon(self) -> None:
        """Close the descriptors in a forked process; the connections are the parent's and go on."""
        for line in self._lines.values():
            line.abandon()
        self._lines.clear()
        epoll = -1 if self._epoll.closed else self._epoll.fileno()
        wake, self._wake = self._wake, -1
        for descriptor in (*(listener.detach() for listener in self._listeners.values()), wake):
            if descriptor >= 0:
                os.close(descriptor)
        if epoll >= 0:
            self._epoll.close()

    def begin(self, line: Line) -> Line | None:
        """Take charge of a line that has to greet in time; return the stranger that has to go for it."""
        self._lines[line.descriptor] = line
        kept = self._dialled if line.dials else self._strangers
        surplus = kept.add(line, line.address.rpartition(":")[0], time.monotonic())
        line.interest = _BOTH if line.wants_write else _IN
        self._epoll.register(line.descriptor, line.interest)
        return surplus

    def greeted(self, line: Line) -> None:
        """Lift the deadline of a line."""
        (self._dialled if line.dials else self._strangers).remove(line)

    def has_mail(self, line: Line) -> None:
        """Have a line send what is in its box, before the turn ends."""
        self._fresh.add(line)

    def part(self, line: Line, refusal: Refusal) -> None:
        """End a line; the other side gets a moment to hear why."""
        self.greeted(line)
        try:
            line.hang_up(refusal.reason, refusal.text)
        except Exception:  # noqa: BLE001 - what breaks one connection must not end the others
            line.stage = Stage.CLOSED
        if line.stage is Stage.CLOSED:
            self.close_line(line)
        else:
            self._ending.setdefault(line, time.monotonic() + _LINGER_SECONDS)
            self._watch(line)
            while len(self._ending) > self._strangers.most:
                self.close_line(next(iter(self._ending)))

    def close_line(self, line: Line) -> None:
        """Close a line's socket."""
        self.greeted(line)
        self._ending.pop(line, None)
        self._blocked.pop(line, None)
        if self._lines.pop(line.descriptor, None) is not None:
            self._epoll.unregister(line.descriptor)
        line.close()

    def close(self) -> list[Line]:
        """Listen no more and end the thread within a second; return the lines, for their owner to part."""
        self._closing_by = time.monotonic() + _CLOSING_SECONDS
        for descriptor, listener in self._listeners.items():
            if not self._listen_again:
                self._epoll.unregister(descriptor)
            listener.close()
        return list(self._lines.values())

    def _done(self) -> bool:
        return bool(self._closing_by) and (not self._lines or time.monotonic() > self._closing_by)

    def _until_next(self) -> float:
        waiting = (*islice(self._ending.values(), 1), *islice(self._blocked.values(), 1))
        found = (self._strangers.deadline(), self._dialled.deadline(), *waiting)
        deadlines = [each for each in (*found, self._listen_again, self._closing_by) if each]
        return max(0.0, min(min(deadlines) - time.monotonic(), _WAKE)) if deadlines else _WAKE

    def _take_turn(self, duties: Duties, events: list[tuple[int, int]]) -> None:
        for descriptor, _ in events:
            line = self._lines.get(descriptor)
            if line is not None:
                self._serve(duties, line)
            elif descriptor == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif descriptor in self._listeners and not self._closing_by and not self._listen_again:
                self._accept(duties, self._listeners[descriptor])
        self._woken = False  # before the orders are taken: what comes after that wakes again
        for _ in range(len(self._orders)):
            call, args = self._orders.popleft()
            call(*args)
        fresh, self._fresh = self._fresh, set()
        for line in fresh:
            if line.stage is Stage.OPEN:
                line.flush()
                self._settle(duties, line)
        self._look_at_deadlines(duties, time.monotonic())

    def _look_at_deadlines(self, duties: Duties, now: float) -> None:
        for kept in (self._strangers, self._dialled):
            while (line := kept.late(now)) is not None:
                late = "connect" if line.stage is Stage.CONNECTING else "greet"
                text = f"the other side did not {late} within {kept.patience:g} s"
                self._end(duties, line, Refusal(Reason.DEADLINE, text))
        while self._ending and next(iter(self._ending.values())) <= now:
            self.close_line(next(iter(self._ending)))
        while self._blocked and next(iter(self._blocked.values())) <= now:
            line = next(iter(self._blocked))
            del self._blocked[line]
            line.review_window()
            self._blocked[line] = now + _REVIEW_SECONDS
        if self._listen_again and self._listen_again <= now and not self._closing_by:
            self._listen_again = 0.0
            for descriptor in self._listeners:
                self._epoll.register(descriptor, select.EPOLLIN)

    def _accept(self, duties: Duties, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    continue
                for descriptor in self._listeners:
                    self._epoll.unregister(descriptor)
                self._listen_again = time.monotonic() + 1.0
                duties.note("listening", Refusal(Reason.DESCRIPTORS, out_of_descriptors(error)))
                return
            connection.setblocking(False)
            try:
                surplus = self.begin(duties.welcome(connection, f"{address[0]}:{address[1]}"))
            except (OSError, ValueError):  # it has gone already
                connection.close()
                continue
            if surplus is not None:
                text = f"more than {self._strangers.most} strangers at once; the oldest has to go"
                self._end(duties, surplus, Refusal(Reason.DEADLINE, text))

    def _serve(self, duties: Duties, line: Line) -> None:
        try:
            for text in line.step(self._into):
                if line.stage < _ENDING:
                    duties.take(line, text)
        except Refusal as refusal:
            self._end(duties, line, refusal)
            return
        except Exception as error:  # noqa: BLE001 - what breaks one connection must not end the others
            self._end(duties, line, Refusal(Reason.FAILED, f"{type(error).__name__}: {error}"))
            return
        self._settle(duties, line)

    def _settle(self, duties: Duties, line: Line) -> None:
        """Draw the conclusions of what a line did."""
        if line.end is None and line.stage <= _ENDING:
            self._watch(line)
        elif line.end is None or line.stage >= _ENDING:
            self.close_line(line)
        else:
            self._end(duties, line, line.end)

    def _end(self, duties: Duties, line: Line, refusal: Refusal) -> None:
        self.greeted(line)
        duties.ended(line, refusal)
        self.part(line, refusal)

    def _watch(self, line: Line) -> None:
        interest = _BOTH if line.wants_write else _IN
        if interest != line.interest and line.descriptor in self._lines:
            line.interest = interest
            self._epoll.modify(line.descriptor, interest)
            if interest == _BOTH and line.stage is Stage.OPEN:
                self._blocked[line] = time.monotonic() + _REVIEW_SECONDS
            elif self._blocked.pop(line, None) is not None:
                line.review_window()


def out_of_descriptors(error: OSError) -> str:
    """Say that no socket could be made, and which limit may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{os.strerror(error.errno or 0)}: 'ulimit -n' is {soft} here, and may be raised to {hard}"
