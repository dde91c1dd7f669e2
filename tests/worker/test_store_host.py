"""A store host that comes after its launcher, and a port that another process still has."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

from outlast.worker.store_host import listener_at
from tests.support.launching import DEADLINE

STORE_HOST = """
import os, socket, sys
from outlast.ipc.processes import adopt_orphans
from outlast.worker import zygote
from outlast.worker.preloading import Hidden, Preloading

preloaded = Preloading(sys.modules)
preloaded.load("torch.distributed")
preloaded.finish()
adopt_orphans()
agent, (ours, theirs) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.close()
if os.fork() == 0:
    order = {"order": "store", "host": "127.0.0.1", "port": 0, "avoid": []}
    zygote.Server(theirs, agent, 0)._serve_store(order, Hidden(preloaded).module("torch.distributed"))
    os._exit(0)
ended = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]
assert sorted(ended) == [0, 1], ended
"""


def test_a_store_host_that_comes_after_its_launcher_says_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STORE_HOST], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


def test_a_port_that_the_store_before_still_has_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        timer = threading.Timer(0.3, before.close)
        timer.start()
        listener, why = listener_at("127.0.0.1", port, port, patience=DEADLINE)
        timer.join()
    with listener:
        assert (listener.getsockname()[1], why) == (port, "")


def test_another_port_is_used_in_place_of_one_that_stays_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        listener, why = listener_at("127.0.0.1", port, port, patience=0.2)
        with listener:
            assert listener.getsockname()[1] not in (0, port)
            assert why
