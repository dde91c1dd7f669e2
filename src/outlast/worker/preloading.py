"""Modules that the zygote imports ahead, and how a forked rank gets them when its script imports them.

Many libraries read the environment when they are imported. A script that sets ``OMP_NUM_THREADS`` and then
imports torch must see its effect, although the zygote has imported torch already. Therefore the zygote
records for each package which variables were read during its import, which other packages it needed, and
which warning filters and variables it set. In the fork all of that is hidden: ``sys.modules``, the filters
and the environment are those of a new interpreter. At the first import of a hidden package, the variables
that it has read are compared with those under which the zygote imported it. If all are equal, the modules
are put back, which takes no time.

If not, the rank restarts as a new interpreter. The process keeps its pid, its streams and its place with
the agent. Its program is replaced (execve), with the environment, working directory, signals and umask that
the script started with, so that only what the first attempt wrote and sent remains. The agent is told which
variables the script set, so that the next zygote imports under them.

Python code reads variables through ``os.environ``, so these reads are known exactly. Reads by compiled code
are not visible; a package with compiled parts is compared on all variables with certain prefixes.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from outlast import settings
from outlast.hang.worker import heartbeat
from outlast.ipc.control import Reporter
from outlast.ipc.processes import children_of
from outlast.observe.policy import codec
from outlast.recovery.policy.events import StartedAgain

# Read by compiled code when it is loaded, or at its first use, which may happen before the fork.
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "TBB_", "NPY_")
# The same, of torch and of packages that need torch.
_NATIVE_TORCH = (
    *("TORCH_", "PYTORCH_", "ATEN_", "C10_", "CAFFE2_", "DNNL_", "ONEDNN_", "XNNPACK_", "FBGEMM_", "KINETO_"),
)
# Read when a process group is made, which is after the fork.
_LATER = ("TORCH_NCCL_", "TORCH_GLOO_")
# Read at each use; the import only sets a default.
_READ_AGAIN = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})


@dataclass
class Package:
    """The modules of one package that were imported with one preloaded name.

    Args:
        name: the package, for messages.
        modules: by name.
        reads: variables that its Python code read during the import.
        needs: keys of the packages that it imported.
        native: it has compiled parts.
        needs_torch: it is torch, or has imported it.
        sets: variables that appeared in the environment meanwhile.
        filters: warning filters that appeared meanwhile.
    """

    name: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    needs: set[tuple[int, str]] = field(default_factory=set)
    native: bool = False
    needs_torch: bool = False
    sets: dict[str, str] = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)


class _Recorded(dict[bytes, bytes]):
    """The storage of ``os.environ``; reports which variable is read, and by whom."""

    def __init__(self, content: Mapping[bytes, bytes], note: Callable[[str], None]) -> None:
        super().__init__(content)
        self._note = note

    def __getitem__(self, key: bytes) -> bytes:
        self._note(os.fsdecode(key))
        return super().__getitem__(key)


class _Watched(dict[bytes, bytes]):
    """The storage of ``os.environ``; reports each variable that is set."""

    def __init__(self, content: Mapping[bytes, bytes], note: Callable[[str, str], None]) -> None:
        super().__init__(content)
        self._note = note

    def __setitem__(self, key: bytes, value: bytes) -> None:
        super().__setitem__(key, value)
        self._note(os.fsdecode(key), os.fsdecode(value))


class Preloading:
    """Imports modules and records what is needed to hide them; used once, in the zygote.

    Args:
        before: the names in ``sys.modules`` after the start of the interpreter.
    """

    def __init__(self, before: Iterable[str]) -> None:
        self._before = frozenset(before)
        self._stage = 0
        self._reads: set[tuple[int, str, str]] = set()
        self._imports: set[tuple[int, str, str]] = set()
        self._import = builtins.__import__
        self.environment = settings.inherited()
        self.filters = list(warnings.filters)
        self.packages: dict[tuple[int, str], Package] = {}
        self._collect()

    def load(self, name: str) -> None:
        """Import one module."""
        self._stage += 1
        variables, filters = settings.inherited(), list(warnings.filters)
        settings.keep_variables_in(_Recorded(settings.variables(), self._read))
        builtins.__import__ = self._imported
        try:
            importlib.import_module(name)
        finally:
            builtins.__import__ = self._import
            settings.keep_variables_in(dict(settings.variables()))
        self._collect()
        top = name.partition(".")[0]
        mine = self.packages.setdefault((self._stage, top), Package(name))
        mine.sets = {key: value for key, value in settings.inherited().items() if variables.get(key) != value}
        mine.filters = [one for one in warnings.filters if one not in filters]

    def _read(self, variable: str) -> None:
        reader = _importer(sys._getframe(2))
        if reader:
            self._reads.add((self._stage, reader.partition(".")[0], variable))

    def _imported(
        self,
        name: str,
        globals: Any = None,  # noqa: A002 - the names of __import__
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        found = self._import(name, globals, locals, fromlist, level)
        if level == 0 and globals is not None:
            self._imports.add((self._stage, str(globals.get("__name__", "")), name))
        return found

    def _collect(self) -> None:
        """Record what the latest import has added to ``sys.modules``."""
        known = self._before.union(*(one.modules for one in self.packages.values()))
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            if name not in known and not _is_standard(top):
                package = self.packages.setdefault((self._stage, top), Package(name if self._stage else top))
                package.modules[name] = module
                package.native |= isinstance(getattr(_spec_of(module), "loader", None), ExtensionFileLoader)

    def finish(self) -> None:
        """Assign reads of variables to packages, and find the packages that each one needs."""
        homes = {name: key for key, package in self.packages.items() for name in package.modules}
        for stage, top, variable in self._reads:
            key = (stage, top)
            if key not in self.packages:  # a package of an earlier stage went on with its import
                key = max((one for one in self.packages if one[1] == top), default=key)
            if key in self.packages:
                self.packages[key].reads.add(variable)
        for stage, importer, imported in self._imports:
            mine, theirs = homes.get(importer), homes.get(imported)
            if mine is not None and theirs is not None and mine != theirs and mine[0] == stage:
                self.packages[mine].needs.add(theirs)
        for name, mine in homes.items():
            parent = homes.get(name.rpartition(".")[0])
            if parent is not None and parent != mine:
                self.packages[mine].needs.add(parent)
        for key, package in self.packages.items():
            package.needs_torch = any(top == "torch" for _, top in (key, *package.needs))


def _is_standard(top: str) -> bool:
    return top in sys.stdlib_module_names or top in ("__main__", "__mp_main__")


def _importer(frame: Any) -> str:
    """Return the innermost module on the stack that is not of the standard library, "" when all are."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name and not _is_standard(name.partition(".")[0]):
            return name
        frame = frame.f_back
    return ""


