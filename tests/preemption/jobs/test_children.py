"""Child processes of a rank that hears notices end as they would in a rank that does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, multiprocessing, os, signal, sys, time

if sys.argv[1] == "shielded":
    from outlast.preemption.worker import Handlers

    handlers = Handlers(("SIGTERM",), shield=True)
    handlers.install()
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _set_worker_signal_handlers


def ready(pipe):
    pipe.send(os.getpid())
    while True:
        time.sleep(3600)


def plain(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready(pipe)


def heeds(pipe):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    ready(pipe)


def ignores(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send(os.getpid())
    time.sleep(1.0)


def as_a_loader(pipe):
    _set_worker_signal_handlers()
    ready(pipe)


def told(child):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=child, args=(there,), daemon=True)
    process.start()
    here.recv()
    process.terminate()
    process.join(30.0)
    return process.exitcode


print(json.dumps({child.__name__: told(child) for child in (plain, heeds, ignores, as_a_loader)}))
loader = iter(DataLoader(range(10_000), num_workers=2))  # still there at exit, as one that a session holds
next(loader)
sys.keeps = loader
"""


@pytest.mark.parametrize("how", ["shielded", pytest.param("unshielded", marks=pytest.mark.long)])
def test_a_child_ends_by_its_parents_signal_as_it_chooses(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(ended.stdout) == {"plain": -15, "heeds": 7, "ignores": 0, "as_a_loader": 0}
    assert ended.stderr == ""
