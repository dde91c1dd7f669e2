"""The cleaner: a small process that kills the workers and removes files after the agent has died.

The kernel kills workers whose agent dies (PDEATHSIG), but not what they started, and removes no file. The
cleaner holds one end of a pipe. When the other end closes, it kills the process groups that the agent named
and removes the runtime folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import NoReturn

from outlast.errors import NodeUnfit
from outlast.ipc.processes import cannot_start, kill_group


class Cleaner:
    """The agent's side of the cleaner; a cleaner that was killed is replaced at the next message to it.

    Raises:
        NodeUnfit: the system allows no more processes.
    """

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._groups: set[int] = set()
        try:
            self._start()
        except OSError as error:
            runtime.rmdir()
            raise NodeUnfit(f"{cannot_start('the cleaner', error)}; nothing was started") from error

    def _start(self) -> None:
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._pipe)
                _clean_up_after(reader, self._runtime, set(self._groups))
        finally:
            os.close(reader)

    def watch(self, group: int) -> None:
        """Add a process group that is killed when the agent dies."""
        self._groups.add(group)
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Remove a process group that has ended."""
        self._groups.discard(group)
        self._say(f"-{group}\n")

    def _say(self, text: str) -> None:
        try:
            os.write(self._pipe, text.encode())
        except BrokenPipeError:
            os.close(self._pipe)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            with contextlib.suppress(OSError):  # no process can be started now; the next word tries again
                self._start()

    def dismiss(self) -> None:
        """End the cleaner; it kills the groups and removes the folder first."""
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _clean_up_after(pipe: int, runtime: Path, groups: set[int]) -> NoReturn:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    highest = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, pipe)
    os.closerange(pipe + 1, min(highest, 65536))
    pending = b""
    while chunk := os.read(pipe, 65536):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group, signal.SIGKILL)
    shutil.rmtree(runtime, ignore_errors=True)
    os._exit(0)
