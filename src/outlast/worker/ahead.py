"""Imports in a zygote what the ranks were seen to import, and finds what must be left to them.

The modules are imported in the order of the ranks, each under the environment that the script had made by
then. After each import it is checked what else the import has done. A module is left out if its import

- started threads that a fork loses, started processes, initialised CUDA, or left files or connections open;
- changed signal handlers, hooks of ``sys``, ``sys.path``, handlers of the root logger, the working folder,
  the umask, torch's default dtype or the start method of multiprocessing;
- seeded a random generator of the process;
- read a variable that differs from rank to rank or from generation to generation, such as ``RANK``;
- read a variable that the script sets between two imports of its package;
- raised, or left a process that does not survive a fork.

So is whatever imports it. A process in which something was left out has the side effects already: it serves
no forks, and the next one imports the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from outlast import settings
from outlast.ipc.processes import children_of
from outlast.worker.preloading import RANK_READERS, Preloading, importer_in, is_standard
from outlast.worker.surroundings import seeds, start_method, surroundings, umask

SURVIVE_FORKS = {  # native threads that may be lost in a fork, and why
    "jemalloc_bg_thd": "jemalloc stops and starts its own in handlers of pthread_atfork (pyarrow brings it)",
}
FIRST_START = 2.0  # seconds, in which ranks that do not import torch have begun
LOWEST_FOR = 10.0  # seconds at the lowest priority
SHARE = 0.25  # of one processor, from then on
_REST_AFTER, _LONGEST_REST = 0.01, 1.0  # seconds
_FORKS_WITHIN = 20.0
_LOWEST = 19
_CLASS_SHIFT, _IDLE_CLASS = 13, 3  # of ioprio_set
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # its number as a system call
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")


@dataclass(frozen=True)
class Plan:
    """What a zygote is to import ahead.

    Args:
        names: modules, each with the index of its environment.
        changes: what the script had changed in its environment, by index; None: removed.
        originals: variables that this zygote was started with other values of; None: unset.
        own: variables that differ from rank to rank or from generation to generation.
        progress: file in which the imports that have begun are kept.
        result: file for what was found.
    """

    names: Sequence[tuple[str, int]]
    changes: Sequence[Mapping[str, str | None]]
    originals: Mapping[str, str | None]
    own: frozenset[str]
    progress: str
    result: str

    @classmethod
    def read(cls, path: str) -> Plan:
        """Return the plan in a file that the agent wrote into its own folder."""
        told = json.loads(Path(path).read_text())
        told["names"] = [(name, change) for name, change in told["names"]]
        told["own"] = frozenset(told["own"])
        return cls(**told)

    def environment(self, base: Mapping[str, str], change: int) -> dict[str, str]:
        """Return what the script had made of its environment; ``base``: this zygote's."""
        found = {**base, **self.originals, **self.changes[change]}
        return {name: value for name, value in found.items() if value is not None}


