"""mutants: whether the tests of the policies find small changes of the policies.

Each mutant (bench/mutation.py) runs in a fork of a process that has imported the tests of its capability
(bench/mutant_tests.py). Another process has run each test once before, with a note before every statement,
so that it is known which statements a test reaches. A change in a function is put into that function
(bench/planting.py); any other change needs the modules to be imported again. Only tests that reach the
changed statement run: quick ones that found the last mutants of the module first, then the quickest,
property tests last, with the same draws each time. Tests that do not fit into the budget of seconds are left
out. A change of what is made at the import, such as a constant, may be noticed by whoever imports the module.

A mutant that passes has survived: a test is missing, or the change has no effect that a user could notice.
"Not reached" says that no test runs the changed statement. Survivors are listed, and no error.

    python bench/mutants.py                                        all policies
    python bench/mutants.py recovery hang.policy.timeouts          a capability, a module
    python bench/mutants.py recovery.policy.job --list             name the mutants, and run none
    python bench/mutants.py recovery.policy.job --only next_generation   only these
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import pickle
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "bench")]

from hypothesis import Phase, settings  # noqa: E402 - before the fork: every mutant needs it
from mutant_tests import Lines, Reach, Test, chosen, reaches, tests_of  # noqa: E402
from mutation import Mutant, mutants  # noqa: E402
from planting import Planted, changed_functions, functions_of, put  # noqa: E402

settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)
settings.load_profile("mutants")
SOURCE = ROOT / "src" / "outlast"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for pattern in ("*/policy/*.py", "*/policy.py")
    for path in SOURCE.glob(pattern)
    if path.stem != "__init__"
)
_PASSED, _NOT_REACHED, _FAILED = 0, 3, 4  # exit statuses
_GRACE = 2  # seconds of the processor beyond what the tests take without a change
_MEMORY = 4 << 30  # bytes that a mutant may have
_FIRST, _QUICK = 3, 0.2  # tests that found the last mutants, of so many seconds at most, run first


@dataclass(frozen=True)
class Outcome:
    """The result of a mutant.

    Args:
        word: killed, survived, not reached.
        by: the test that found it; limit, if it took too long or too much memory.
        seconds: of the processor.
    """

    mutant: Mutant
    word: str
    by: str
    seconds: float

    @property
    def lives(self) -> bool:
        """Return whether no test found it."""
        return self.word != "killed"


@dataclass(frozen=True)
class _Target:
    module: str
    path: Path
    plain: CodeType
    functions: dict[str, FunctionType]


class Judge:
    """Runs the mutants of a capability's policies.

    Args:
        capability: the folder of the policies.
        budget: seconds of the processor that the tests of a mutant may take without a change.
    """

    def __init__(self, capability: str, budget: float) -> None:
        self._reach, self._at_import = _in_a_fork(capability)
        self._budget = budget
        self._finders: dict[str, None] = {}  # quick tests that found a mutant, the last one last
        self._quick = {str(test) for test, one in self._reach.items() if one.seconds < _QUICK}
        tests_of(capability)
        gc.collect()

    def outcomes(self, module: str, jobs: int, only: str) -> Iterator[Outcome]:
        """Yield the result of each mutant of a module whose name holds a text, as they come."""
        path = path_of(module)
        plain = compile(ast.unparse(ast.parse(path.read_text())), "", "exec", dont_inherit=True)
        target = _Target(module, path, plain, functions_of(path))
        gc.freeze()
        running: dict[int, tuple[Mutant, int]] = {}
        for mutant in mutants(path.read_text()):
            if only not in mutant.name:
                continue
            while len(running) >= jobs:
                yield self._ended(running)
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._judge(target, mutant, write)
            os.close(write)
            running[pid] = (mutant, read)
        while running:
            yield self._ended(running)

    def _judge(self, target: _Target, mutant: Mutant, write: int) -> None:
        """Run the tests in this process, and end it: status 0 when all pass."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        status, by = _FAILED, "import"
        try:
            source, module = mutant.source, target.module
            changed = changed_functions(
                target.plain, compile(source, str(target.path), "exec", dont_inherit=True)
            )
            at_once = changed is not None and (module, mutant.line) not in self._at_import
            at_once = at_once and put(changed or {}, target.functions)
            tests = self._affordable(chosen(self._reach, module, mutant.line if at_once else None))
            seconds = sum(self._reach[test].seconds for test in tests)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + _GRACE,) * 2)
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY,) * 2)
            if not at_once:
                for one in [one for one in sys.modules if one.split(".")[0] in ("outlast", "tests")]:
                    del sys.modules[one]
                sys.meta_path.insert(0, Planted(f"outlast.{module}", target.path, source))
            for test in tests:
                by = str(test)
                test()
            status = _PASSED if tests else _NOT_REACHED
        finally:
            if status == _FAILED:
                os.write(write, by.encode())
            os._exit(status)

    def _affordable(self, tests: list[Test]) -> list[Test]:
        """Return the tests that fit into the budget, those that found the last mutants first."""
        first = list(self._finders)[-_FIRST:]
        left = self._budget
        found: list[Test] = []
        for test in sorted(tests, key=lambda test: str(test) not in first):
            if not found or self._reach[test].seconds <= left:
                left -= self._reach[test].seconds
                found.append(test)
        return found

    def _ended(self, running: dict[int, tuple[Mutant, int]]) -> Outcome:
        """Wait for one of the processes, and return the result of its mutant."""
        pid, status, usage = os.wait3(0)
        mutant, read = running.pop(pid)
        with open(read, "rb") as pipe:
            by = pipe.read().decode()
        if by in self._quick:
            self._finders.pop(by, None)
            self._finders[by] = None
        code = os.waitstatus_to_exitcode(status)
        word = {_PASSED: "survived", _NOT_REACHED: "not reached"}.get(code, "killed")
        return Outcome(mutant, word, by or ("limit" if code < 0 else ""), usage.ru_utime + usage.ru_stime)


