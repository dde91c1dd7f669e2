"""Puts a changed source in the place of a module: into its functions, or by an import."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a changed source instead of a module.

    Args:
        name: of the module, dotted.
        path: of its own source.
        source: instead of it.
    """

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
        exec(compile(self._source, str(self._path), "exec", dont_inherit=True), module.__dict__)


def functions_of(path: Path) -> dict[str, FunctionType]:
    """Return the functions of an imported module by qualified name, less those that share a name.

    The garbage collector tells nothing of objects that it has frozen, so none is frozen afterwards.
    """
    gc.unfreeze()
    file = str(path)
    found = [
        one for one in gc.get_objects() if type(one) is FunctionType and one.__code__.co_filename == file
    ]
    count = Counter(one.__qualname__ for one in found)
    return {one.__qualname__: one for one in found if count[one.__qualname__] == 1}


def changed_functions(before: CodeType, after: CodeType, name: str = "") -> dict[str, CodeType] | None:
    """Return the functions with other code, by qualified name; None if what runs at the import differs.

    A lambda or comprehension outside of a function counts as that: nothing notes when it runs.
    """
    same = before.co_code == after.co_code and before.co_names == after.co_names
    if not same or len(before.co_consts) != len(after.co_consts):
        return None
    found: dict[str, CodeType] = {}
    for one, other in zip(before.co_consts, after.co_consts, strict=True):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            inner = f"{name}{one.co_name}"
            if not one.co_flags & inspect.CO_OPTIMIZED:
                below = changed_functions(one, other, f"{inner}.")
                if below is None:
                    return None
                found |= below
            elif one != other and one.co_name.startswith("<"):
                return None
            elif one != other:
                found[inner] = other
        elif (type(one), one) != (type(other), other):
            return None
    return found


def put(changed: dict[str, CodeType], functions: dict[str, FunctionType]) -> bool:
    """Put code into functions; return False, and do nothing, if that does not change all that there is.

    It does not where a function is not known by its name, has other free variables, or has made functions.
    """
    for name, code in changed.items():
        there = functions.get(name)
        if there is None or there.__code__.co_freevars != code.co_freevars:
            return False
        if any(one.startswith(f"{name}.<locals>.") for one in functions):
            return False
    for name, code in changed.items():
        functions[name].__code__ = code
    return True
