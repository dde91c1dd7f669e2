"""The mutator behind bench/mutants.py: what it changes, what it notes, and how a change is put into place."""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.source_tree import ROOT


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


mutation, planting = imported(ROOT / "bench" / "mutation.py"), imported(ROOT / "bench" / "planting.py")


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("x = a < 3", ["x = a <= 3", "x = a >= 3", "x = a < 4"]),
        ("x = a is not b", ["x = a is b"]),
        ("x = a + b", ["x = a - b"]),
        ("x = a + 'text'", []),
        ("x = a and not b", ["x = a or not b", "x = a and (not not b)"]),
        ("x = True", ["x = False"]),
        ("x: int = 1", ["x: int = 2"]),
        ("x = 1 if a else b", ["x = 1 if True else b", "x = 1 if False else b", "x = 2 if a else b"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if True]"]),
        ("f(a)", ["pass"]),
        ("self.x = a", ["pass"]),
        ("x += a", ["pass", "x -= a"]),
        ("x = f'{a + b}'", ["x = f'{a - b}'"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 1", []),
        ('def f(a: "x | y") -> int:\n    """Text."""\n    return a', ["return None"]),
    ],
)
def test_each_change_is_a_small_one(line: str, after: list[str]) -> None:
    found = list(mutation.mutants(line))
    assert len(found) == len(after)
    for one, words in zip(found, after, strict=True):
        assert words in one.source
        assert one.source != ast.unparse(ast.parse(line))


def test_a_name_comes_up_once_and_the_line_is_that_of_the_statement() -> None:
    source = "class A:\n    def f(self):\n        return [\n            1 + 1\n        ]\n"
    assert [(one.name, one.line) for one in mutation.mutants(source)] == [
        ("A.f: return [1 + 1] => return None", 3),
        ("A.f: 1 + 1 => 1 - 1", 3),
        ("A.f: 1 => 2", 3),
        ("A.f: 1 => 2 #2", 3),
    ]


BRANCHES = """
def f(a):
    \"\"\"Text.\"\"\"
    if a > 2:
        return [each for each in range(a)]
    elif a:
        try:
            raise ValueError
        except ValueError:
            a += 1
        finally:
            a += 1

    def inner():
        return a

    return inner()
"""


@pytest.mark.parametrize(("given", "lines"), [(3, {3, 4, 5}), (1, {3, 4, 6, 7, 8, 10, 12, 14, 15, 17})])
def test_a_source_with_notes_says_which_statements_ran(given: int, lines: set[int]) -> None:
    hits: set[tuple[str, int]] = set()
    names: dict[str, Any] = {"__hit__": hits.add}
    exec(mutation.noted(BRANCHES, "m"), names)
    assert hits == set(), "nothing ran yet"
    names["f"](given)
    assert hits == {("m", line) for line in lines}


MODULE = """
from functools import cache

LIMIT = 3

@cache
def slow(a, most=LIMIT):
    return min(a, most) + 1

class Box:
    @property
    def twice(self):
        return 2 * 2

def maker():
    def made():
        return 7
    return made

seven = maker()
"""


def put(tmp_path: Path, name: str) -> tuple[bool, ModuleType]:
    """Put a mutant into a module that others have imported; return whether that could be done."""
    path = tmp_path / "planted_into.py"
    path.write_text(MODULE)
    module = imported(path)
    gc.freeze()  # as before a fork; it hides what there is from gc.get_objects
    (mutant,) = [one for one in mutation.mutants(MODULE) if one.name == name]
    before = ast.unparse(ast.parse(MODULE))
    changed = planting.changed_functions(*(compile(one, "x", "exec") for one in (before, mutant.source)))
    return changed is not None and planting.put(changed, planting.functions_of(path)), module


@pytest.mark.parametrize(
    ("name", "what", "expected"),
    [
        ("slow: min(a, most) + 1 => min(a, most) - 1", "slow(9)", 2),
        ("Box.twice: 2 * 2 => 2 / 2", "Box().twice", 1),
    ],
)
def test_a_change_is_put_into_a_function(tmp_path: Path, name: str, what: str, expected: object) -> None:
    done, module = put(tmp_path, name)
    assert done
    assert eval(what, dict(vars(module))) == expected


@pytest.mark.parametrize("name", ["module: 3 => 4", "maker.made: 7 => 8"])
def test_a_change_of_what_the_import_made_needs_another_import(tmp_path: Path, name: str) -> None:
    done, module = put(tmp_path, name)
    assert not done
    assert (module.maker()(), module.seven()) == (7, 7)
