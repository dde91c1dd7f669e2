"""What the zygote imports ahead lies close together, and which variables it has read is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
before = set(sys.modules)
from outlast.worker.preloading import Hidden, Preloading

loaded = Preloading(before)
loaded.load("many")
loaded.finish()
names = [name for name in sys.modules if name.startswith("many")]
modules = [sys.modules[name] for name in names]
for name, module in zip(names, modules):
    assert (module.__name__, module.__spec__.name, module.own) == (name, name, name)
    assert name in repr(module)
Hidden(loaded).hide()
assert not any(name in sys.modules for name in names)
kept = {name: module for one in loaded.packages.values() for name, module in one.modules.items()}
assert {name: kept[name] for name in names} == dict(zip(names, modules))
pages = lambda some: len({id(one) >> 12 for one in some})
print(len(names), pages(modules), pages([name for name in kept if name in names]))
"""
MANY = 400


def test_modules_and_their_names_share_pages(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(MANY):
        # Each makes and drops objects of all sizes, as imports do.
        text = f"own = __name__\nkept = ['x' * size for size in range({number % 90})]\n"
        (folder / f"part_{number:03}.py").write_text(text)
    imports = "\n".join(f"import many.part_{number:03}" for number in range(MANY))
    (folder / "__init__.py").write_text(f"own = __name__\n{imports}\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    number, modules, names = map(int, done.stdout.split())
    assert number == MANY + 1
    assert modules < MANY / 8
    assert names < MANY / 8


WATCHES = """
import json, os, sys
before = frozenset(sys.modules)
from outlast.worker.preloading import Hidden, Preloading
loaded = Preloading(before)
for name in ("torch", "torch._dynamo"):
    loaded.load(name)
loaded.finish()
found = {}
hidden = Hidden(loaded)
hidden.hide()
hidden.serve(dict(loaded.environment), lambda one: found.update({name: str(one)}))
for name in sys.argv[1:]:
    hidden._asked = False
    os.putenv(name, "1") if name.startswith("OMP") else os.environ.update({name: "1"})
    difference = hidden._difference("torch", list(hidden._packages))
    found[name] = difference is not None and name in difference.variables
    os.unsetenv(name)
    os.environ.pop(name, None)
hidden.put_back("torch")
os.environ["PYTORCH_JIT"] = "1"
later = hidden._difference("torch", list(hidden._packages))
found["later"] = str(later) if later else ""
print(json.dumps(found))
"""
READ_AT_IMPORT = ("OMP_SCHEDULE", "KMP_AFFINITY", "MKL_DYNAMIC", "TORCH_LOGS", "TORCH_COMPILE_DISABLE",
    "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHDYNAMO_VERBOSE", "PYTORCH_JIT", "TORCH_CPP_LOG_LEVEL")  # fmt: skip
READ_LATER = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "MASTER_PORT", "WANDB_MODE",
    "TORCHINDUCTOR_CACHE_DIR", "TOKENIZERS_PARALLELISM", "PYTORCH_NVML_BASED_CUDA_CHECK")  # fmt: skip


def test_a_variable_counts_if_it_was_read_by_the_import(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in READ_AT_IMPORT}
    done = subprocess.run(
        [sys.executable, "-c", WATCHES, *READ_AT_IMPORT, *READ_LATER],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    found = json.loads(done.stdout)
    assert {name: found[name] for name in READ_AT_IMPORT} == dict.fromkeys(READ_AT_IMPORT, True)
    assert {name: found[name] for name in READ_LATER} == dict.fromkeys(READ_LATER, False)
    assert found["later"] == "", "a package without torch reads no variable of torch"