class _Marks:
    """What an import may change in a process besides importing."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.native = set(os.listdir("/proc/self/task"))
        self.children = set(children_of(os.getpid()))
        torch = sys.modules.get("torch")
        self.cuda = torch is not None and torch.cuda.is_initialized()
        self.descriptors = _descriptors()
        self.settings: dict[str, Any] = {
            "sets signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
            "sets a hook of sys or threading": [sys.excepthook, sys.displayhook, threading.excepthook],
            "replaces a standard stream": [sys.stdin, sys.stdout, sys.stderr],
            "changes sys.path": list(sys.path),
            "adds a handler to the root logger": list(logging.getLogger().handlers),
            "changes the umask": umask(),
            "fixes the start method of multiprocessing": start_method(),
            **{f"changes {what}": value for what, value in surroundings().items()},
            **{f"seeds the generator of {whose}": state for whose, state in seeds().items()},
        }

    def troubles(self, before: _Marks) -> set[str]:
        """Return what an import did that a fork must not inherit."""
        native = {name_of(one) for one in self.native - before.native} - SURVIVE_FORKS.keys()
        names = sorted(one.name for one in self.threads - before.threads)
        found = {f"it starts the thread {name}" for name in names}
        if not names:
            found |= {f"it starts the native thread {name}" for name in native}
        if self.children - before.children:
            found.add("it starts a process")
        if self.cuda and not before.cuda:
            found.add("it initialises CUDA")
        opened = self.descriptors.items() - before.descriptors.items()
        found |= {f"it leaves {where} open" for _, where in opened}
        return found | {
            f"it {what}" for what, value in self.settings.items() if value != before.settings.get(what, value)
        }


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            where = os.readlink(f"/proc/self/fd/{number}")
            if where not in _HARMLESS:
                found[number] = where
    return found


def name_of(thread: str) -> str:
    """Return the name of a native thread of this process."""
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:  # it has ended
        return next(iter(SURVIVE_FORKS))


class Ahead(MetaPathFinder):
    """Imports what a plan says; finds no module itself.

    Args:
        plan: what to import.
        loaded: imports, and records what is needed to hide the modules.
    """

    def __init__(self, plan: Plan, loaded: Preloading) -> None:
        self._plan = plan
        self._loaded = loaded
        self._bad: dict[str, str] = {}
        self._imported_by: dict[str, set[str]] = {}
        self._stack: list[str] = []
        self._suspects: dict[str, str] = {}  # what an import may have done -> the module
        self._pid = os.getpid()
        self._progress = os.open(plan.progress, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._marks = _Marks()
        self._first: dict[str, int] = {}  # by package: the index of the environment of its first import
        self._checking = 0.0  # seconds of a processor

    def run(self) -> dict[str, str]:
        """Import everything; return what has to be left out, and why."""
        before, environment = set(sys.modules), settings.inherited()
        sys.meta_path.insert(0, self)
        self._loaded.observer = self
        seconds = time.process_time()
        try:
            with _silenced():
                self._import_all(environment)
        finally:
            self._loaded.observer = None
            sys.meta_path.remove(self)
            settings.replace_environment(environment)
            os.close(self._progress)
        seconds = time.process_time() - seconds - self._checking
        new = [name for name in sys.modules.keys() - before if not is_standard(name.partition(".")[0])]
        left_out = self._left_out(new)
        result = {"modules": len(new), "seconds": round(seconds, 3), "left_out": left_out}
        Path(self._plan.result).write_text(json.dumps(result))
        return left_out

    def _import_all(self, base: Mapping[str, str]) -> None:
        together, change = False, -1
        under: dict[str, str] = {}
        roots: list[tuple[str, int]] = []
        self._marks = _Marks()
        for name, needed in self._plan.names:
            if name in sys.modules:
                continue
            if needed != change:
                change, under = needed, self._plan.environment(base, needed)
                settings.replace_environment(under)
            self._import(name, together)
            together = True
            roots.append((name, change))
            for top, package in self._loaded.latest.items():
                if package.under is None:
                    package.under, self._first[top] = under, change
        for name, change in roots:
            self._compare(name, change)

    def _import(self, name: str, together: bool) -> None:
        self._stack = [name]
        self._suspects.clear()
        before = self._marks
        self._tell()
        try:
            self._loaded.load(name, together)
        except ModuleNotFoundError as error:
            if error.name != name:
                self._blame(name, f"it raises {type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - any module, which may even call sys.exit
            self._blame(name, f"it raises {type(error).__name__}: {error}")
        if os.getpid() != self._pid:  # a module has forked, and its child came this far
            os._exit(0)
        self._check(name)
        for trouble in sorted(self._marks.troubles(before)):
            self._blame(self._suspects.get(trouble, name), trouble)
        began = time.process_time()
        if not self._bad and not _forks():
            self._blame(name, f"a fork after its import does not end well within {_FORKS_WITHIN:.0f} s")
        self._checking += time.process_time() - began

    def _compare(self, root: str, change: int) -> None:
        """Blame an import that read what the script had changed since the first import of its package."""
        top = root.partition(".")[0]
        now, then = self._plan.changes[change], self._plan.changes[self._first.get(top, change)]
        differing = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}
        read = sorted(differing & self._loaded.reads_of(top))
        if read:
            self._blame(root, f"{top} reads {read[0]}, which the script sets after it has imported {top}")

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the names of the import system
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Note which module imports another one."""
        self._link(_body(sys._getframe(1)), fullname)
        return None

    def reads(self, variable: str, frame: FrameType | None) -> None:
        """Blame a module that reads what differs from rank to rank."""
        body = _body(frame)
        top = body.partition(".")[0]
        if top and not is_standard(top):
            self._loaded.read_by(top, variable)
        if variable not in self._plan.own:
            return
        reader = body or importer_in(frame) or self._stack[0]
        if reader in RANK_READERS or importer_in(frame) in RANK_READERS:
            return
        self._blame(reader, f"it reads {variable} when it is imported")

    def begins(self, name: str) -> None:
        """Note which imports are under way, for the agent."""
        self._stack.append(name)
        if name not in sys.modules:
            self._tell()

    def ends(self) -> None:
        """Note that one is over."""
        if len(self._stack) > 1:
            self._stack.pop()

    def imported(self, name: str, items: Sequence[str], by: FrameType, found: ModuleType, grew: bool) -> None:
        """Note which module imports which, and check what the import has done."""
        body = _body(by)
        self._link(body, name)
        for item in items:
            if f"{name}.{item}" in sys.modules:
                self._link(body, f"{name}.{item}")
            home = getattr(vars(found).get(item), "__module__", None)
            if isinstance(home, str):
                self._link(body, home)
        if grew and name in sys.modules:
            self._tell()
            self._check(name)

    def _link(self, importer: str, imported: str) -> None:
        if importer and importer != imported:
            self._imported_by.setdefault(imported, set()).add(importer)

    def _check(self, name: str) -> None:
        """Note what has changed during an import; a file, say, may be open for a moment only."""
        began = time.process_time()
        now = _Marks()
        for trouble in now.troubles(self._marks):
            self._suspects.setdefault(trouble, name)
        self._marks = now
        self._checking += time.process_time() - began

    def _blame(self, name: str, why: str) -> None:
        self._bad.setdefault(name, why)

    def _tell(self) -> None:
        text = "\n".join(self._stack).encode()[-4000:]
        os.ftruncate(self._progress, 0)
        os.pwrite(self._progress, text, 0)

    def _left_out(self, new: Sequence[str]) -> dict[str, str]:
        """Return the modules that were blamed, those that import them, and those inside of them."""
        found = dict(self._bad)
        todo = list(found)
        while todo:
            name = todo.pop()
            why = f"it imports {name}" if name in self._bad else found[name]
            inside = {one for one in new if one.startswith(f"{name}.")}
            for one in self._imported_by.get(name, set()) | inside:
                if one not in found:
                    found[one] = why
                    todo.append(one)
        return found