def _spec_of(module: Any) -> ModuleSpec | None:
    try:
        found = module.__spec__
    except Exception:  # noqa: BLE001 - some objects in sys.modules are no modules and answer with anything
        return None
    return found if isinstance(found, ModuleSpec) else None


@dataclass(frozen=True)
class Difference:
    """Why hidden modules cannot be used.

    Args:
        package: that the script imports, or has imported.
        variables: what the script has set, None: removed; empty where it would import another package.
        elsewhere: file of the package that it would import.
    """

    package: str
    variables: Mapping[str, str | None]
    elsewhere: str = ""

    def __str__(self) -> str:
        if self.elsewhere:
            return f"the script changed sys.path and imports {self.package} from {self.elsewhere}"
        names = ", ".join(sorted(self.variables))
        return f"the script set {names}, which {self.package} reads when it is imported"


class Hidden(MetaPathFinder):
    """Hides preloaded modules, and puts them back package by package in a forked rank.

    The zygote hides them, once: removing 2,000 modules from ``sys.modules`` in each fork would copy their
    pages, which takes 15 ms of each restart on a busy host. A fork begins to serve them with :meth:`serve`.

    Args:
        preloaded: what the zygote has recorded.
    """

    def __init__(self, preloaded: Preloading) -> None:
        self._packages = dict(preloaded.packages)
        self._expected: Mapping[str, str] = {}
        self._differs: Callable[[Difference], None] = lambda _: None
        self._filters = preloaded.filters
        self._lock = threading.RLock()
        self._homes = {name: key for key, one in self._packages.items() for name in one.modules}
        self._begun: set[str] = set()  # packages of which a part has been put back
        self._asked = False
        self._attributes: dict[tuple[int, str], list[tuple[ModuleType, str, ModuleType]]] = {}

    def hide(self) -> None:
        """Make ``sys.modules`` that of a new interpreter; nothing may be imported before :meth:`serve`."""
        for key, package in self._packages.items():
            # Names that lie next to each other: a fork that puts modules back writes to the page of each.
            package.modules = {f"{name}."[:-1]: module for name, module in package.modules.items()}
            kept = self._attributes[key] = []
            for name, module in package.modules.items():
                sys.modules.pop(name, None)
                above, _, child = name.rpartition(".")
                home = self._homes.get(above)
                if home is not None and home != key:
                    parent = self._packages[home].modules[above]
                    if vars(parent).get(child) is module:
                        delattr(parent, child)
                        kept.append((parent, child, module))

    def module(self, name: str) -> ModuleType | None:
        """Return a hidden module without unhiding it; None: it was not preloaded."""
        key = self._homes.get(name)
        return None if key is None else self._packages[key].modules[name]

    def serve(self, expected: Mapping[str, str], differs: Callable[[Difference], None]) -> None:
        """Reset the warning filters, and serve imports of hidden modules.

        Args:
            expected: the environment under which the modules were imported.
            differs: called with the first difference, on the importing thread; may not return.
        """
        self._expected, self._differs = expected, differs
        _set_filters(self._filters)
        sys.meta_path.insert(0, self)
        settings.keep_variables_in(_Watched(settings.variables(), self._set))

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the names of the import system
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec of a hidden module, which stays hidden until it is loaded."""
        key = self._homes.get(fullname)
        if key is None or key not in self._packages:
            return None
        module = self._packages[key].modules[fullname]
        real = _spec_of(module)
        loader = _Unhiding(self, fullname, module, real)
        found = ModuleSpec(fullname, loader, origin=None if real is None else real.origin)
        if real is not None:
            found.submodule_search_locations = real.submodule_search_locations
            found.has_location, found.cached = real.has_location, real.cached
        return found

    def put_back(self, fullname: str) -> None:
        """Unhide the package of a module, and all packages that it needs."""
        with self._lock:
            keys = list(self._closure(self._homes[fullname]))
            found = self._difference(fullname.partition(".")[0], keys)
            if found is not None:
                self._ask(found)
            for key in keys:
                package = self._packages.pop(key)
                sys.modules.update(package.modules)
                self._begun.add(key[1])
                for parent, child, module in self._attributes[key]:
                    setattr(parent, child, module)
                for name, value in package.sets.items():
                    settings.export({name: settings.inherited().get(name, value)})
                _set_filters([*package.filters, *warnings.filters])
            if not self._packages:
                self.give_up()

    def give_up(self) -> None:
        """Stop watching the environment."""
        self._asked = True
        with self._lock:
            settings.keep_variables_in(dict(settings.variables()))

    def _ask(self, found: Difference) -> None:
        if not self._asked:
            self._asked = True
            self._differs(found)

    def _closure(self, key: tuple[int, str]) -> Iterator[tuple[int, str]]:
        todo, seen = [key], {key}
        while todo:
            here = todo.pop()
            if here in self._packages:
                yield here
                fresh = self._packages[here].needs - seen
                seen |= fresh
                todo += fresh

    def _difference(self, name: str, keys: Iterable[tuple[int, str]]) -> Difference | None:
        here, native = settings.inherited(), _native_environment()
        changed: dict[str, str | None] = {}
        for key in keys:
            package = self._packages[key]
            for variable in package.reads - _READ_AGAIN:
                if here.get(variable) != self._expected.get(variable):
                    changed[variable] = here.get(variable)
            for variable in {*native, *self._expected} if package.native else ():
                known = native.get(variable)
                if _is_native(variable, package.needs_torch) and known != self._expected.get(variable):
                    changed[variable] = known
            elsewhere = self._found_elsewhere(key)
            if elsewhere:
                return Difference(key[1], {}, elsewhere)
        return Difference(name, changed) if changed else None

    def _found_elsewhere(self, key: tuple[int, str]) -> str:
        """Return the file of another package of this name on the script's path; "": there is none."""
        module = self._packages[key].modules.get(key[1])
        known = _spec_of(module)
        if known is None or not known.has_location:
            return ""
        with contextlib.suppress(ImportError, ValueError):
            found = PathFinder.find_spec(key[1])
            if found is not None and found.origin and found.origin != known.origin:
                return found.origin
        return ""

    def _set(self, variable: str, value: str) -> None:
        """Check a variable that the script sets after a package that reads it was imported."""
        if self._asked or variable in _READ_AGAIN or self._expected.get(variable) == value:
            return
        late = (one for key, one in self._packages.items() if key[1] in self._begun and variable in one.reads)
        package = next(late, None)
        if package is not None:
            self._ask(Difference(package.name, {variable: value}))


