"""Scripts that start in milliseconds: forks of a process that has imported torch, one for each test process.

A rank or a script that imports torch on its own costs two seconds of a processor, which is most of what many
tests take. What is about the start itself (an import, a signal before torch is there) starts cold.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MESSAGE_BYTES = 1 << 18
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.profiler",
    "outlast.worker.session",
)


class Warm:
    """A process as :class:`subprocess.Popen` gives it: waited for, signalled, and a zombie until then."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status if there is one."""
        if self.returncode is None:
            self.returncode = _forker().status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise TimeoutExpired when there is none in time, in seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[str | Path],
    stdout: IO[Any],
    stderr: IO[Any],
    environment: Mapping[str, str] | None = None,
    new_session: bool = False,
) -> Warm:
    """Run a script with its arguments; ``environment`` is on top of this process's."""
    return _forker().start(command, stdout, stderr, environment or {}, new_session)


def run(
    command: Sequence[str | Path], timeout: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, which has to come in ``timeout`` seconds; return what it printed."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(command, stdout, stderr, environment, new_session=True)
        try:
            process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            stdout.seek(0)
            stderr.seek(0)
        code = process.returncode or 0
        return subprocess.CompletedProcess(list(map(str, command)), code, stdout.read(), stderr.read())


class _Forker:
    """This side of the process that forks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._ended: dict[int, int] = {}
        atexit.register(self._close)

    def start(
        self,
        command: Sequence[str | Path],
        stdout: IO[Any],
        stderr: IO[Any],
        environment: Mapping[str, str],
        new_session: bool,
    ) -> Warm:
        order = {
            "argv": list(map(str, command)),
            "environment": {**os.environ, **environment},
            "folder": os.getcwd(),
            "new_session": new_session,
        }
        socket.send_fds(self._socket, [json.dumps(order).encode()], [stdout.fileno(), stderr.fileno()])
        while True:
            answer = self._answer()
            if "started" in answer:
                return Warm(answer["started"])

    def status(self, pid: int) -> int | None:
        """Return how a process ended, after which nothing is left of it."""
        while select.select([self._socket], [], [], 0)[0]:
            self._answer()
        if pid not in self._ended:
            return None
        self._socket.send(json.dumps({"bury": pid}).encode())
        return self._ended.pop(pid)

    def _answer(self) -> dict[str, int]:
        message = self._socket.recv(MESSAGE_BYTES)
        assert message, "the process that forks scripts has ended"
        answer: dict[str, int] = json.loads(message)
        if "ended" in answer:
            self._ended[answer["ended"]] = answer["status"]
        return answer

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _forker() -> _Forker:
    return _Forker()


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork what is ordered until nobody is there to order; return the order, in the fork only."""
    living: set[int] = set()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != channel.fileno():
                _tell_end(channel, descriptor)
                poll.unregister(descriptor)
                living.remove(descriptor)
                os.close(descriptor)
                continue
            message, given, *_ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
            if not message:
                os._exit(0)
            order: dict[str, Any] = json.loads(message)
            if "bury" in order:
                os.waitpid(order["bury"], 0)
                continue
            pid = os.fork()
            if pid == 0:
                channel.close()
                for number, stream in enumerate(given, 1):
                    os.dup2(stream, number)
                for one in {*given, *living}:
                    os.close(one)
                return order
            end = os.pidfd_open(pid)
            living.add(end)
            poll.register(end, select.POLLIN)
            channel.send(json.dumps({"started": pid}).encode())
            for one in given:
                os.close(one)


def _tell_end(channel: socket.socket, descriptor: int) -> None:
    found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
    assert found is not None
    status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    channel.send(json.dumps({"ended": found.si_pid, "status": status}).encode())


def _main() -> None:
    """Serve; in a fork, go on as the script, as if the interpreter had just started it."""
    import gc
    import importlib
    import random
    import threading

    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTS:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    order = _serve(channel)
    if order["new_session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.argv[:] = order["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if "PYTHONPATH" in order["environment"]:
        sys.path[1:1] = order["environment"]["PYTHONPATH"].split(os.pathsep)
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = sys.argv[0]
    sys.modules["__main__"] = main
    exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    _KEPT = sys.modules["__main__"]  # what runs here is needed to the end
    _main()
