"""Scripts that start in milliseconds: forks of a process that has imported torch, one for each test process.

A rank or a script that imports torch on its own costs two seconds of a processor, which is most of what many
tests take. What is about the start itself (an import, a signal before torch is there) starts cold.

``python -m outlast`` starts here, too. Its first zygote is a fork with torch as well, a child of the launcher
as any other: in its process, ``subprocess.Popen`` has that fork go on as the zygote.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
from typing import IO, Any, NoReturn

MESSAGE_BYTES = 1 << 18
IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.profiler", "outlast.cli")
AGENT = ("outlast.launcher.agent", "outlast.launcher.command.launch")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


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

    def terminate(self) -> None:
        """Send SIGTERM unless it has ended."""
        self.send_signal(signal.SIGTERM)


def start(
    command: Sequence[str | Path],
    stdout: IO[Any],
    stderr: IO[Any],
    environment: Mapping[str, str] | None = None,
) -> Warm:
    """Run a script with its arguments, or ("-m", "outlast", ...), in a session of its own.

    ``environment`` is on top of this one. The script is killed when this process ends.
    """
    return _forker().start(command, stdout, stderr, environment or {})


def run(
    command: Sequence[str | Path], timeout: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, which has to come in ``timeout`` seconds; return what it printed."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(command, stdout, stderr, environment)
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
        self.pid = self._process.pid
        self._socket = ours
        self._ended: dict[int, int] = {}
        atexit.register(self._close)

    def start(
        self,
        command: Sequence[str | Path],
        stdout: IO[Any],
        stderr: IO[Any],
        environment: Mapping[str, str],
    ) -> Warm:
        order = {
            "argv": list(map(str, command)),
            "environment": {**os.environ, **environment},
            "folder": os.getcwd(),
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


def forker_pid() -> int:
    """Return the process that forks, 0 when there is none yet."""
    return _forker().pid if _forker.cache_info().currsize else 0


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

    before = frozenset(sys.modules)
    sys.path[0:1] = []
    channel = socket.socket(fileno=int(sys.argv[1]))
    from outlast.worker import zygote

    zygote._BEFORE = before
    loaded, obstacle, _ = zygote.load(list(IMPORTS), "", [])
    for name in AGENT:
        importlib.import_module(name)
    assert not obstacle
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    forker = os.getpid()
    order = _serve(channel)
    _die_with(forker)
    os.setsid()
    os.chdir(order["folder"])
    if order["argv"][:2] == ["-m", "outlast"]:
        _launch(order, zygote, loaded)
    _environment(order["environment"])
    random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.argv[:] = order["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    if "PYTHONPATH" in order["environment"]:
        sys.path[1:1] = order["environment"]["PYTHONPATH"].split(os.pathsep)
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = sys.argv[0]
    sys.modules["__main__"] = main
    exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec", dont_inherit=True), main.__dict__)


def _environment(found: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(found)
    tempfile.tempdir = None  # found anew, under these variables


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _launch(order: Mapping[str, Any], zygote: Any, loaded: Any) -> NoReturn:
    """Go on as a launcher, with a child that waits to become its first zygote."""
    import threading

    launcher = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        _become_zygote(theirs, launcher, zygote, loaded)
    theirs.close()
    unused = [child]
    popen = subprocess.Popen

    def begin(command: Sequence[str], **options: Any) -> Any:
        words = list(map(str, command))
        is_first = unused and len(words) > 3 and words[2].endswith("worker/zygote.py")
        told = json.loads(words[3]) if is_first else {}
        if not is_first or told["plan"] or told["preload"]:
            return popen(command, **options)
        message = {"argv": words[2:], "environment": options["env"], "channel": told["channel"]}
        socket.send_fds(ours, [json.dumps(message).encode()], [told["channel"]])
        ours.close()
        return types.SimpleNamespace(pid=unused.pop(), returncode=None)

    subprocess.Popen = begin  # type: ignore[misc, assignment]
    _environment(order["environment"])
    sys.argv[:] = order["argv"][1:]
    from outlast import cli

    code = cli.main(order["argv"][2:])
    for thread in threading.enumerate()[1:]:
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # to take torch apart costs a third of a second


def _become_zygote(orders: socket.socket, launcher: int, zygote: Any, loaded: Any) -> NoReturn:
    """Wait for the order, and go on as ``zygote.py``, whose imports have been made."""
    _die_with(launcher)
    message, given, *_ = socket.recv_fds(orders, MESSAGE_BYTES, 1)
    if not message:
        os._exit(0)
    order = json.loads(message)
    if given[0] != order["channel"]:
        os.dup2(given[0], order["channel"])
        os.close(given[0])
    orders.close()
    os.setsid()
    _environment(order["environment"])
    loaded.environment = dict(order["environment"])
    zygote.load = lambda *_: (loaded, "", False)
    sys.argv[:] = order["argv"]
    zygote.main()
    sys.exit()


if __name__ == "__main__":
    _KEPT = sys.modules["__main__"]  # what runs here is needed to the end
    _main()
