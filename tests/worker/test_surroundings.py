"""Modules whose import depends on more than variables, or changes more: left to the ranks, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AHEAD = """
import json, multiprocessing, sys
import numpy.random, torch
from outlast.worker.ahead import Ahead, Plan
from outlast.worker.preloading import Preloading
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
loaded = Preloading(sys.modules)
plan = Plan([(name, 0) for name in names], [{}], {}, frozenset(), f"{folder}/progress", f"{folder}/result")
print(json.dumps(Ahead(plan, loaded).run()))
"""
LISTS = """
import importlib, json, multiprocessing, os, sys
from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage
from outlast.settings import WorkerContext
from outlast.worker.learning import REPORT_AT, Learner
folder, *words = sys.argv[1:]
os.chdir(folder)
sys.path.insert(0, folder)
page = HeartbeatPage(bytearray(PAGE_BYTES))
context = WorkerContext(generation=1, control_path=f"{folder}/control")
Learner(page, context, "/own", lambda _: None).begin()
for word in words:
    exec(word)
for step in range(REPORT_AT[0]):
    page.heartbeat(step)
told = json.load(open(f"{folder}/imports-1-0.json"))
print(json.dumps([name for name, _ in told["names"] if name.startswith("lib_")]))
"""
SERVES = """
import json, multiprocessing, os, sys
import torch
from outlast.worker.ahead import Ahead, Plan
from outlast.worker.preloading import Hidden, Preloading
folder, *words = sys.argv[1:]
sys.path.insert(0, folder)
loaded = Preloading(set(sys.modules))
names = [("lib_one", 0), ("lib_two", 0)]
Ahead(Plan(names, [{}], {}, frozenset(), f"{folder}/progress", f"{folder}/result"), loaded).run()
loaded.finish()
hidden = Hidden(loaded)
hidden.hide()
found = []
hidden.serve(dict(os.environ), lambda one: found.append((str(one), one.learned)))
for word in words:
    exec(word)
hidden.give_up()
print(json.dumps(found))
"""


def run(program: str, folder: Path, *words: str) -> Any:
    command = [sys.executable, "-c", program, str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """Return a folder into which packages were installed."""
    (tmp_path / "some-1.0.dist-info").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"lib_{name}.py").touch()
    return tmp_path


def test_an_import_that_changes_its_process_is_left_out(lib: Path) -> None:
    changes = {
        "umask": ("import os; os.umask(0o077)", "it changes the umask"),
        "folder": ("import os; os.chdir('/')", "it changes the working folder"),
        "dtype": (
            "import torch; torch.set_default_dtype(torch.float64)",
            "it changes torch's default dtype",
        ),
        "lock": (
            "import multiprocessing; multiprocessing.RLock()",
            "it fixes the start method of multiprocessing",
        ),
        "method": (
            "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
            "it changes the start method of multiprocessing",
        ),
        "seed": ("import random; random.seed(7)", "it seeds the generator of random"),
        "seed_numpy": ("import numpy; numpy.random.seed(7)", "it seeds the generator of numpy"),
        "seed_torch": ("import torch; torch.manual_seed(7)", "it seeds the generator of torch"),
        "draw": ("import random, numpy; random.random(); numpy.random.rand()", None),
    }
    for name, (source, _) in changes.items():
        (lib / f"lib_{name}.py").write_text(source)
    names = [f"lib_{name}" for name in changes]
    expected = {f"lib_{name}": why for name, (_, why) in changes.items() if why is not None}
    assert run(AHEAD, lib, *names, "lib_one") == expected


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ("os.chdir('/')", "os.chdir(folder)"),
        ("import torch; torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
        (
            "multiprocessing.set_start_method('spawn')",
            "multiprocessing.set_start_method(None, force=True)",
        ),
    ],
)
def test_what_is_imported_after_the_script_changed_its_process_is_not_listed(
    lib: Path, change: str, back: str
) -> None:
    assert run(LISTS, lib, "import lib_one", change, "import lib_two") == ["lib_one"]
    assert run(LISTS, lib, change, "import lib_one", back, "import lib_two") == ["lib_two"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("os.chdir('/')", "the working folder"),
        ("torch.set_default_dtype(torch.float64)", "torch's default dtype"),
        ("multiprocessing.set_start_method('spawn')", "the start method of multiprocessing"),
    ],
)
def test_what_was_imported_ahead_is_not_used_after_the_script_changed_its_process(
    lib: Path, change: str, what: str
) -> None:
    words = f"the script changed {what} before it imports lib_two"
    assert run(SERVES, lib, "import lib_one", change, "import lib_two") == [[words, True]]
    assert run(SERVES, lib, "import lib_one, lib_two", change) == []
    assert run(SERVES, lib, "multiprocessing.RLock()", "import lib_one") == [], "that fixes the default"
