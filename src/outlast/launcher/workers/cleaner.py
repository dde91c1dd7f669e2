"""The cleaner: a small process that kills a job's processes and removes files after the agent has died.

The kernel kills workers whose agent dies (PDEATHSIG), but not what they started, and removes no file. The
cleaner holds one end of a pipe. When the other end closes, it kills the sessions that the agent named and
every process that inherited this launcher's mark in its environment, and removes the runtime folder. What a
rank has started with an environment of its own, in a session of its own, is not found.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from outlast import files
from outlast.errors import NodeUnfit
from outlast.ipc.processes import Child, cannot_start, family_of, is_tracker, kill_if, start_ticks, state_of

_PATIENCE = 10.0  # seconds for processes to end
_TRACKER_PATIENCE = 2.0  # seconds in which trackers remove shared memory, once nobody else is left
_LOOK_EVERY = 0.02
_ENVIRONMENT_BYTES = 4 << 20


class Cleaner:
    """The agent's side of the cleaner.

    Args:
        runtime: folder that is removed.
        mark: what the environment of all workers has in it, and of nobody else.

    Raises:
        NodeUnfit: the system allows no more processes.
    """

    def __init__(self, runtime: Path, mark: str) -> None:
        self._runtime = runtime
        self._mark = mark
        self._sessions: dict[int, int] = {}
        self._process: Child | None = None
        self._pipe = -1
        try:
            self._start()
        except OSError as error:
            runtime.rmdir()
            raise NodeUnfit(f"{cannot_start('the cleaner', error)}; nothing was started") from error

    @property
    def pid(self) -> int:
        """Its process, 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    def _start(self) -> None:
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        try:
            pid = os.fork()
            if pid == 0:
                os.close(self._pipe)
                _clean_up_after(reader, self._runtime, self._mark, dict(self._sessions))
        except OSError:
            os.close(self._pipe)
            self._pipe = -1
            raise
        finally:
            os.close(reader)
        self._process = Child(pid)

    def tend(self) -> None:
        """Replace a cleaner that has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._process.close()
            self._process = None
            os.close(self._pipe)
            self._pipe = -1
        if self._process is None:
            with contextlib.suppress(OSError):  # no process can be started now; the next call tries again
                self._start()

    def watch(self, session: int) -> None:
        """Add a child whose session is killed when the agent dies."""
        self._sessions[session] = start_ticks(session)
        self._tell(f"+{session} {self._sessions[session]}\n")

    def forget(self, session: int) -> None:
        """Remove one that has ended."""
        if self._sessions.pop(session, None) is not None:
            self._tell(f"-{session} 0\n")

    def _tell(self, text: str) -> None:
        try:
            if self._pipe >= 0:
                os.write(self._pipe, text.encode())
        except BrokenPipeError:
            pass  # :meth:`tend` starts another one, which knows it
        except BlockingIOError:  # it was stopped long ago
            if self._process is not None:
                self._process.send(signal.SIGKILL)

    def dismiss(self) -> None:
        """Remove the runtime folder, and end the cleaner."""
        shutil.rmtree(self._runtime, ignore_errors=True)
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            self._process.wait(_PATIENCE)
            os.close(self._pipe)


def _clean_up_after(pipe: int, runtime: Path, mark: str, sessions: dict[int, int]) -> NoReturn:
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
            session, began = map(int, line[1:].split())
            if line[:1] == b"+":
                sessions[session] = began
            else:
                sessions.pop(session, None)
    try:
        Leftovers(mark, sessions).kill()
    finally:  # whatever happens, the folder is removed
        shutil.rmtree(runtime, ignore_errors=True)
        os._exit(0)


class Leftovers:
    """The processes of a job whose agent has died.

    Args:
        mark: see :class:`Cleaner`.
        sessions: pids of session leaders, each with the time at which it was started.
    """

    def __init__(self, mark: str, sessions: Mapping[int, int]) -> None:
        self._mark = mark.encode()
        self._sessions = sessions
        self._groups = _control_groups(os.getpid())

    def kill(self) -> None:
        """Signal what is left until nothing is."""
        deadline = time.monotonic() + _PATIENCE
        trackers_until = time.monotonic() + _TRACKER_PATIENCE
        while (found := self._found()) and (now := time.monotonic()) < deadline:
            others = [pid for pid in found if not is_tracker(pid)]
            if others:
                trackers_until = now + _TRACKER_PATIENCE
            for pid in others if now < trackers_until else found:
                kill_if(pid, self._is_left)
            files.readable((), _LOOK_EVERY)

    def _found(self) -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_left(pid)]

    def _is_left(self, pid: int) -> bool:
        if pid == os.getpid() or state_of(pid) in ("", "Z", "X"):
            return False
        _, group, session = family_of(pid)
        return self._is_ours(session) or self._is_ours(group) or self._is_marked(pid)

    def _is_ours(self, leader: int) -> bool:
        """Return whether a session or group is one that the agent named, and not one with its number."""
        return leader in self._sessions and start_ticks(leader) in (0, self._sessions[leader])

    def _is_marked(self, pid: int) -> bool:
        """Return whether a process has inherited the mark, and was not started in another place.

        A job that a rank has handed to a scheduler may have inherited it, too.
        """
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                marked = self._mark in file.read(_ENVIRONMENT_BYTES).split(b"\0")
        except OSError:
            return False
        if not marked:
            return False
        groups = _control_groups(pid)
        return all(groups.get(one, path).startswith(path) for one, path in self._groups.items())


def _control_groups(pid: int) -> dict[str, str]:
    """Return a process's control group in each hierarchy."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return {}
    return {f"{number}:{controllers}": path for number, controllers, path in lines}
