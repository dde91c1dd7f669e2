"""The console: what the launcher says and shows, written by a thread of its own.

A terminal that was stopped with Ctrl-S, or a pipe that nobody reads, blocks every writer. The agent's
loop must not block, or it would see no fault. So a daemon thread writes, and what waits for it is bounded.
The thread takes no signal. A fork beside it is safe, because the child never touches this object.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from outlast.recovery.policy.events import Fault

PATIENCE = 2.0  # seconds without a byte taken, after which the end of a job no longer waits for a console
LOG_ROOM = 1 << 18  # bytes; the rest of a log waits in its file
MESSAGE_ROOM = 1 << 16  # bytes of the launcher's own words, whatever waits of the logs
_PIECE = select.PIPE_BUF  # bytes a write: a pipe takes them whole, and progress is seen early
_RETRY = 1.0  # seconds between looks at a console that was set to non-blocking
_IDLE = 60.0  # seconds between looks at nothing
_ERASE = b"\r\x1b[K"  # the line on which the cursor is
_ERASE_REST = b"\x1b[K"  # of that line


def descriptor_of(stream: TextIO | None) -> int:
    """Return a standard stream's descriptor; -1 when it was closed before this process began."""
    return -1 if stream is None else stream.fileno()


def _file_of(descriptor: int) -> tuple[int, int]:
    """Return what two descriptors have in common if they write to one terminal, pipe or file."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return (-1, descriptor)
    return (found.st_dev, found.st_ino)


class Screen:
    """Writes what it is given in the order in which it came; a closed console swallows it.

    The thread starts with the first text, so the cleaner is forked from a process without threads.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._changed = threading.Condition()
        self._texts: deque[tuple[int, bytes, int]] = deque()
        self._waiting = 0
        self._said = 0
        self._closed = {-1}
        self._given_up = False
        self._writer: threading.Thread | None = None
        self._status = (-1, b"")  # that is wanted
        self._drawn = b""  # that is on the terminal, below everything else
        self._unfinished: set[tuple[int, int]] = set()  # files of which the last line has no end yet
        self._at_start = True  # the cursor is at the start of a line, as far as what was written here says

    @property
    def waiting(self) -> int:
        """The bytes that have been given and not been written."""
        return self._waiting

    @property
    def room(self) -> int:
        """The bytes of the logs that may be shown now."""
        return LOG_ROOM - self._waiting

    @property
    def has_room(self) -> bool:
        """Say whether more of the logs may be shown now."""
        return self._waiting < LOG_ROOM

    def is_closed(self, descriptor: int) -> bool:
        """Say whether nobody will ever see what is written there."""
        return self._given_up or descriptor in self._closed

    def show(self, descriptor: int, text: bytes) -> None:
        """Have a part of a log written; whether there is room is for the caller to ask."""
        if text and not self.is_closed(descriptor):
            self._hand_over(descriptor, text, 0)

    def say(self, descriptor: int, text: bytes) -> None:
        """Have a message written; it is dropped and counted where too many wait already."""
        if self._given_up or self._said >= MESSAGE_ROOM:
            self.dropped += 1
        elif not self.is_closed(descriptor):
            self._hand_over(descriptor, text, len(text))

    def status(self, descriptor: int, line: bytes) -> None:
        """Keep a line below all others of a terminal; empty: remove it.

        It is drawn where the cursor is at the start of a line, and erased before anything else is written, so
        that the cursor is where the writers of logs expect it.

        Args:
            descriptor: the terminal.
            line: without a line break and shorter than the terminal is wide.
        """
        with self._changed:
            before, self._status = self._status[1], (descriptor, line)
            self._changed.notify_all()
        if line:
            self._begin_to_write()
        elif before:
            self._hand_over(descriptor, _ERASE_REST, 0)  # waited for like other texts

    def drop_status(self) -> None:
        """Forget the status and leave what is on the terminal: another program writes there now."""
        with self._changed:
            self._status = (-1, b"")
            self._drawn = b""

    def _hand_over(self, descriptor: int, text: bytes, said: int) -> None:
        with self._changed:
            self._texts.append((descriptor, text, said))
            self._waiting += len(text)
            self._said += said
            self._changed.notify_all()
        self._begin_to_write()

    def _begin_to_write(self) -> None:
        if self._writer is None and (self._texts or self._status[1]):
            writer = threading.Thread(target=self._write_all, name="screen", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system allows no thread now; it is tried again
                writer.start()
                self._writer = writer

    def wait(self, patience: float) -> bool:
        """Wait until some of what waits has been written; False when nothing was for ``patience`` seconds."""
        self._begin_to_write()
        with self._changed:
            before = self._waiting
            return before == 0 or self._changed.wait_for(lambda: self._waiting < before, patience)

    def give_up(self) -> int:
        """Show nothing any more; return the number of bytes that are lost to the console."""
        with self._changed:
            lost, self._waiting = self._waiting, 0
            self._texts.clear()
            self._given_up = True
        return lost

    def _write_all(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._texts or self._stale, _IDLE):
                    continue
                descriptor, text, said = self._texts.popleft() if self._texts else (-1, b"", 0)
                status = self._status
            if not text:
                self._draw(*status)
                continue
            if descriptor not in self._closed:
                self._begin_text(descriptor, text, said > 0)
            left = memoryview(text)
            while left:
                written = self._write(descriptor, left[:_PIECE])
                with self._changed:
                    self._waiting = max(0, self._waiting - written)
                    self._said -= said if written == len(left) else 0
                    self._changed.notify_all()
                left = left[written:]

    def _begin_text(self, descriptor: int, text: bytes, is_message: bool) -> None:
        """Make way for a text: erase the status, and end the line of a log before a message."""
        is_terminal = os.isatty(descriptor)
        if is_terminal:
            self._draw(descriptor, b"")
        if text == _ERASE_REST:
            return
        file = _file_of(descriptor)
        if is_message and file in self._unfinished:
            self._put(descriptor, b"\n")
        (self._unfinished.discard if text.endswith(b"\n") else self._unfinished.add)(file)
        self._at_start = text.endswith(b"\n") if is_terminal else self._at_start

    @property
    def _stale(self) -> bool:
        """Whether the terminal shows another status than it should and could."""
        descriptor, wanted = self._status
        return wanted != self._drawn and self._at_start and not self.is_closed(descriptor)

    def _draw(self, descriptor: int, line: bytes) -> None:
        """Replace the status on the terminal."""
        if self._status[0] < 0:  # dropped while this thread drew it
            self._drawn = b""
        if line == self._drawn:
            return
        self._put(descriptor, _ERASE + line)
        self._drawn = line

    def _put(self, descriptor: int, text: bytes) -> None:
        """Write a text that nobody waits for."""
        left = memoryview(text)
        while left and not self.is_closed(descriptor):
            left = left[self._write(descriptor, left) :]

    def _write(self, descriptor: int, piece: memoryview) -> int:
        """Write some of a piece; return how much of it is settled."""
        if self.is_closed(descriptor):
            return len(piece)
        try:
            return os.write(descriptor, piece)
        except BlockingIOError:
            poller = select.poll()
            poller.register(descriptor, select.POLLOUT)
            poller.poll(_RETRY * 1000)
            return 0
        except OSError:
            self._closed.add(descriptor)
            return len(piece)


PREFIX = "[outlast]"


class Console:
    """Makes lines for people.

    Args:
        screen: writes them.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Show one message, each of its lines with the prefix and the seconds since the start."""
        since = f"{time.monotonic() - self._began:8.2f}s"
        lines = "".join(f"{PREFIX} {since}  {line}\n" for line in text.splitlines())
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._screen.say(descriptor_of(sys.stderr), lines.encode(encoding, "backslashreplace"))

    def line(self, text: str) -> None:
        """Show one line as it is, without the prefix: it is for programs."""
        self._screen.say(descriptor_of(sys.stderr), f"{text}\n".encode(errors="backslashreplace"))

    def fault(self, fault: Fault, log: Path | None, error: str, follows: str) -> None:
        """Show the first failed rank, its exception, its log and what follows."""
        lines = [f"FAULT {fault.kind.value}: {fault.reason}"]
        if error:
            lines += [f"  | {line}" for line in error.rstrip().splitlines()[-12:]]
        lines += [f"  {name}: {value}" for name, value in fault.evidence]
        if log is not None and str(log) != os.devnull:
            lines.append(f"  log: {log}")
        lines.append(f"  -> {follows}")
        self.say("\n".join(lines))
