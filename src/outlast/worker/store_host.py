"""Serves a TCPStore: in a fork of the zygote, or as a cold process that imports torch for it.

A cold one is needed where ranks began before torch was imported, with the port of a store that was promised
to them, and the zygote then died or cannot fork. The agent starts this file as a script. The command line is
a JSON object: the agent's pid, the host and the port, and the number of an inherited socket. The answer is
one JSON message, as the zygote's::

    {"store": pid, "port": n, "busy": why}
    {"storeless": why}                          there can be none
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0:1] = []  # do not import from the folder of this file

import contextlib
import importlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any, NoReturn

from outlast._torch_compat import store_at
from outlast.ipc.processes import die_with_parent

PORT_PATIENCE = 10.0  # seconds; the previous store may still hold the port
IMPORT_PATIENCE = 600  # seconds, after which a cold process that has not imported torch ends


def listener_at(
    host: str, port: int, avoid: int, patience: float = PORT_PATIENCE
) -> tuple[socket.socket, str]:
    """Return a socket that listens at a port, or at a free one, and why the port was not available.

    Args:
        host: address of this host; empty: all of them.
        port: the port; 0: any.
        avoid: a port that must not be chosen, because ranks expect something else there.
        patience: seconds for which the port is retried.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + patience
    why = ""
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(4096)
        except OSError as error:
            listener.close()
            if not port:
                raise
            if time.monotonic() >= deadline:
                why, port = f"{error.strerror} for {patience:.0f} s; a free port is used instead", 0
            time.sleep(0.02)
            continue
        if port or listener.getsockname()[1] != avoid:
            return listener, why
        listener.close()


def serve(channel: socket.socket, host: str, listener: socket.socket, busy: str, dist: Any) -> NoReturn:
    """Serve a store until the agent dies or kills this process; say to the agent where.

    Args:
        channel: to the agent.
        host: address of this host; empty: all of them.
        listener: a socket that listens there.
        busy: why the port that was wanted was not available.
        dist: torch.distributed.

    Raises:
        RuntimeError: there can be no store.
    """
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    _outlive_notices()
    port = listener.getsockname()[1]
    store = store_at(listener, host or "127.0.0.1", dist, timeout=timedelta(seconds=30))
    channel.send(json.dumps({"store": os.getpid(), "port": port, "busy": busy}).encode())
    channel.close()
    while store is not None:
        signal.pause()
    os._exit(0)


def _outlive_notices() -> None:
    """Ignore the signals that schedulers send to every process; ranks still save."""
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)


def refuse(channel: socket.socket, error: Exception) -> NoReturn:
    """Tell the agent why no store can be served, and end."""
    with contextlib.suppress(OSError):  # unless it has gone
        channel.send(json.dumps({"storeless": f"{type(error).__name__}: {error}"}).encode())
    os._exit(1)


def main() -> None:
    """Serve the store that the command line asks for."""
    told = json.loads(sys.argv[1])
    channel = socket.socket(fileno=told["channel"])
    die_with_parent(told["agent"])
    _outlive_notices()
    try:
        listener, busy = listener_at(told["host"], told["port"], 0)  # ranks that connect from now on wait
        signal.alarm(IMPORT_PATIENCE)
        dist = importlib.import_module("torch.distributed")
        signal.alarm(0)
        serve(channel, told["host"], listener, busy, dist)
    except Exception as error:  # noqa: BLE001 - the last frame of this process; the agent waits for it
        refuse(channel, error)


if __name__ == "__main__":
    main()
