"""Starting the saver: a process of its own, tied to its owner by a pipe that closes when the owner ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from outlast.transport.credentials import NOBODY, Credentials
from outlast.transport.ownership import own

_PROGRAM = (  # without the folder of the owner's script, whose modules must not shadow any of ours
    "import sys; sys.path[:1] = []; from outlast.saver.__main__ import main; sys.exit(main(*sys.argv[1:]))"
)
_TRIES = 5  # starts of a saver that ended within _SHORT seconds, in a row
_SHORT = 10.0
_KILL_PATIENCE = 5.0


class SaverProcess:
    """The owner's hold on the saver of a memory folder; one that ended is started again.

    Args:
        root: the memory folder.
        control: the socket that takes its records; "" for the event log itself.
        events: the event log.
        credentials: what this node proves to others; it reaches the saver through a pipe.
        permit: file that says whether this node may commit; "" where it is the only one.
    """

    def __init__(
        self,
        root: Path,
        control: str,
        events: Path,
        credentials: Credentials = NOBODY,
        permit: str = "",
    ) -> None:
        self._credentials = credentials
        self._arguments = (str(root), control, str(events), permit)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = self._owned = -1
        self._started = 0.0
        self._short = 0

    @property
    def pid(self) -> int:
        """Its process, 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    def ensure(self) -> str:
        """See to it that a saver runs; return why the one before ended, "" when it runs or never did.

        Raises:
            OSError: no process can be started.
        """
        process = self._process
        if process is not None and process.poll() is None:
            return ""
        why = ""
        if process is not None:
            self._short = self._short + 1 if time.monotonic() - self._started < _SHORT else 0
            if self._short >= _TRIES:
                return ""
            why = "the saver ended; another one goes on with what is staged"
            self.hang_up()
        self._start()
        return why

    def _start(self) -> None:
        root, *rest = self._arguments
        self._owned, byte = own(Path(root))
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_inheritable(reader, True)
        self._started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, root, str(reader), str(byte), *rest],
                stdin=subprocess.PIPE,
                pass_fds=[reader],
                start_new_session=True,
            )
        except OSError:
            self.hang_up()
            raise
        finally:
            os.close(reader)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # one that has died is replaced
            pipe.write(self._credentials.to_json().encode())

    def hang_up(self) -> None:
        """Say that the job is over: it brings the newest staged state to disk, cleans up and ends."""
        for descriptor in (self._owned, self._pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self._owned = self._pipe = -1

    def ended(self) -> bool:
        """Say whether it has."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_PATIENCE)
