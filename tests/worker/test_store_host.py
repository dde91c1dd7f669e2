"""A store host that comes after its launcher ends without a word."""

from __future__ import annotations

import subprocess
import sys

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
