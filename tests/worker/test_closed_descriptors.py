"""A process that closes every descriptor heeds its signals as before, and its files are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.launching import DEADLINE

HEEDS = """
import os, queue, signal, stat, sys, threading, time
from outlast.preemption.worker import Handlers

handlers, heard = Handlers(("SIGTERM",), shield=False), queue.Queue()
handlers.install()


def listen():
    while True:
        for number in handlers.wait(60.0):
            heard.put(number)


def is_data(number):
    try:
        return os.path.samestat(os.fstat(number), os.fstat(data))
    except OSError:
        return True


threading.Thread(target=listen, daemon=True).start()
os.closerange(3, 4096)
data = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(3, 1024):
    os.dup2(data, number)
os.write(data, b"mine")
handlers.wake()
while is_data(handlers._wakeup):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
print("heard", heard.get(timeout=180.0), flush=True)
handlers.release()
handlers.wake()
"""


def test_signals_are_heeded_in_a_process_that_has_closed_all_descriptors(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", HEEDS, str(data)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "heard 15\n"), done.stderr
    assert data.read_bytes() == b"mine"
