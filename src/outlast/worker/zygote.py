"""The zygote: a process that has imported torch and forks workers, which then start in milliseconds.

The agent starts this file as a script, with the workers' own environment, and communicates over
an inherited socket. Each request is one JSON message, each reply one JSON message::

    {"order": "store", "host": address, "port": n, "avoid": n}
            a host for torch's TCPStore    -> {"store": pid, "port": n, "busy": why}
                                           -> {"storeless": why}            there can be none
    {"order": "spawn", "ranks": [...]}     -> {"workers": [pid, ...]}       one entry a rank
                                           -> {"refused": why}              this process cannot fork safely
    {"order": "import"}                    -> {"ready": pid, ...}           torch has been imported

Where the script does not use torch, the first ranks are forked before torch is imported. A store is then
promised: the answer names its port, where this process listens, and no process (0). When torch has been
imported, the same order with that port has a host serve it, for a script that uses torch all the same.

Workers are forked by a short-lived intermediate process, so that the kernel makes the agent (a child
subreaper) their parent. The agent waits for them, they die with it, and they survive the zygote. Until it
forks, the zygote has one thread and no CUDA context.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0:1] = []  # do not import from the folder of this file
    _BEFORE = frozenset(sys.modules)  # modules of every interpreter at the start of a script

import contextlib
import gc
import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast import _torch_compat
from outlast.hang.worker import heartbeat
from outlast.ipc.processes import die_with_parent
from outlast.worker import bootstrap, learning, new_interpreter
from outlast.worker.ahead import FIRST_START, SURVIVE_FORKS, Ahead, Plan, behind_the_ranks, name_of
from outlast.worker.preloading import Hidden, Preloading
from outlast.worker.standbys import Standbys
from outlast.worker.store_host import listener_at, refuse
from outlast.worker.store_host import serve as serve_store

MESSAGE_BYTES = 1 << 20
IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # DistributedDataParallel and compile import it, for a second, when first used
    "outlast.worker.bootstrap",
    "outlast.worker.new_interpreter",
    "outlast.worker.learning",
    "outlast.worker.session",
)


@dataclass(frozen=True)
class Seat:
    """What one rank gets at its fork.

    Args:
        variables: environment variables of this rank, in addition to the common ones.
        common: common variables whose value differs from the zygote's; None: to be removed.
        args: the script's arguments for this rank.
        stdout, stderr: files that the streams are appended to; None: inherited.
        stacks: file that receives the stacks when STACK_SIGNAL arrives.
        heartbeat: path of the heartbeat page.
    """

    variables: dict[str, str]
    args: list[str]
    stdout: str | None
    stderr: str | None
    stacks: str
    heartbeat: str
    common: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """The program of every rank.

    Args:
        kind: "file" or "module".
        target: the path or the module's name.
        args: the script's own arguments.
    """

    kind: str
    target: str
    args: tuple[str, ...]


def _obstacle(module: str, threads: set[str]) -> str:
    """Return why this process must not fork after an import; "": it may.

    Args:
        module: the imported module.
        threads: the kernel's ids of the threads before the import.
    """
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        return f"importing {module} started threads ({names})"
    names = ", ".join(sorted({name_of(one) for one in _threads() - threads} - SURVIVE_FORKS.keys()))
    if names:
        return f"importing {module} started native threads ({names})"
    if module not in IMPORTS and _torch_compat.forks_lack_cuda():
        return f"importing {module} used CUDA, which a fork cannot use then"
    return ""


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


class Promised:
    """Ports of stores that are to be served when torch has been imported."""

    def __init__(self) -> None:
        self._listeners: dict[int, tuple[socket.socket, str]] = {}

    def add(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Listen for a store; return the answer."""
        try:
            listener, busy = listener_at(order["host"], order["port"], order["avoid"])
        except OSError as error:
            return {"storeless": f"{type(error).__name__}: {error}"}
        port = listener.getsockname()[1]
        self._listeners[port] = listener, busy
        return {"store": 0, "port": port, "busy": busy}

    def take(self, order: Mapping[str, Any]) -> tuple[socket.socket, str]:
        """Return the listener of a store, and why its port was not available."""
        found = self._listeners.pop(order["port"], None)
        return found or listener_at(order["host"], order["port"], order["avoid"])

    def close(self) -> None:
        """Close what is not served by this process."""
        for listener, _ in self._listeners.values():
            listener.close()
        self._listeners.clear()


