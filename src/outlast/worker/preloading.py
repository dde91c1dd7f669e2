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

import builtins
import contextlib
import ctypes
import importlib
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Protocol

from outlast import settings
from outlast.worker.surroundings import changed as changed_around
from outlast.worker.surroundings import surroundings

# Read by compiled code when it is loaded, or at its first use, which may happen before the fork.
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "TBB_", "NPY_")
# The same, of torch and of packages that need torch.
_NATIVE_TORCH = (
    *("TORCH_", "PYTORCH_", "ATEN_", "C10_", "CAFFE2_", "DNNL_", "ONEDNN_", "XNNPACK_", "FBGEMM_", "KINETO_"),
)
# Read when a process group is made, which is after the fork.
_LATER = ("TORCH_NCCL_", "TORCH_GLOO_")
# Read at each use; the import only sets a default. Lightning's sets the last one before it imports torch.
_READ_AGAIN = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"})


_MODULES = 4000  # torch and what it imports are 2,000
_LENGTHS = range(15, 80, 16)  # of names: one of each size that Python's allocator has
_GAPS = 4  # free places of one size that an import leaves, for each module
_import_system: Any = sys.modules["_frozen_importlib"]


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
        under: the environment of its import, where the ranks were seen to import it; None: the zygote's.
    """

    name: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    needs: set[tuple[int, str]] = field(default_factory=set)
    native: bool = False
    needs_torch: bool = False
    sets: dict[str, str] = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)
    under: Mapping[str, str] | None = None


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


class Observer(Protocol):
    """Looks at imports while they are made."""

    def reads(self, variable: str, frame: Any) -> None:
        """A variable is read."""

    def begins(self, name: str) -> None:
        """An import statement begins."""

    def ends(self) -> None:
        """An import statement has ended, or raised."""

    def imported(self, name: str, items: Sequence[str], by: Any, found: ModuleType, grew: bool) -> None:
        """A statement in a frame has imported a module; ``grew``: and others that were not there."""


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
        # Next to each other: a fork that puts modules back writes to the page of each.
        self._unused = [ModuleType.__new__(ModuleType) for _ in range(_MODULES)]
        self.observer: Observer | None = None
        self.environment = settings.inherited()
        self.filters = list(warnings.filters)
        self.packages: dict[tuple[int, str], Package] = {}
        self._collect()

    def load(self, name: str, together: bool = False) -> None:
        """Import one module; ``together``: it is hidden and put back with those before it."""
        if not together:
            self._stage += 1
        variables, filters = settings.inherited(), list(warnings.filters)
        settings.keep_variables_in(_Recorded(settings.variables(), self._read))
        builtins.__import__ = self._imported
        new_module, _import_system._new_module = _import_system._new_module, self._new_module
        try:
            importlib.import_module(name)
        finally:
            builtins.__import__ = self._import
            _import_system._new_module = new_module
            settings.keep_variables_in(dict(settings.variables()))
        self._collect()
        top = name.partition(".")[0]
        mine = self.packages.setdefault((self._stage, top), Package(name))
        mine.sets |= {
            key: value for key, value in settings.inherited().items() if variables.get(key) != value
        }
        mine.filters += [one for one in warnings.filters if one not in filters]

    def _new_module(self, name: str) -> ModuleType:
        module = self._unused.pop() if self._unused else ModuleType.__new__(ModuleType)
        module.__init__(name)  # type: ignore[misc]
        return module

    def _read(self, variable: str) -> None:
        frame = sys._getframe(2)
        reader = importer_in(frame)
        if reader:
            self._reads.add((self._stage, reader.partition(".")[0], variable))
        if self.observer is not None:
            self.observer.reads(variable, frame)

    def _imported(
        self,
        name: str,
        globals: Any = None,  # noqa: A002 - the names of __import__
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        observer = self.observer
        if observer is None:
            found = self._import(name, globals, locals, fromlist, level)
        else:
            full, size = _absolute(name, globals, level), len(sys.modules)
            observer.begins(full)
            try:
                found = self._import(name, globals, locals, fromlist, level)
                observer.imported(full, fromlist or (), sys._getframe(1), found, len(sys.modules) != size)
            finally:
                observer.ends()
        if level == 0 and globals is not None:
            self._imports.add((self._stage, str(globals.get("__name__", "")), name))
        return found

    @property
    def latest(self) -> dict[str, Package]:
        """The packages of the latest import, and of those together with it, by name."""
        return {top: package for (stage, top), package in self.packages.items() if stage == self._stage}

    def read_by(self, top: str, variable: str) -> None:
        """Note that a package read a variable, in whichever package the reading function is."""
        self._reads.add((self._stage, top, variable))

    def reads_of(self, top: str) -> set[str]:
        """Return what a package has read in the latest import, and in those together with it."""
        return {variable for stage, one, variable in self._reads if (stage, one) == (self._stage, top)}

    def _collect(self) -> None:
        """Record what the latest import has added to ``sys.modules``."""
        known = self._before.union(*(one.modules for one in self.packages.values()))
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            if name not in known and not is_standard(top):
                package = self.packages.setdefault((self._stage, top), Package(name if self._stage else top))
                package.modules[name] = module
                package.native |= isinstance(getattr(_spec_of(module), "loader", None), ExtensionFileLoader)

    def finish(self) -> None:
        """Assign reads of variables to packages, and find the packages that each one needs."""
        self._unused.clear()
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


def _absolute(name: str, variables: Mapping[str, Any] | None, level: int) -> str:
    """Return the name that a relative import means."""
    if not level or not variables:
        return name
    base = str(variables.get("__package__") or variables.get("__name__", ""))
    for _ in range(level - 1):
        base = base.rpartition(".")[0]
    return f"{base}.{name}" if name else base


def is_standard(top: str) -> bool:
    """Return whether a package is Python's own."""
    return top in sys.stdlib_module_names or top in ("__main__", "__mp_main__")


