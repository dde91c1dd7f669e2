"""The mutator behind bench/mutants.py: what it changes, and that no explanation is of what is not there."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "outlast"


@pytest.fixture(scope="module")
def mutation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation", ROOT / "bench" / "mutation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation"] = module
    spec.loader.exec_module(module)
    return module


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
