"""Preloaded modules: which threads are no obstacle to a fork, and slow imports are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launching import Run, running

pytestmark = pytest.mark.timeout(420)

STARTS = """
import _thread, ctypes, time
begun = _thread.allocate_lock()
begun.acquire()
def run():
    ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)  # PR_SET_NAME
    begun.release()
    time.sleep(1e6)
_thread.start_new_thread(run, ())
begun.acquire()
"""


@pytest.mark.parametrize(
    ("name", "start"), [("jemalloc_bg_thd", "zygote"), ("worker-7", "cold:.*brings_threads.*worker-7")]
)
def test_threads_that_survive_a_fork_are_no_obstacle(tmp_path: Path, name: str, start: str) -> None:
    (tmp_path / "brings_threads.py").write_text(STARTS.format(name=name))
    script = tmp_path / "train.py"
    script.write_text(
        "import sys; print('preloaded', 'brings_threads' in sys.modules)\nimport brings_threads\n"
    )
    options = ("--preload=brings_threads",)
    with running(Run(tmp_path / "run", str(script), options=options), PYTHONPATH=str(tmp_path)) as run:
        assert run.finish() == 0, run.console()
    (began,) = run.records("generation_started")
    assert re.match(start, began["start"])
    assert "preloaded False" in run.console()


POISONS = """
import os, torch
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


def test_ranks_start_cold_where_a_preloaded_module_has_used_cuda(tmp_path: Path) -> None:
    (tmp_path / "asks_for_cuda.py").write_text(POISONS)
    script = tmp_path / "train.py"
    script.write_text("print('began')\n")
    job = Run(tmp_path / "run", str(script), options=("--preload=asks_for_cuda",))
    with running(job, PYTHONPATH=str(tmp_path)) as run:
        assert run.finish() == 0, run.console()
    (began,) = run.records("generation_started")
    assert re.match("cold:.*asks_for_cuda.*CUDA", began["start"])


def test_the_console_names_a_module_that_ranks_wait_for(tmp_path: Path) -> None:
    let_go = tmp_path / "let go"
    waits = f"import os, time\nwhile not os.path.exists({str(let_go)!r}): time.sleep(0.05)\n"
    (tmp_path / "is_slow.py").write_text(waits)
    script = tmp_path / "train.py"
    script.write_text("print('began')\n")
    job = Run(tmp_path / "run", str(script), options=("--preload=is_slow",))
    with running(job, PYTHONPATH=str(tmp_path)) as run:
        run.until(lambda: "is_slow" in run.console())
        let_go.touch()
        assert run.finish() == 0, run.console()
    assert "began" in run.console()
