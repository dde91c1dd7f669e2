"""The mutator behind bench/mutants.py: what it changes, and that no explanation is of what is not there."""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "outlast"


def bench(name: str) -> ModuleType:
    """Import a module of bench/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mutation() -> ModuleType:
    return bench("mutation")


@pytest.fixture(scope="module")
def planting() -> ModuleType:
    return bench("planting")


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
def test_each_change_is_a_small_one(mutation: ModuleType, line: str, after: list[str]) -> None:
    found = list(mutation.mutants(line))
    assert len(found) == len(after)
    for one, words in zip(found, after, strict=True):
        assert words in one.source
        assert one.source != ast.unparse(ast.parse(line))


def test_a_name_says_where_it_is_and_comes_up_once(mutation: ModuleType) -> None:
    source = "class A:\n    def f(self):\n        return 1 + 1\n"
    assert [one.name for one in mutation.mutants(source)] == [
        "A.f: return 1 + 1 => return None",
        "A.f: 1 + 1 => 1 - 1",
        "A.f: 1 => 2",
        "A.f: 1 => 2 #2",
    ]


def test_a_change_is_at_the_line_of_its_statement(mutation: ModuleType) -> None:
    source = (
        "def f(a):\n    if a:\n        g(\n            a + 1,\n        )\n    return [\n        1\n    ]\n"
    )
    assert {(one.name.partition(": ")[2], one.line) for one in mutation.mutants(source)} == {
        ("g(a + 1) => pass", 3),
        ("if a => if True", 2),
        ("if a => if False", 2),
        ("a + 1 => a - 1", 3),
        ("1 => 2", 3),
        ("return [1] => return None", 6),
        ("1 => 2 #2", 6),
    }


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
def test_a_source_with_notes_says_which_statements_ran(
    mutation: ModuleType, given: int, lines: set[int]
) -> None:
    hits: set[tuple[str, int]] = set()
    names: dict[str, Any] = {"__hit__": hits.add}
    exec(mutation.noted(BRANCHES, "m"), names)
    assert hits == set(), "nothing ran yet"
    names["f"](given)
    assert hits == {("m", line) for line in lines}


SOURCE_OF_A_MODULE = """
from functools import cache

LIMIT = 3

def free(a, most=LIMIT):
    return min(a, most)

@cache
def slow(a):
    return free(a) + 1

class Box:
    size = 2

    @property
    def twice(self):
        return self.size * 2

    @staticmethod
    def made():
        return Box()

def maker():
    def made():
        return 7
    return made

seven = maker()
double = lambda a: a + a
"""


def imported(tmp_path: Path, name: str) -> tuple[ModuleType, Path]:
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE_OF_A_MODULE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


@pytest.mark.parametrize(
    ("name", "what", "expected"),
    [
        ("free: return min(a, most) => return None", "free(1)", None),
        ("slow: free(a) + 1 => free(a) - 1", "slow(9)", 2),
        ("Box.twice: self.size * 2 => self.size / 2", "Box().twice", 1),
        ("Box.made: return Box() => return None", "Box.made()", None),
    ],
)
def test_a_change_is_put_into_a_function_that_others_have_imported(
    mutation: ModuleType, planting: ModuleType, tmp_path: Path, name: str, what: str, expected: object
) -> None:
    module, path = imported(tmp_path, "planted_into")
    gc.freeze()  # as before a fork; it hides what there is from gc.get_objects
    there = dict(vars(module))
    changed = changes(mutation, planting, name)
    assert planting.put(changed, planting.functions_of(path))
    assert eval(what, there) == expected


def changes(mutation: ModuleType, planting: ModuleType, name: str) -> dict[str, Any] | None:
    """Return what a mutant changes."""
    before = ast.unparse(ast.parse(SOURCE_OF_A_MODULE))
    (mutant,) = [one for one in mutation.mutants(SOURCE_OF_A_MODULE) if one.name == name]
    return planting.changed_functions(*(compile(one, "x", "exec") for one in (before, mutant.source)))


@pytest.mark.parametrize(
    "name", ["module: 3 => 4", "Box: 2 => 3", "module: a + a => a - a", "maker.made: 7 => 8"]
)
def test_a_change_of_what_was_made_at_the_import_needs_another_import(
    mutation: ModuleType, planting: ModuleType, tmp_path: Path, name: str
) -> None:
    module, path = imported(tmp_path, "planted_over")
    changed = changes(mutation, planting, name)
    assert changed is None or not planting.put(changed, planting.functions_of(path))
    assert (module.maker()(), module.seven()) == (7, 7)


def test_every_explanation_names_a_mutant_that_there_is(mutation: ModuleType) -> None:
    lines = (ROOT / "bench" / "mutants_explained.txt").read_text().splitlines()
    explained = [line.split(" | ") for line in lines if not line.startswith("#")]
    assert explained
    there = {
        module: mutation.names((SOURCE / f"{module.replace('.', '/')}.py").read_text())
        for module in {module for module, _, _ in explained}
    }
    for module, name, reason in explained:
        assert name in there[module], f"{module}: stale: {name}"
        assert reason
