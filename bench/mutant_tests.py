"""The fast tests of a capability, called without pytest, and the statements of policies that each reaches.

Tests are those of tests/CAPABILITY/policy and the transcripts of tests/simulation. A test runs once for each
set of values of its ``parametrize`` marks. It may take the fixtures ``seed``, ``tmp_path`` and
``monkeypatch``, and those of its own module that need no other. Tests with other fixtures, and tests in
classes, are left out.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mutation import noted

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ROOT / "src" / "outlast"
_TRANSCRIPTS = "tests.simulation.transcript"
_OF_INCIDENTS = ROOT / "tests" / "simulation" / "transcripts"
Lines = frozenset[tuple[str, int]]
_Cases = dict[str, tuple[Callable[..., None], list[dict[str, Any]]]]  # a test, and its sets of values


@dataclass(frozen=True)
class Test:
    """A test with one set of values.

    Args:
        module: dotted, with ``tests``; for a transcript the module that plays it.
        name: of the function; of the transcript's file.
        place: of its set of values.
        drawn: Hypothesis draws its values.
    """

    module: str
    name: str
    place: int
    drawn: bool

    def __call__(self) -> None:
        """Run it.

        Raises:
            BaseException: whatever the test raises when it fails.
        """
        module = importlib.import_module(self.module)
        _clear_caches()
        if self.module == _TRANSCRIPTS:
            text = (_OF_INCIDENTS / self.name).read_text()
            assert module.play(text) == text, f"{self.name}: the policies answer otherwise"
            return
        function, sets = _cases(module)[self.name]
        with ExitStack() as stack:
            values = dict(sets[self.place])
            for name in inspect.signature(function).parameters.keys() - values.keys():
                values[name] = _fixture(module, name, self.name, stack)
            function(**values)

    def __str__(self) -> str:
        return f"{self.module}::{self.name}" + (f"[{self.place}]" if self.place else "")


@dataclass(frozen=True)
class Reach:
    """What a test reaches.

    Args:
        lines: modules, dotted below outlast, and the first lines of statements in their functions.
        seconds: of the processor.
    """

    lines: Lines
    seconds: float


def tests_of(capability: str) -> list[Test]:
    """Return all tests for a capability's policies, and import their modules."""
    found = []
    folder = ROOT / "tests" / capability
    for path in sorted([*folder.glob("policy/test_*.py"), *folder.glob("test_policy*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name)
        found += [
            Test(name, test, place, "@given" in inspect.getsource(function))
            for test, (function, sets) in _cases(module).items()
            for place in range(len(sets))
        ]
    importlib.import_module(_TRANSCRIPTS)
    transcripts = sorted(_OF_INCIDENTS.glob("*.txt"))
    return found + [Test(_TRANSCRIPTS, path.name, 0, False) for path in transcripts]


@cache
def _cases(module: ModuleType) -> _Cases:
    """Return the tests of a module that can be called from here, each with its sets of values."""
    found: _Cases = {}
    for name, test in vars(module).items():
        if not (name.startswith("test_") and inspect.isfunction(test) and test.__module__ == module.__name__):
            continue
        marks = {mark.name: mark for mark in getattr(test, "pytestmark", ())}
        sets = _sets(test)
        fixtures = inspect.signature(test).parameters.keys() - sets[0].keys()
        if marks.keys() <= {"parametrize", "hypothesis"} and all(_provides(module, one) for one in fixtures):
            found[name] = (test, sets)
    return found


def _sets(test: Callable[..., None]) -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            keys = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
            tuples = [_values(row, len(keys)) for row in rows]
            sets = [{**one, **dict(zip(keys, row, strict=True))} for row in tuples for one in sets]
    return sets


def _values(row: Any, number: int) -> tuple[Any, ...]:
    """Return the values of a row of a table, which may be a ``pytest.param``."""
    if isinstance(row, type(pytest.param())):
        return tuple(row.values)
    return tuple(row) if number > 1 else (row,)


def _provides(module: ModuleType, name: str) -> bool:
    if name in ("seed", "tmp_path", "monkeypatch"):
        return True
    made = _own_fixture(module, name)
    return made is not None and not inspect.signature(made).parameters


def _own_fixture(module: ModuleType, name: str) -> Callable[[], Any] | None:
    """Return the function behind a fixture of a module, if there is one."""
    made: Any = getattr(module, name, None)
    found = inspect.unwrap(made) if type(made).__name__ == "FixtureFunctionDefinition" else None
    return found if inspect.isfunction(found) and not inspect.isgeneratorfunction(found) else None


def _fixture(module: ModuleType, name: str, test: str, stack: ExitStack) -> object:
    if name == "seed":
        path = f"{module.__name__.replace('.', '/')}.py"
        return random.Random(f"0:{path}::{test}").randrange(2**32)  # as in tests/conftest.py
    if name == "tmp_path":
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
    if name == "monkeypatch":
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        return patch
    made = _own_fixture(module, name)
    assert made is not None
    return made()


def _clear_caches() -> None:
    """Forget what functions have cached, so that a test reaches the same lines after any other test."""
    for name, module in list(sys.modules.items()):
        if name.startswith("outlast."):
            for value in vars(module).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


class _Noting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads policies that note the lines that run."""

    def __init__(self) -> None:
        self.hits: set[tuple[str, int]] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a policy."""
        del path, target
        file = POLICIES.joinpath(*fullname.split(".")[1:]).with_suffix(".py")
        if not fullname.startswith("outlast.") or "policy" not in fullname.split(".") or not file.exists():
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(file))

    def exec_module(self, module: ModuleType) -> None:
        """Run the source with its notes."""
        assert module.__spec__ is not None
        module.__file__ = module.__spec__.origin
        module.__dict__["__hit__"] = self.hits.add
        source = noted(Path(str(module.__file__)).read_text(), module.__name__.removeprefix("outlast."))
        exec(compile(source, str(module.__file__), "exec"), module.__dict__)


def reaches(capability: str) -> tuple[dict[Test, Reach], Lines]:
    """Run each test; return what it reaches, and what is reached when the modules are imported.

    Nothing of outlast must have been imported. This process is of no use for mutants afterwards.

    Raises:
        SystemExit: a test fails; nothing can be said of mutants then.
    """
    noting = _Noting()
    sys.meta_path.insert(0, noting)
    tests = tests_of(capability)
    at_import = frozenset(noting.hits)
    found = {}
    for test in tests:
        noting.hits.clear()
        began = time.process_time()
        try:
            test()
        except BaseException as error:
            raise SystemExit(f"{test} fails without any change: {type(error).__name__}: {error}") from error
        found[test] = Reach(frozenset(noting.hits), time.process_time() - began)
    return found, at_import


def chosen(reach: dict[Test, Reach], module: str, line: int | None) -> list[Test]:
    """Return the tests that can find a change: those with drawn values last, else the quickest first.

    Args:
        reach: of each test.
        module: the changed one, dotted below outlast.
        line: of the changed statement; None: it runs when the module is imported. Then those that import the
            module may notice it: tests, and other policies, which tests may reach. Its own tests go first.
    """
    if line is not None:
        found = [test for test, one in reach.items() if (module, line) in one.lines]
        return sorted(found, key=lambda test: (test.drawn, reach[test].seconds))
    around = {module, *_importers(module, POLICIES)}
    own = {f"tests.{name}" for name in _importers(module, ROOT / "tests")}
    found = [
        test
        for test, one in reach.items()
        if test.module in own or around & {where for where, _ in one.lines}
    ]
    return sorted(found, key=lambda test: (test.module not in own, test.drawn, reach[test].seconds))


@cache
def _importers(module: str, folder: Path) -> frozenset[str]:
    """Return the modules in a folder that import a policy, dotted below the folder."""
    return frozenset(
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in [*folder.glob("*/policy/*.py"), *folder.glob("*/*policy*.py")]
        if f"outlast.{module} import" in path.read_text()
    )
