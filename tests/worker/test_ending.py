"""A rank's interpreter ends when torch's threads rest."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed  # noqa: F401 - what it waits for is of this module

from outlast.worker import ending
from tests.support.launching import DEADLINE

DATA = bytes(1 << 20)


@contextmanager
def a_thread(name: str, megabytes: int) -> Iterator[threading.Event]:
    """A thread that computes without the interpreter, sets the event, and then waits."""
    begun, done, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(name)
        begun.set()
        hashlib.sha256(DATA * megabytes)
        done.set()
        over.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(DEADLINE)
    try:
        yield done
    finally:
        over.set()
        thread.join()


def test_a_thread_of_torch_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_WITHIN", DEADLINE)
    with a_thread("pt_gloo_runloop", 200) as done:
        assert ending.wait_for_rest()
        assert done.is_set()


def test_other_threads_are_not_waited_for_and_torchs_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_WITHIN", 0.01)
    with a_thread("pt_gloo_runloop", 300) as done:
        assert not ending.wait_for_rest()
        assert not done.is_set()
    monkeypatch.setattr(ending, "_WITHIN", DEADLINE)
    with a_thread("mine", 300) as done:
        assert ending.wait_for_rest()
        assert not done.is_set()


def test_it_is_the_last_that_is_done_before_the_interpreter_ends() -> None:
    """The script's handlers, which may use a group, come before."""
    script = """
import atexit, sys
from outlast.worker import ending
ending.wait_for_rest = lambda: print("rest")
ending.let_threads_rest_at_exit()
atexit.register(print, "the script's")
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["the script's", "rest"]