class _Unhiding(Loader):
    """Returns a hidden module when it is imported; otherwise it behaves as the real loader."""

    def __init__(self, hidden: Hidden, name: str, module: ModuleType, spec: ModuleSpec | None) -> None:
        self._hidden, self._name, self._module, self._spec = hidden, name, module, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(None if self._spec is None else self._spec.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - as above
        """Unhide the package."""
        if self._name not in sys.modules:
            self._hidden.put_back(self._name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec, which the import system has replaced; the module was executed in the zygote."""
        with contextlib.suppress(AttributeError):
            module.__spec__ = self._spec


def _is_native(variable: str, of_torch: bool) -> bool:
    prefixes = (*_NATIVE, *_NATIVE_TORCH) if of_torch else _NATIVE
    return variable.startswith(prefixes) and not variable.startswith(_LATER)


def _native_environment() -> dict[str, str]:
    """Return the environment that compiled code sees: ``os.putenv`` changes it and not ``os.environ``."""
    found = {}
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    for entry in itertools.takewhile(bool, (entries[at] for at in itertools.count()) if entries else ()):
        name, _, value = entry.partition(b"=")
        found[os.fsdecode(name)] = os.fsdecode(value)
    return found


def _set_filters(filters: Sequence[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():  # its entry and its end tell the C code that the filters have changed
        pass


_PROGRAM = Path(__file__).with_name("cold.py")


@dataclass(frozen=True)
class Beginning:
    """How this rank's script was started.

    Args:
        kind, target: the program.
        args: its arguments.
        environment: of the script at its start.
        stdout, stderr, stacks, heartbeat: of the rank's seat.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    stdout: str | None
    stderr: str | None
    stacks: str
    heartbeat: str


class Rank:
    """The state of this process at the start of its script, to which :meth:`differs` may return.

    Args:
        beginning: how the script was started.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._pid = os.getpid()
        self._folder = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = _ignored()

    def differs(self, found: Difference) -> None:
        """Restart if other ranks have not noticed this one yet; else warn that the variable has no effect."""
        why = self._obstacle()
        if why:
            sys.stderr.write(
                f"[outlast] {found}: this has no effect, because it was imported before the script began and"
                f" {why}; set it at the beginning of the script, or start with --no-zygote\n"
            )
            return
        self._tell(found)
        self._begin_again()

    def _obstacle(self) -> str:
        if os.getpid() != self._pid:
            return "this is a child process"
        torch = sys.modules.get("torch")
        if torch is None:
            return ""
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return "the rank has a process group already"
        if torch.cuda.is_initialized():
            return "the rank uses CUDA already"
        return "the rank has made steps already" if heartbeat.attach(None).beats else ""

    def _tell(self, found: Difference) -> None:
        """Tell the agent; the values go into a private file, not into the event log."""
        context = settings.worker_context()
        if not context.control_path:
            return
        name = f"environment-{context.generation}-{context.rank}.json"
        with contextlib.suppress(OSError):  # the next generation reports it again
            path = Path(context.control_path).with_name(name)
            path.write_text(json.dumps(dict(found.variables)))
        Reporter(context.control_path).send(
            codec.encode(
                StartedAgain(
                    time.time(),
                    time.monotonic(),
                    context.generation,
                    context.rank,
                    tuple(sorted(found.variables)),
                    str(found),
                )
            )
        )

    def _begin_again(self) -> NoReturn:
        beginning = self._beginning
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for pid in list(children_of(self._pid)):  # the script will start them again
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.chdir(self._folder)
        os.umask(self._umask)
        for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(which, 0)
        if signal.getsignal(signal.SIGINT) is not None:  # only the main thread can change handlers
            with contextlib.suppress(ValueError):
                for number in _ignored() - self._ignored:
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        told = {
            "kind": beginning.kind,
            "stdout": beginning.stdout,
            "stderr": beginning.stderr,
            "stacks": beginning.stacks,
            "heartbeat": beginning.heartbeat,
        }
        command = [sys.executable, "-u", str(_PROGRAM), json.dumps(told), beginning.target, *beginning.args]
        os.execve(sys.executable, command, dict(beginning.environment))


def _ignored() -> set[signal.Signals]:
    return {one for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN}


def serve(hidden: Hidden, expected: Mapping[str, str], beginning: Beginning) -> None:
    """Serve hidden modules to the script when it imports them."""
    hidden.serve(expected, Rank(beginning).differs)
    atexit.register(hidden.give_up)  # atexit functions import as usual