def _body(frame: FrameType | None) -> str:
    """Return the innermost module whose body is being executed, "" when there is none."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__", ""))
            if name != "__main__":
                return name
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Send to /dev/null what modules print when they are imported: the ranks have printed it."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, one in enumerate(kept, 1):
            os.dup2(one, number)
        for one in (*kept, nowhere):
            os.close(one)


def _forks() -> bool:
    """Return whether a fork of this process ends as it should."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    deadline = time.monotonic() + _FORKS_WITHIN
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


class _Rests(MetaPathFinder):
    """Rests before imports, so that this process uses a share of one processor; finds no module itself.

    Args:
        usual: the priority to go back to after a while; None: it is the present one.
        at_most: seconds after which it does not rest any more.
    """

    def __init__(self, usual: int | None, at_most: float) -> None:
        self.usual = usual
        now = time.monotonic()
        self._until, self._end = now + LOWEST_FOR, now + at_most
        self._rested = time.process_time()

    def find_spec(
        self,
        fullname: str,  # noqa: ARG002 - the names of the import system
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Rest."""
        if time.monotonic() > self._end:
            if self._end:
                self.end()
            return None
        if self.usual is not None:
            if time.monotonic() > self._until:
                self.restore()
            return None
        used = time.process_time() - self._rested
        if used > _REST_AFTER:
            time.sleep(min(_LONGEST_REST, used * (1 / SHARE - 1)))
            self._rested = time.process_time()
        return None

    def restore(self) -> None:
        """Run at the usual priority."""
        if self.usual is not None:
            os.setpriority(os.PRIO_PROCESS, 0, self.usual)
            self.usual, self._rested = None, time.process_time()

    def end(self) -> None:
        """Go on as usual."""
        self._end = 0.0
        self.restore()
        _set_io_class(0)


@contextlib.contextmanager
def behind_the_ranks(at_most: float = math.inf) -> Iterator[None]:
    """Import at the lowest priority of processor and disk; the end restores them.

    A process of the lowest priority gets nothing where ranks keep every processor busy, so that after some
    seconds it rests between imports instead. So does a process that is not privileged: it could not raise its
    priority again, and forks inherit it.

    Args:
        at_most: seconds after which imports go on as usual.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    rests = _Rests(usual if _may_raise_priority(usual) else None, at_most)
    _set_io_class(_IDLE_CLASS)
    if rests.usual is not None:
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    sys.meta_path.insert(0, rests)
    try:
        yield
    finally:
        sys.meta_path.remove(rests)
        rests.end()


def _may_raise_priority(usual: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
            os.setpriority(os.PRIO_PROCESS, 0, usual)
        except OSError:
            os._exit(1)
        os._exit(0)
    return not os.waitpid(pid, 0)[1]


def _set_io_class(which: int) -> None:
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, which << _CLASS_SHIFT)
