"""Modules whose import depends on more than variables, or changes more: left to the ranks, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

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
    script = folder / "program.py"
    script.write_text(program)
    done = warm.run([script, folder, *words], timeout=180)
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
        "umask": "import os; os.umask(0o077)",
        "folder": "import os; os.chdir('/')",
        "dtype": "import torch; torch.set_default_dtype(torch.float64)",
        "lock": "import multiprocessing; multiprocessing.RLock()",
        "method": "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
        "seed": "import random; random.seed(7)",
        "seed_numpy": "import numpy; numpy.random.seed(7)",
        "seed_torch": "import torch; torch.manual_seed(7)",
        "draw": "import random, numpy; random.random(); numpy.random.rand()",
    }
    for name, source in changes.items():
        (lib / f"lib_{name}.py").write_text(source)
    left_out = run(AHEAD, lib, *(f"lib_{name}" for name in changes), "lib_one")
    assert left_out.keys() == {f"lib_{name}" for name in changes if name != "draw"}


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
    "change",
    [
        "os.chdir('/')",
        "torch.set_default_dtype(torch.float64)",
        "multiprocessing.set_start_method('spawn')",
    ],
)
def test_what_was_imported_ahead_is_not_used_after_the_script_changed_its_process(
    lib: Path, change: str
) -> None:
    ((why, learned),) = run(SERVES, lib, "import lib_one", change, "import lib_two")
    assert ("lib_two" in why, learned) == (True, True)


@pytest.mark.parametrize(
    "words", [("import lib_one, lib_two", "os.chdir('/')"), ("multiprocessing.RLock()", "import lib_one")]
)
def test_what_was_imported_before_a_change_or_a_default_that_is_only_fixed_is_used(
    lib: Path, words: tuple[str, ...]
) -> None:
    assert run(SERVES, lib, *words) == []
