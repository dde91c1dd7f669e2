"""Linux namespaces that live as long as this process does, and commands inside of them.

Namespaces have no names under ``/run/netns`` here: each lives as long as the first process in it, which
lives as long as a pipe that this process holds. So nothing stays when this process is killed. A child
that was forked and not executed holds the pipe, too: end it first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
PATIENCE = 30.0  # seconds for what takes milliseconds on an idle machine
LOOK = 0.002


class HostsUnusable(Exception):
    """The hosts could not be started, or one of them does not do what it was told."""


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until a condition holds.

    Raises:
        HostsUnusable: it does not within ``patience`` seconds.
    """
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise HostsUnusable(f"waited {patience:.0f} s for {what}; the hosts cannot be used any more")
        time.sleep(LOOK)


def run(command: Sequence[str], text: str = "") -> None:
    """Run a program with ``text`` as its input; its failure is HostsUnusable."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise HostsUnusable(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


class Keeper:
    """The first process in namespaces of its own; it ends when its pipe is closed.

    Args:
        namespaces: options of unshare(1).
        script: shell commands; they print the process id as it is outside, and end in reading standard input.
        arguments: of the script.
        log: file that errors are appended to.
    """

    def __init__(self, namespaces: Sequence[str], script: str, arguments: Sequence[str], log: Path) -> None:
        self.pid = 0
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                ["unshare", *namespaces, "sh", "-c", script, "sh", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        said = self._process.stdout.readline().strip() if ready else b""
        if not said:
            self.close()
            raise HostsUnusable(f"namespaces were not set up: {log.read_text().strip() or 'no word'}")
        self.pid = int(said)

    def close(self) -> None:
        """End the process, and with it every other in its pid namespace."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise HostsUnusable(f"process {self.pid} did not end; look for it with ps") from None

    def kill(self) -> None:
        """Send SIGKILL to the process, and so to every other in its pid namespace."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def inside(self, command: Sequence[str], namespaces: Sequence[str] = ("--net",)) -> list[str]:
        """Return the command that runs ``command`` in these namespaces."""
        return ["nsenter", f"--target={self.pid}", *namespaces, "--", *command]


class Process:
    """A command that runs on a host.

    Attributes:
        log: file with what it writes.
    """

    def __init__(self, entering: subprocess.Popen[bytes], log: Path) -> None:
        self.log = log
        self._entering = entering

    def poll(self) -> int | None:
        """Return its exit status, 128 and the number for a signal; None while it runs."""
        return self._entering.poll()

    def wait(self, patience: float) -> int:
        """Wait for its end and return its exit status.

        Raises:
            HostsUnusable: it runs on after ``patience`` seconds.
        """
        until(lambda: self.poll() is not None, f"the end of a command, see {self.log}", patience)
        return self._entering.returncode

    def pid(self) -> int:
        """Return its process id as this process sees it; 0 when it has ended."""
        children: list[int] = []

        def found() -> bool:
            children[:] = [pid for pid in every_pid() if _parent(pid) == self._entering.pid]
            return bool(children) or self.poll() is not None

        until(found, "a command to be started")
        return children[0] if children else 0

    def send(self, number: int) -> None:
        """Send it a signal."""
        pid = self.pid()
        if pid:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)


def every_pid() -> list[int]:
    """Return the process ids of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def pid_namespace(pid: int) -> str:
    """Return which pid namespace a process is in; "" when there is no such process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0
