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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from outlast import _torch_compat
from outlast.hang.worker import heartbeat
from outlast.ipc.processes import die_with_parent
from outlast.worker import bootstrap, learning, new_interpreter
from outlast.worker.ahead import FIRST_START, SURVIVE_FORKS, Ahead, Plan, behind_the_ranks, name_of
from outlast.worker.preloading import Hidden, Preloading
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


def _store_host(
    channel: socket.socket, agent: int, order: dict[str, Any], dist: Any, promised: Promised
) -> NoReturn:
    """Serve a TCPStore at an address of this host until the agent dies or kills this process."""
    os.setsid()
    die_with_parent(agent)
    listener, busy = promised.take(order)
    promised.close()
    serve_store(channel, order["host"], listener, busy, dist)


def _deliver(
    channel: socket.socket, agent: int, order: dict[str, Any], hidden: Hidden | None, promised: Promised
) -> Seat | None:
    """In the intermediate process: fork what was requested; only a worker returns, with its seat."""
    if order["order"] == "store":
        assert hidden is not None, "torch has been imported"
        try:
            pid = os.fork()
        except OSError as error:
            _refuse(channel, error)
            os._exit(1)
        if pid == 0:
            try:
                _store_host(channel, agent, order, hidden.module("torch.distributed"), promised)
            except Exception as error:  # noqa: BLE001 - the last frame of this process; the agent waits for it
                refuse(channel, error)
        os._exit(0)
    workers: list[int] = []
    for entry in order["ranks"]:
        try:
            pid = os.fork()
        except OSError as error:
            for one in workers:
                os.kill(one, signal.SIGKILL)
            _refuse(channel, error)
            os._exit(1)
        if pid == 0:
            channel.close()
            promised.close()
            return Seat(**entry)
        workers.append(pid)
    channel.send(json.dumps({"workers": workers}).encode())
    os._exit(0)


def load(modules: list[str], plan: str) -> tuple[Preloading, str, bool]:
    """Import torch, the named modules and those of a plan.

    Args:
        modules: names.
        plan: file with what the ranks import; "": it is not known.

    Returns:
        what was imported; why this process must not fork, or ""; whether modules of the plan had to be left
        out, so that it must not fork either.
    """
    loaded, obstacle = Preloading(_BEFORE), ""
    gc.disable()  # an import makes much and drops little: an eighth of the time of torch's is collection
    for name in IMPORTS:
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


def serve(channel: socket.socket, agent: int, hidden: Hidden | None, promised: Promised) -> Seat | None:
    """Serve requests until the agent closes the socket; return in a new worker, or to import.

    Args:
        channel: to the agent.
        agent: its pid.
        hidden: what has been imported; None: nothing yet.
        promised: stores to be served.
    """
    while True:
        message = channel.recv(MESSAGE_BYTES)
        if not message:
            os._exit(0)
        order = json.loads(message)
        if order["order"] == "import":
            return None
        if hidden is None and order["order"] == "store":
            channel.send(json.dumps(promised.add(order)).encode())
            continue
        try:
            between = os.fork()
        except OSError as error:
            _refuse(channel, error)
            continue
        if between == 0:
            seat = _deliver(channel, agent, order, hidden, promised)
            if seat is not None:
                return seat
        os.waitpid(between, 0)
        if order["order"] == "store":
            promised.close()


def _refuse(channel: socket.socket, error: OSError) -> None:
    """Tell the agent that the fork failed."""
    with contextlib.suppress(OSError):  # unless it has gone
        channel.send(json.dumps({"refused": error.strerror}).encode())


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
    promised = Promised()
    if settings["early"]:
        gc.freeze()
        channel.send(json.dumps({"early": os.getpid()}).encode())
        seat = serve(channel, agent, None, promised)
        if seat is not None:
            del channel
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
        loaded, obstacle, left_out = load(settings["preload"], settings["plan"])
    hidden = Hidden(loaded)
    hidden.hide()
    gc.collect()
    gc.freeze()
    answer = {"ready": os.getpid(), "obstacle": obstacle, "left_out": left_out}
    channel.send(json.dumps(answer).encode())
    seat = serve(channel, agent, hidden, promised)
    assert seat is not None, "there is nothing more to import"
    del channel
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
