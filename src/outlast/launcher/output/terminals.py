"""Pseudo-terminals for a rank whose output the console shows alone, so that its script sees a terminal.

What the rank writes goes to its log file as it comes, and the console shows the file: a console that was
stopped (Ctrl-S) stops no rank, and logs are the same without a terminal. The thread of the files writes.
While its file system does not answer, the terminal is not read: the rank waits, and the launcher does not.
As under torchrun the rank has a session of its own. The pseudo-terminal is not its controlling one, so Ctrl-C
goes to the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from pathlib import Path

from outlast.files import open_regular
from outlast.launcher.output.file_thread import Errand, FileThread

_CHUNK = 1 << 16
_BITS = {"stdout": 1, "stderr": 2}
_PUMPS = 64  # chunks a turn: a rank that writes without end must not hold the agent


class Terminal:
    """One stream of a rank; ``path`` is what the rank opens.

    Args:
        shown: descriptor of the real terminal, which has the size of the window.
        files: writes the log.

    Raises:
        OSError: there are no pseudo-terminals here.
    """

    def __init__(self, shown: int, files: FileThread) -> None:
        self._shown = shown
        self._files = files
        self._writing: Errand[None] | None = None
        self._size = b""
        self._file = -1
        self.master, self._slave = os.openpty()
        os.set_blocking(self.master, False)
        self.path = Path(os.ttyname(self._slave))
        modes = termios.tcgetattr(self._slave)
        modes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, the log file must not have it
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(self._slave, termios.TCSANOW, modes)
        self.resize()

    def resize(self) -> None:
        """Have the size of the real terminal."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._shown, termios.TIOCGWINSZ, bytes(struct.calcsize("4H")))
            if size != self._size:
                fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)
                self._size = size

    def write_to(self, path: Path) -> None:
        """Pass what comes from now on to another file."""
        self.pump()
        self._files.hand(lambda: self._open(path))

    def _open(self, path: Path) -> None:
        self._close()
        self._file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def pump(self) -> None:
        """Pass on what has come, once what came before was written."""
        if self._writing is not None and not self._files.wait(self._writing):
            return
        chunks = []
        with contextlib.suppress(OSError):  # nothing more
            for _ in range(_PUMPS):
                chunks.append(os.read(self.master, _CHUNK))
        content = b"".join(chunks)
        self._writing = self._files.begin(lambda: self._write(content)) if content else None
        if self._writing is not None:
            self._files.wait(self._writing)

    def _write(self, content: bytes) -> None:
        if self._file >= 0:
            os.write(self._file, content)  # a full disk: the rank goes on

    def close(self) -> None:
        """Pass on the rest and let go of it."""
        self.pump()
        for descriptor in (self.master, self._slave):
            os.close(descriptor)
        self._files.hand(self._close)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class Terminals:
    """The terminals of a launcher; ``fileno()`` is readable when one has something to pass on.

    Args:
        rank: local rank that they belong to.
        stdout, stderr: descriptors of the real terminal; -1: that stream is none, or is not shown.
        files: writes the logs; None: there is no terminal.
    """

    def __init__(
        self, rank: int = 0, stdout: int = -1, stderr: int = -1, files: FileThread | None = None
    ) -> None:
        self._rank = rank
        self._poll = select.epoll()
        self._streams: dict[str, Terminal] = {}
        for name, shown in (("stdout", stdout), ("stderr", stderr)):
            if files is not None and shown >= 0 and os.isatty(shown):
                with contextlib.suppress(OSError):
                    self._streams[name] = Terminal(shown, files)
                    self._poll.register(self._streams[name].master, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._poll.fileno()

    def serve(self, rank: int, stream: str, log: Path | None) -> Path | None:
        """Return what a local rank writes a stream to: a terminal in front of its log, or the log itself."""
        terminal = self._streams.get(stream)
        if terminal is None or rank != self._rank or log is None:
            return log
        terminal.write_to(log)
        return terminal.path

    def bits(self, rank: int) -> int:
        """Return which streams of a local rank are terminals: 1 for stdout, 2 for stderr."""
        return sum(bit for name, bit in _BITS.items() if rank == self._rank and name in self._streams)

    def pump(self) -> None:
        """Pass on what has come, and the size of the window."""
        for terminal in self._streams.values():
            terminal.resize()
            terminal.pump()

    def close(self) -> None:
        """Let go of all."""
        for terminal in self._streams.values():
            terminal.close()
        self._streams.clear()
        self._poll.close()
