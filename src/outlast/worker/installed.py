"""Which modules are installed packages, and which are code that the user edits.

A package is installed if it lies beside the metadata of one: ``*.dist-info``, or ``*.egg-info`` in a folder
called ``site-packages`` or ``dist-packages``. An editable install is the user's code. It is known by
``direct_url.json`` (PEP 610), by a folder that a ``.pth`` file names, or by setuptools' finder, whose module
is called ``__editable__...``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

_SITES = ("site-packages", "dist-packages")
_MOST_BYTES = 1 << 20


class Installed:
    """What is installed for this interpreter, as its search path is now.

    Args:
        own: the script's folder; nothing is installed there.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._projects: set[str] = set()  # with all that is below
        self._named: set[str] = set()  # by .pth files
        for folder in filter(os.path.isdir, dict.fromkeys(sys.path)):
            self._projects |= set(_projects(folder))
            if os.path.basename(folder) in _SITES:
                self._named |= set(_named(folder))
        self._found = frozenset(_found_by_finders())

    def has(self, top: str) -> bool:
        """Return whether a top-level module, which was imported, is of an installed package."""
        bases = list(_bases(sys.modules[top]))
        return bool(bases) and top not in self._found and all(map(self._is_installed_in, bases))

    def _is_installed_in(self, base: str) -> bool:
        here = os.path.realpath(base)
        edited = here in self._named or any(_is_below(here, project) for project in self._projects)
        return here != self._own and not edited and _has_metadata(base)


def _is_below(folder: str, project: str) -> bool:
    """Return whether a folder is a project's, and not of an environment that the project holds."""
    inside = os.path.relpath(folder, project).split(os.sep)
    return inside[0] != os.pardir and not set(inside) & set(_SITES)


def _bases(module: Any) -> Iterator[str]:
    """Yield the folders of the search path that a top-level module comes from."""
    with contextlib.suppress(AttributeError, TypeError):  # objects in sys.modules may be no modules
        spec = module.__spec__
        if spec.submodule_search_locations:
            for place in spec.submodule_search_locations:
                yield os.path.dirname(os.path.abspath(place))
        elif spec.has_location:
            yield os.path.dirname(os.path.abspath(spec.origin))


@functools.cache
def _has_metadata(folder: str) -> bool:
    """Return whether packages were installed into a folder; an ``egg-info`` elsewhere is of a source tree."""
    kinds = (".dist-info", ".egg-info") if os.path.basename(folder) in _SITES else (".dist-info",)
    return any(name.endswith(kinds) for name in _names_in(folder))


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _projects(folder: str) -> Iterator[str]:
    """Yield the folders of the projects that were installed as editable, from metadata in a folder."""
    for name in _names_in(folder):
        if name.endswith(".dist-info"):
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
                told = json.loads(_text(os.path.join(folder, name, "direct_url.json")) or "{}")
                if told.get("dir_info", {}).get("editable") is True:
                    yield os.path.realpath(unquote(urlsplit(told["url"]).path))


def _named(site: str) -> Iterator[str]:
    """Yield the folders that ``.pth`` files add to the search path, except those of another environment."""
    for name in _names_in(site):
        if name.endswith(".pth"):
            for line in filter(str.strip, _text(os.path.join(site, name)).splitlines()):
                folder = os.path.realpath(os.path.join(site, line.strip()))
                code = line.startswith(("#", "import ", "import\t"))
                if not code and os.path.basename(folder) not in _SITES:
                    yield folder


def _text(path: str) -> str:
    """Return the text of a file; "": there is none, or it is too long."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(_MOST_BYTES)
        return text if len(text) < _MOST_BYTES else ""
    return ""


def _found_by_finders() -> Iterator[str]:
    """Yield the top-level modules that setuptools' finders of editable installs know."""
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
        if isinstance(mapping, Mapping):
            yield from (str(one).partition(".")[0] for one in mapping)