def importer_in(frame: Any) -> str:
    """Return the innermost module on the stack that is not of the standard library, "" when all are."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name and not is_standard(name.partition(".")[0]):
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
        variables: what the script has set, None: removed; empty where something else differs.
        elsewhere: file of the package that it would import.
        around: what else the script has changed, in words.
        learned: the package was imported ahead because the ranks import it.
    """

    package: str
    variables: Mapping[str, str | None]
    elsewhere: str = ""
    learned: bool = False
    around: str = ""

    def __str__(self) -> str:
        if self.around:
            return f"the script changed {self.around} before it imports {self.package}"
        if self.elsewhere:
            return f"the script changed sys.path and imports {self.package} from {self.elsewhere}"
        names = ", ".join(sorted(self.variables))
        return f"the script set {names}, which {self.package} reads when it is imported"


class _Changes:
    """What the environment of a rank has otherwise than the one under which modules were imported.

    Mostly nothing, so what each package has read need not be gone through: in a fork, that copies its pages.
    """

    def __init__(
        self, here: Mapping[str, str], native: Mapping[str, str], expected: Mapping[str, str]
    ) -> None:
        self._here = {name: here.get(name) for name in _differing(here, expected) - _READ_AGAIN}
        self._native = {name: native.get(name) for name in _differing(native, expected) - _READ_AGAIN}

    def read_by(self, package: Package) -> dict[str, str | None]:
        """Return what a package has read at its import, or may have, and its value now; None: removed."""
        found = {name: value for name, value in self._here.items() if name in package.reads}
        if package.native:
            torch = package.needs_torch
            found |= {name: value for name, value in self._native.items() if _is_native(name, torch)}
        return found


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


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
        self._seat: Mapping[str, str] = {}
        self._differs: Callable[[Difference], None] = lambda _: None
        self._filters = preloaded.filters
        self._around = surroundings()
        self._lock = threading.RLock()
        self._homes = {name: key for key, one in self._packages.items() for name in one.modules}
        self._begun: set[str] = set()  # packages of which a part has been put back
        self._asked = False
        self._attributes: dict[tuple[int, str], list[tuple[ModuleType, str, ModuleType]]] = {}

    def hide(self) -> None:
        """Make ``sys.modules`` that of a new interpreter; nothing may be imported before :meth:`serve`."""
        fill = [
            " " * length + str(number) for length in _LENGTHS for number in range(_GAPS * len(self._homes))
        ]
        for key, package in self._packages.items():
            # Names that lie next to each other, as the modules do, since the gaps are filled.
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
        del fill

    def rehearse(self) -> None:
        """Write to what :meth:`put_back` writes to, as to the reference counts of modules and their names."""
        self._difference("", list(self._packages))
        for package in self._packages.values():
            for _name, _module in package.modules.items():
                pass

    def module(self, name: str) -> ModuleType | None:
        """Return a hidden module without unhiding it; None: it was not preloaded, or is hidden no more."""
        package = self._packages.get(self._homes.get(name, (0, "")))
        return None if package is None else package.modules.get(name)

    def serve(
        self,
        expected: Mapping[str, str],
        differs: Callable[[Difference], None],
        seat: Mapping[str, str] | None = None,
    ) -> None:
        """Reset the warning filters, and serve imports of hidden modules.

        Args:
            expected: the environment under which the modules were imported.
            differs: called with the first difference, on the importing thread; may not return.
            seat: the rank's own variables; no module that reads one at its import was imported ahead.
        """
        self._expected, self._differs, self._seat = expected, differs, seat or {}
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
                for name in package.modules.keys() & RANK_READERS.keys():
                    RANK_READERS[name](package.modules[name])
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
        around = changed_around(self._around, surroundings())
        usual = _Changes(here, native, self._expected)
        changed: dict[str, str | None] = {}
        for key in keys:
            package = self._packages[key]
            learned = package.under is not None
            if learned and around:
                return Difference(key[1], {}, learned=True, around=" and ".join(around))
            under = package.under
            mine = usual if under is None else _Changes(here, native, {**under, **self._seat})
            before = len(changed)
            changed |= mine.read_by(package)
            elsewhere = self._found_elsewhere(key)
            if elsewhere:
                return Difference(key[1], {}, elsewhere, learned)
            if learned and len(changed) > before:
                return Difference(key[1], changed, learned=True)
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
        late = (
            one
            for key, one in self._packages.items()
            if one.under is None and key[1] in self._begun and variable in one.reads
        )
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


def _set_lightnings_rank(module: Any) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _set_metrics_rank(module: Any) -> None:
    module.rank_zero_only.rank = int(settings.inherited().get("LOCAL_RANK", 0))


# Modules that keep the rank at their import, and what a fork does to set it.
RANK_READERS: Mapping[str, Callable[[Any], None]] = {
    "lightning.fabric.utilities.rank_zero": _set_lightnings_rank,
    "lightning_fabric.utilities.rank_zero": _set_lightnings_rank,
    "torchmetrics.utilities.prints": _set_metrics_rank,
}


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
