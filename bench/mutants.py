"""mutants: whether the tests of the deciders find small changes of the deciders.

Each mutant (bench/mutation.py) replaces its module in a fork of this process, which then runs
the module's own fast tests, without pytest, which would take longer to start than the tests take. Property
tests run only for mutants that other tests did not find, with the same draws each time.

A mutant that passes has survived: a test is missing, or the change has no effect. bench/mutants_explained.txt
explains the second kind, one line each: module, name of the mutant and reason, separated by " | ".
An explanation without a survivor is an error, too.

    python bench/mutants.py                                        all policies
    python bench/mutants.py recovery hang.policy.timeouts          a capability, a module
    python bench/mutants.py recovery.policy.job --list             name the mutants, and run none
    python bench/mutants.py recovery.policy.job --only next_generation   only these
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "bench")]

import hypothesis.strategies  # noqa: E402 - before the fork: every mutant needs both
import pytest  # noqa: E402, F401
from mutation import Mutant, mutants  # noqa: E402

hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("mutants")
EXPLAINED = ROOT / "bench" / "mutants_explained.txt"
SOURCE = ROOT / "src" / "outlast"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.glob("*/policy/*.py")
    if path.stem != "__init__"
)
_LADDER = tuple(
    f"recovery.policy.test_{name}"
    for name in ("actions", "repeated_faults", "node_failures", "escalation", "job", "job_state")
)
_RERUN = tuple(
    f"rerun.policy.test_{name}"
    for name in ("machine", "machine_edges", "machine_accused", "machine_bounds", "options")
)
# Tests of a module beside those that carry its name: tests/CAPABILITY/policy/test_NAME*.py.
ALSO = {
    **{f"stragglers.policy.{name}": ("stragglers.policy.test_detector",) for name in ("rows", "window")},
    **{f"recovery.policy.{name}": _LADDER for name in ("escalation", "job", "actions", "repeated_faults")},
    **{f"rerun.policy.{name}": _RERUN for name in ("machine", "evidence", "incident", "options")},
}
SCENARIOS = {  # transcripts that belong to the tests of a module
    f"rerun.policy.{name}": "rerun-*.txt" for name in ("machine", "evidence", "incident", "options")
}
_NOTHING = 5  # exit status: no tests were found
_GRACE = 20.0  # seconds beyond a multiple of what the tests take without a change


@dataclass(frozen=True)
class Outcome:
    """The result of a mutant: killed, survived, timeout."""

    mutant: Mutant
    word: str
    seconds: float


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a changed source instead of a module."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the one module."""
        del path, target
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        module.__file__ = str(self._path)
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def path_of(module: str) -> Path:
    """Return the source of a policy."""
    return SOURCE / f"{module.replace('.', '/')}.py"


def tests_of(module: str) -> list[str]:
    """Return the tests of a policy, dotted below ``tests``; none if no test has its name."""
    capability, _, name = module.split(".")
    folder = ROOT / "tests" / capability / "policy"
    own = [f"{capability}.policy.{path.stem}" for path in sorted(folder.glob(f"test_{name}*.py"))]
    return list(dict.fromkeys([*own, *ALSO.get(module, ())]))


def run(module: str, source: str, limit: float, drawn: bool = False) -> tuple[str, float]:
    """Run a module's tests in a fork with another source; return the result, and seconds.

    Args:
        module: dotted below outlast.
        source: instead of its own.
        limit: seconds.
        drawn: the properties, and not the other tests.
    """
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run_tests(module, source, drawn)
    while time.monotonic() - began < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == _NOTHING:
                raise SystemExit(f"no tests were found for {module}: {tests_of(module)}")
            return ("survived" if code == 0 else "killed"), time.monotonic() - began
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timeout", time.monotonic() - began


