"""A rank that begins again as a cold interpreter, because what was preloaded is not what its script needs.

The process stays: its pid, its streams, its place with the agent. Its program is replaced (execve), with the
environment, the folder, the signals and the umask that the script began with, so that nothing of the first
attempt is left but what it wrote and sent. The agent is told which variables the script set, so that the next
zygote imports under them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from outlast import settings
from outlast.core import codec
from outlast.core.events import StartedAgain
from outlast.transport.control import Reporter
from outlast.transport.processes import children_of
from outlast.worker import liveness
from outlast.worker.preloading import Difference, Hidden, Preloading

_PROGRAM = Path(__file__).with_name("cold.py")


@dataclass(frozen=True)
class Beginning:
    """How this rank's script was begun.

    Args:
        kind, target: the program.
        args: its arguments.
        environment: of the script at its first statement.
        stdout, stderr, stacks, pulse: of the rank's seat.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    stdout: str | None
    stderr: str | None
    stacks: str
    pulse: str


class Rank:
    """This process, as it was when its script began.

    Args:
        beginning: what to do again.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._pid = os.getpid()
        self._folder = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = _ignored()

    def differs(self, found: Difference) -> None:
        """Begin again if nothing has happened yet that other ranks know of; else say what has no effect."""
        why = self._obstacle()
        if why:
            sys.stderr.write(
                f"[outlast] {found}: this has no effect, because it was imported before the script began and"
                f" {why}; set it at the beginning of the script, or start with --no-zygote\n"
            )
            return
        self._tell(found)
        self._begin_again()

    def _obstacle(self) -> str:
        if os.getpid() != self._pid:
            return "this is a child process"
        torch = sys.modules.get("torch")
        if torch is None:
            return ""
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return "the rank has a process group already"
        if torch.cuda.is_initialized():
            return "the rank uses CUDA already"
        return "the rank has made steps already" if liveness.attach(None).beats else ""

    def _tell(self, found: Difference) -> None:
        """Tell the agent; the values go into a file that only this user can read, not into the event log."""
        context = settings.worker_context()
        if not context.control_path:
            return
        name = f"environment-{context.generation}-{context.rank}.json"
        with contextlib.suppress(OSError):  # the next generation will say it again
            path = Path(context.control_path).with_name(name)
            path.write_text(json.dumps(dict(found.variables)))
        Reporter(context.control_path).send(
            codec.encode(
                StartedAgain(
                    time.time(),
                    time.monotonic(),
                    context.generation,
                    context.rank,
                    tuple(sorted(found.variables)),
                    str(found),
                )
            )
        )

    def _begin_again(self) -> NoReturn:
        beginning = self._beginning
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for pid in list(children_of(self._pid)):  # they would be started a second time
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.chdir(self._folder)
        os.umask(self._umask)
        for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(which, 0)
        if signal.getsignal(signal.SIGINT) is not None:  # only the main thread can change handlers
            with contextlib.suppress(ValueError):
                for number in _ignored() - self._ignored:
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        told = {
            "kind": beginning.kind,
            "stdout": beginning.stdout,
            "stderr": beginning.stderr,
            "stacks": beginning.stacks,
            "pulse": beginning.pulse,
        }
        command = [sys.executable, "-u", str(_PROGRAM), json.dumps(told), beginning.target, *beginning.args]
        os.execve(sys.executable, command, dict(beginning.environment))


def _ignored() -> set[signal.Signals]:
    return {one for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN}


def hide(preloaded: Preloading, expected: Mapping[str, str], beginning: Beginning) -> None:
    """Hide what was preloaded until the script imports it."""
    import atexit

    hidden = Hidden(preloaded, expected, Rank(beginning).differs)
    atexit.register(hidden.give_up)  # what runs at the end may import what it likes
    hidden.hide()