def load(modules: list[str], plan: str, needless: list[str]) -> tuple[Preloading, str, bool]:
    """Import torch, the named modules and those of a plan.

    Args:
        modules: names.
        plan: file with what the ranks import; "": it is not known.
        needless: modules of IMPORTS that are left to the ranks.

    Returns:
        what was imported; why this process must not fork, or ""; whether modules of the plan had to be left
        out, so that it must not fork either.
    """
    loaded, obstacle = Preloading(_BEFORE), ""
    gc.disable()  # an import makes much and drops little: an eighth of the time of torch's is collection
    for name in (one for one in IMPORTS if one not in needless):
        loaded.load(name)
        obstacle = obstacle or _obstacle(name, _threads())  # numpy's BLAS restarts its own after a fork
    gc.enable()
    _torch_compat.let_gloo_finish_when_destroyed()
    for name in modules:
        threads = _threads()
        loaded.load(name)
        obstacle = obstacle or _obstacle(name, threads)
    left_out = bool(plan and not obstacle and Ahead(Plan.read(plan), loaded).run())
    loaded.finish()
    return loaded, obstacle, left_out


class Server:
    """Serves the agent's requests.

    Args:
        channel: to the agent.
        agent: its pid.
        ranks: standbys that are forked ahead.
    """

    def __init__(self, channel: socket.socket, agent: int, ranks: int) -> None:
        self._channel, self._agent = channel, agent
        self._promised, self._standbys = Promised(), Standbys(ranks, agent, MESSAGE_BYTES)

    def serve(self, hidden: Hidden | None, rehearse: Callable[[], None] = lambda: None) -> Seat | None:
        """Serve requests until the agent closes the socket; return a seat in a new worker, None to import.

        Args:
            hidden: what has been imported; None: nothing yet.
            rehearse: called in each standby.
        """

        def prepare() -> None:
            self._let_go()
            rehearse()

        while True:
            if hidden is not None and self._standbys.due(self._channel):
                entry = self._standbys.fork(prepare)
                if entry is not None:
                    return Seat(**entry)
            message = self._channel.recv(MESSAGE_BYTES)
            if not message:
                os._exit(0)
            order = json.loads(message)
            if order["order"] == "import":
                return None
            seat = None
            if order["order"] == "spawn":
                seat = self._spawn(order["ranks"])
            elif hidden is None:
                self._answer(self._promised.add(order))
            else:
                self._serve_store(order, hidden.module("torch.distributed"))
            if seat is not None:
                return seat

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._channel.send(json.dumps(answer).encode())

    def _let_go(self) -> None:
        """In a fork: close what is the zygote's."""
        self._channel.close()
        self._promised.close()
        self._standbys.close()

    def _spawn(self, entries: list[dict[str, Any]]) -> Seat | None:
        """Give seats to standbys, and fork what is missing; only a forked worker returns, with its seat."""
        workers = self._standbys.begin(entries)
        if len(workers) == len(entries):
            self._answer({"workers": workers})
        elif self._fork_between(workers):
            for entry in entries[len(workers) :]:
                pid = self._fork(workers)
                if pid == 0:
                    self._let_go()
                    return Seat(**entry)
                workers.append(pid)
            self._answer({"workers": workers})
            os._exit(0)
        return None

    def _serve_store(self, order: dict[str, Any], dist: Any) -> None:
        """Fork a process that serves a TCPStore until the agent dies or kills it."""
        if self._fork_between():
            if self._fork() == 0:
                try:
                    os.setsid()
                    die_with_parent(self._agent)
                    listener, busy = self._promised.take(order)
                    self._promised.close()
                    self._standbys.close()
                    serve_store(self._channel, order["host"], listener, busy, dist)
                except Exception as error:  # noqa: BLE001 - the last frame of this process; the agent waits for it
                    refuse(self._channel, error)
            os._exit(0)
        self._promised.close()

    def _fork_between(self, workers: Sequence[int] = ()) -> bool:
        """Fork the intermediate process; return whether this is it. Its end makes the agent a parent."""
        try:
            between = os.fork()
        except OSError as error:
            self._refuse(error, workers)
            return False
        if between:
            os.waitpid(between, 0)
        return not between

    def _fork(self, workers: Sequence[int] = ()) -> int:
        """Fork in the intermediate process; where that fails, end it, and the workers that it has forked."""
        try:
            return os.fork()
        except OSError as error:
            self._refuse(error, workers)
            os._exit(1)

    def _refuse(self, error: OSError, workers: Sequence[int]) -> None:
        """Tell the agent that a fork failed."""
        for one in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        with contextlib.suppress(OSError):  # unless it has gone
            self._answer({"refused": error.strerror})