def _run_tests(module: str, source: str, drawn: bool) -> None:
    """Run the tests in this process, and end it: status 0 when all pass."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.meta_path.insert(0, _Planted(f"outlast.{module}", path_of(module), source))
    code, count = 1, 0
    try:
        for name in tests_of(module):
            for test, values in _tests(importlib.import_module(f"tests.{name}"), drawn):
                test(**values)
                count += 1
        if module in SCENARIOS and not drawn:
            _play(SCENARIOS[module])
        code = 0 if count or drawn else _NOTHING
    finally:
        os._exit(code)


def _play(pattern: str) -> None:
    """Play transcripts.

    Raises:
        ValueError: the answers differ.
    """
    play = importlib.import_module("tests.simulation.transcript").play
    for path in sorted((ROOT / "tests" / "scenarios").glob(pattern)):
        text = path.read_text()
        if play(text) != text:
            raise ValueError(f"{path.name}: the deciders answer otherwise")


def _tests(module: ModuleType, drawn: bool) -> Iterator[tuple[Callable[..., None], dict[str, object]]]:
    """Yield the tests of a module without fixtures that draw values, or do not, with each set of values."""
    for name, test in vars(module).items():
        if not name.startswith("test_") or drawn is not ("@given" in inspect.getsource(test)):
            continue
        sets: list[dict[str, object]] = [{}]
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "parametrize":
                names, rows = mark.args
                keys = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
                tuples = [row if len(keys) > 1 else (row,) for row in rows]
                sets = [{**one, **dict(zip(keys, row, strict=True))} for row in tuples for one in sets]
        if inspect.signature(test).parameters.keys() == sets[0].keys():
            yield from ((test, values) for values in sets)


def explained() -> dict[tuple[str, str], str]:
    """Return the explanations of mutants without effect, by module and name."""
    found: dict[tuple[str, str], str] = {}
    for line in EXPLAINED.read_text().splitlines() if EXPLAINED.exists() else ():
        if line.strip() and not line.startswith("#"):
            module, name, reason = line.split(" | ")
            found[module, name] = reason
    return found


def judge(module: str, chosen: list[Mutant], limit: float) -> Iterator[Outcome]:
    """Yield the result of each mutant of a module."""
    for mutant in chosen:
        word, seconds = run(module, mutant.source, limit)
        if word == "survived":
            word, more = run(module, mutant.source, limit, drawn=True)
            seconds += more
        yield Outcome(mutant, word, seconds)


def _asked(module: str, words: list[str]) -> bool:
    return not words or any(module == word or module.startswith(f"{word}.") for word in words)


def main() -> int:
    """Run the chosen mutants; return 1 if one survived without an explanation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="hang, hang.policy.timeouts ...")
    parser.add_argument("--list", action="store_true", help="name the mutants, and run none")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name holds a text")
    parser.add_argument("--out", metavar="FILE", help="append JSON lines, one a mutant")
    given = parser.parse_args()
    asked = [one for one in MODULES if _asked(one, given.modules)]
    unknown = [word for word in given.modules if not any(_asked(one, [word]) for one in MODULES)]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(MODULES)}")
    bad = 0
    reasons = explained()
    print(f"{'module':<36} {'mutants':>7} {'killed':>7} {'explained':>9} {'survived':>8} {'seconds':>8}")
    for module in asked:
        if not tests_of(module):
            print(f"{module:<36} no tests that carry its name")
            bad += 1
            continue
        source = path_of(module).read_text()
        chosen = [one for one in mutants(source) if given.only in one.name]
        if given.list:
            print("\n".join(f"{module} | {one.name} | line {one.line}" for one in chosen))
            continue
        plain, seconds = run(module, source, 600.0)
        drawn, more = run(module, source, 600.0, drawn=True)
        if (plain, drawn) != ("survived", "survived"):
            raise SystemExit(f"{module}: its tests fail without any change; nothing can be said of mutants")
        mine = {name: why for (where, name), why in reasons.items() if where == module}
        bad += _account(module, list(judge(module, chosen, 5 * (seconds + more) + _GRACE)), mine, given)
    return 1 if bad else 0


def _account(module: str, outcomes: list[Outcome], reasons: dict[str, str], given: argparse.Namespace) -> int:
    """Print the results of a module's mutants; return how many lack an explanation, or have a stale one."""
    survivors = {one.mutant.name: one for one in outcomes if one.word == "survived"}
    open_ones = [one for name, one in survivors.items() if name not in reasons]
    stale = [name for name in reasons if name not in survivors and given.only in name]
    killed, seconds = len(outcomes) - len(survivors), sum(one.seconds for one in outcomes)
    fine = len(survivors) - len(open_ones)
    print(
        f"{module:<36} {len(outcomes):>7} {killed:>7} {fine:>9} {len(open_ones):>8} {seconds:>8.1f}",
        flush=True,
    )
    for one in open_ones:
        print(f"  survived: {path_of(module).name}:{one.mutant.line} {module} | {one.mutant.name}")
    for name in stale:
        print(f"  stale explanation, no such survivor: {module} | {name}")
    if given.out:
        with open(given.out, "a") as file:
            for one in outcomes:
                words = {"module": module, "mutant": one.mutant.name, "outcome": one.word}
                file.write(json.dumps({**words, "seconds": round(one.seconds, 3)}) + "\n")
    return len(open_ones) + len(stale)


if __name__ == "__main__":
    sys.exit(main())
