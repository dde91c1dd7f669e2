"""Whether the main thread goes on: a wait for a device spins, so its processor time tells nothing."""

from __future__ import annotations

import hashlib
import mmap
import sys
import threading
import time

import pytest
import torch

from outlast.inprocess.worker.interrupt import _motion

_MAIN = threading.get_ident()


@pytest.mark.parametrize("gpu", [False, True])
def test_a_thread_that_spins_outside_of_python_stands_still_where_there_is_a_gpu(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    over = threading.Event()
    looks: list[tuple[tuple[str, str], tuple[str, str]]] = []

    def look() -> None:
        while not over.is_set() and not looks:
            frame = sys._current_frames()[_MAIN]
            place, code = frame.f_lasti, _digest.__code__
            before = _motion(_MAIN)
            time.sleep(0.02)  # the main thread needs many times as long for its digest
            after = _motion(_MAIN)
            if sys._current_frames()[_MAIN] is frame and frame.f_lasti == place and frame.f_code is code:
                looks.append((before, after))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not looks and time.monotonic() < deadline:
            _digest()
    finally:
        over.set()
        thread.join()
    ((before, after),) = looks
    assert (before == after) is gpu


def _digest() -> None:
    with mmap.mmap(-1, 400 << 20) as memory:
        hashlib.sha256(memory)