def _in_a_fork(capability: str) -> tuple[dict[Test, Reach], Lines]:
    """Return what the tests of a capability reach; a process of its own runs them.

    Raises:
        SystemExit: a test fails.
    """
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if pid == 0:
            try:
                pickle.dump(reaches(capability), file)
                file.flush()
                os._exit(0)
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"{capability}: nothing can be said of mutants")
        file.seek(0)
        found: tuple[dict[Test, Reach], Lines] = pickle.load(file)
        return found


def path_of(module: str) -> Path:
    """Return the source of a policy."""
    return SOURCE / f"{module.replace('.', '/')}.py"


def _asked(module: str, words: list[str]) -> bool:
    return not words or any(module == word or module.startswith(f"{word}.") for word in words)


def main() -> int:
    """Run the chosen mutants; return 1 if the tests of one cannot be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="hang, hang.policy.timeouts ...")
    parser.add_argument("--list", action="store_true", help="name the mutants, and run none")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name holds a text")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--out", metavar="FILE", help="append JSON lines, one a mutant")
    given = parser.parse_args()
    asked = [one for one in MODULES if _asked(one, given.modules)]
    unknown = [word for word in given.modules if not any(_asked(one, [word]) for one in MODULES)]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(MODULES)}")
    if given.list:
        for module in asked:
            for mutant in mutants(path_of(module).read_text()):
                if given.only in mutant.name:
                    print(f"{module} | {mutant.name} | line {mutant.line}")
        return 0
    print(f"{'module':<36} {'mutants':>7} {'killed':>7} {'survived':>8} {'seconds':>8}")
    bad = 0
    for capability in dict.fromkeys(module.split(".")[0] for module in asked):
        sys.stdout.flush()
        pid = os.fork()  # a process for each: what one imports and caches is nothing to the next
        if pid == 0:
            os._exit(_run(capability, [one for one in asked if one.startswith(f"{capability}.")], given))
        bad |= os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 1 if bad else 0


def _run(capability: str, modules: list[str], given: argparse.Namespace) -> int:
    """Run the mutants of some modules of a capability; return 1 if its tests cannot be run."""
    try:
        judge = Judge(capability, given.budget)
        for module in modules:
            _account(module, list(judge.outcomes(module, given.jobs, given.only)), given)
        return 0
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()


def _account(module: str, outcomes: list[Outcome], given: argparse.Namespace) -> None:
    """Print the results of a module's mutants."""
    survivors = sorted((one for one in outcomes if one.lives), key=lambda one: one.mutant.line)
    killed, seconds = len(outcomes) - len(survivors), sum(one.seconds for one in outcomes)
    print(f"{module:<36} {len(outcomes):>7} {killed:>7} {len(survivors):>8} {seconds:>8.1f}", flush=True)
    for one in survivors:
        print(f"  {one.word}: {path_of(module).name}:{one.mutant.line} {module} | {one.mutant.name}")
    if given.out:
        with open(given.out, "a") as file:
            for one in outcomes:
                words = {"module": module, "mutant": one.mutant.name, "outcome": one.word, "by": one.by}
                file.write(json.dumps({**words, "seconds": round(one.seconds, 3)}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
