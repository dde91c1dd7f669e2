from __future__ import annotations

import os
import subprocess
import threading

import pytest

from outlast.ipc.processes import children_of


def test_a_thread_that_ends_while_children_are_listed_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []
    thread = threading.Thread(target=lambda: gone.append(threading.get_native_id()))
    thread.start()
    thread.join()
    listed = os.listdir

    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(os, "listdir", lambda folder: [str(gone[0]), *listed(folder)])
        try:
            assert child.pid in set(children_of(os.getpid()))
        finally:
            child.kill()


def test_a_process_that_is_gone_has_no_children() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert not list(children_of(child.pid))
