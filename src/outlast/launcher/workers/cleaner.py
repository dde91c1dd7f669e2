"""The guard: a small process that cleans up after the agent has died.

The kernel kills workers whose agent dies (PDEATHSIG), but not what they started, and removes no file. The
guard holds one end of a pipe. When the other end closes, it kills the process groups that it was told of and
removes the runtime folder.
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


class Guard:
    """The agent's handle on its guard; a guard that was killed is replaced at the next word to it.

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
            raise NodeUnfit(f"{cannot_start('the guard', error)}; nothing was started") from error

    def _start(self) -> None:
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._pipe)
                _stand_guard(reader, self._runtime, set(self._groups))
        finally:
            os.close(reader)

    def watch(self, group: int) -> None:
        """Have the process group killed when the agent dies."""
        self._groups.add(group)
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Say that the group has ended."""
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
        """Let the guard do its cleaning now and end."""
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _stand_guard(pipe: int, runtime: Path, groups: set[int]) -> NoReturn:
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
