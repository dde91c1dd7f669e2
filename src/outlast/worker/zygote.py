"""The zygote: a process that has imported torch and waits, so that workers start in milliseconds.

The agent starts this file as a script, with the workers' own environment, and talks to it over
an inherited socket. Each order is one JSON message, each answer one JSON message::

    {"order": "store", "host": address}    -> {"store": pid, "port": n}     a host for torch's TCPStore
                                           -> {"storeless": why}            there can be none
    {"order": "spawn", "ranks": [...]}     -> {"workers": [pid, ...]}       one entry a rank
                                           -> {"refused": why}              this process cannot fork safely

Forking goes through a short-lived process in between, so that the kernel hands the workers to
the agent (their adopter): the agent is their parent, waits for them and takes them along when it
dies, and the zygote may die without harm to them. Until it forks, the zygote has one thread and
no CUDA.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0:1] = []  # the folder of this file is no place to import from

import contextlib
import importlib
import json
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from outlast.transport.processes import die_with_parent

MESSAGE_BYTES = 1 << 20
IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # DistributedDataParallel and compile import it, for a second, when first used
    "outlast.worker.bootstrap",
    "outlast.worker.session",
)


@dataclass(frozen=True)
class Seat:
    """What one rank is given at its fork.

    Args:
        variables: environment variables of this rank on top of the common ones.
        args: the script's arguments for this rank.
        stdout, stderr: files that the streams are appended to; None: inherited.
        stacks: file that receives the stacks when STACK_SIGNAL arrives.
        pulse: path of the pulse page.
    """

    variables: dict[str, str]
    args: list[str]
    stdout: str | None
    stderr: str | None
    stacks: str
    pulse: str


@dataclass(frozen=True)
class Program:
    """What every rank runs, as the interpreter would have been told.

    Args:
        kind: "file" or "module".
        target: the path or the module's name.
        args: the script's own arguments.
    """

    kind: str
    target: str
    args: tuple[str, ...]


def _obstacle(before: int) -> str:
    """Say why this process must not be forked, or nothing."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        return f"a preloaded module started threads ({names})"
    if len(os.listdir("/proc/self/task")) > before:
        return "a preloaded module started native threads"
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""


def _store_host(channel: socket.socket, agent: int, host: str) -> NoReturn:
    """Serve a TCPStore at an address of this host until the agent dies or kills this process."""
    import signal
    from datetime import timedelta

    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    os.setsid()
    die_with_parent(agent)
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal every process; ranks still save
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen(4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host or "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    channel.send(json.dumps({"store": os.getpid(), "port": port}).encode())
    channel.close()
    while store is not None:
        signal.pause()
    os._exit(0)


def _deliver(channel: socket.socket, agent: int, order: dict[str, Any]) -> Seat | None:
    """In the process in between: fork what was ordered; return a seat in each worker only."""
    if order["order"] == "store":
        if os.fork() == 0:
            try:
                _store_host(channel, agent, order["host"])
            except Exception as error:  # noqa: BLE001 - the last frame of this process; the agent waits for it
                with contextlib.suppress(OSError):  # unless it has gone
                    channel.send(json.dumps({"storeless": f"{type(error).__name__}: {error}"}).encode())
                os._exit(1)
        os._exit(0)
    workers: list[int] = []
    for entry in order["ranks"]:
        pid = os.fork()
        if pid == 0:
            channel.close()
            return Seat(**entry)
        workers.append(pid)
    channel.send(json.dumps({"workers": workers}).encode())
    os._exit(0)


def serve(channel: socket.socket, agent: int, preload: list[str]) -> Seat:
    """Take orders until the agent hangs up; return only in a new worker."""
    threads_of_torch = 1
    for name in IMPORTS:
        importlib.import_module(name)
        threads_of_torch = len(os.listdir("/proc/self/task"))  # numpy's BLAS restarts its own after a fork
    for name in preload:
        importlib.import_module(name)
    import gc

    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"ready": os.getpid(), "obstacle": _obstacle(threads_of_torch)}).encode())
    while True:
        message = channel.recv(MESSAGE_BYTES)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            seat = _deliver(channel, agent, json.loads(message))
            if seat is not None:
                return seat
        os.waitpid(between, 0)


def main() -> None:
    """Serve as the zygote; in a forked worker, go on as the user's script.

    The command line is a JSON object and, for the eyes of ``ps``, the script and its arguments.
    """
    settings = json.loads(sys.argv[1])
    program = Program(settings["kind"], settings["target"], tuple(sys.argv[3:]))
    agent = settings["agent"]
    channel = socket.socket(fileno=settings["channel"])
    if program.kind == "file":
        sys.path.insert(0, os.path.dirname(os.path.realpath(program.target)))
    else:
        sys.path.insert(0, os.getcwd())
    sys.argv[:] = [program.target, *program.args]
    die_with_parent(agent)
    seat = serve(channel, agent, settings["preload"])
    del channel

    from outlast.worker import bootstrap

    sys.argv[1:] = seat.args
    bootstrap.take(seat.variables, seat.stdout, seat.stderr, seat.stacks)
    die_with_parent(agent)
    bootstrap.run(program.kind, program.target, seat.pulse)


if __name__ == "__main__":
    main()
