"""A rank that waits for a store which is gone can be called out."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outlast._torch_compat import store_at

_RANK = """
import os, signal, sys
from datetime import timedelta

class Called(BaseException):
    pass

def called(*_):
    raise Called

signal.signal(signal.SIGUSR2, called)
os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
import importlib
from outlast._torch_compat import connect_to_stores_in_steps
connect_to_stores_in_steps()
rendezvous = importlib.import_module("torch.distributed.rendezvous")
print("here", flush=True)
try:
    store = rendezvous._create_c10d_store("127.0.0.1", int(sys.argv[1]), 0, 1, timedelta(seconds=1700))
    store.set("a", "b")
    print("connected", store.timeout.total_seconds(), flush=True)
except Called:
    print("called out", flush=True)
"""


@pytest.fixture
def rank() -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A rank that asks for a store, and the socket at which it asks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", _RANK, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process, listener
            finally:
                process.kill()


def _told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_rank_whose_store_goes_while_it_connects_is_called_out(
    rank: tuple[subprocess.Popen[str], socket.socket],
) -> None:
    process, listener = rank
    assert _told(process) == "here"
    listener.accept()[0].close()  # the store is gone before it has answered
    listener.close()
    process.send_signal(signal.SIGUSR2)
    assert _told(process) == "called out"


def test_a_store_that_answers_late_is_connected_to_and_keeps_its_timeout(
    rank: tuple[subprocess.Popen[str], socket.socket],
) -> None:
    from torch import distributed

    process, listener = rank
    assert _told(process) == "here"
    for _ in range(3):
        listener.accept()[0].close()
    store = store_at(listener, "127.0.0.1", distributed)
    assert _told(process) == "connected 1700.0"  # after it has set a key
    assert store.num_keys() > 0