def main() -> None:
    """Serve as the zygote; in a forked worker, continue as the user's script.

    The command line is a JSON object, then the script and its arguments, which ``ps`` shows.
    """
    settings = json.loads(sys.argv[1])
    program = Program(settings["kind"], settings["target"], tuple(sys.argv[3:]))
    agent = settings["agent"]
    channel = socket.socket(fileno=settings["channel"])
    first = os.path.dirname(os.path.realpath(program.target)) if program.kind == "file" else os.getcwd()
    sys.path.insert(0, first)
    sys.argv[:] = [program.target, *program.args]
    die_with_parent(agent)
    server = Server(channel, agent, settings["ranks"])
    if settings["early"]:
        gc.freeze()
        channel.send(json.dumps({"early": os.getpid()}).encode())
        seat = server.serve(None)
        if seat is not None:
            del channel, server
            loaded = Preloading(_BEFORE)
            loaded.finish()
            hidden = Hidden(loaded)
            hidden.hide()
            _begin(seat, program, loaded, hidden, agent)
            return
    behind: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if settings["behind"]:
        behind = behind_the_ranks()
    elif settings["early"]:  # not for longer: a restart, or ranks that use torch all the same, wait for it
        behind = behind_the_ranks(FIRST_START)
    with behind:
        loaded, obstacle, left_out = load(settings["preload"], settings["plan"], settings["needless"])
    hidden = Hidden(loaded)
    hidden.hide()
    gc.collect()
    gc.freeze()
    answer = {"ready": os.getpid(), "obstacle": obstacle, "left_out": left_out}
    channel.send(json.dumps(answer).encode())

    def rehearse() -> None:
        hidden.rehearse()
        bootstrap.rehearse(program.kind, program.target, loaded.environment, hidden.module)

    seat = server.serve(hidden, rehearse)
    assert seat is not None, "there is nothing more to import"
    del channel, server
    _begin(seat, program, loaded, hidden, agent)


def _begin(seat: Seat, program: Program, loaded: Preloading, hidden: Hidden, agent: int) -> None:
    """Continue as the user's script, as in a new interpreter."""
    common = {
        name: value for name, value in {**loaded.environment, **seat.common}.items() if value is not None
    }
    environment = {**common, **seat.variables}
    sys.argv[1:] = seat.args
    os.setsid()
    bootstrap.take(environment, seat.stdout, seat.stderr, seat.stacks, hidden.module)
    die_with_parent(agent)
    page = heartbeat.attach(seat.heartbeat, hidden.module("torch.optim.optimizer"))
    tempfile.tempdir = None  # chosen once, from a variable that the script may set
    new_interpreter.serve(
        hidden,
        {**loaded.environment, **seat.variables},
        seat.variables,
        new_interpreter.Beginning(
            program.kind,
            program.target,
            tuple(seat.args),
            environment,
            seat.stdout,
            seat.stderr,
            seat.stacks,
            seat.heartbeat,
        ),
    )
    learning.begin(page, program.kind, program.target, hidden.module)
    bootstrap.run(program.kind, program.target)


if __name__ == "__main__":
    main()
