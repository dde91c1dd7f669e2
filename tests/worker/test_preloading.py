"""What the zygote imports ahead lies close together, so that a fork copies few pages."""

from __future__ import annotations

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
