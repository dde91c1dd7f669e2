"""A meta path finder that serves the modules of :mod:`outlast.compat.nvrx.surface`, and says why not others.

Every served module is a package without a folder. So ``from MODULE import NAME`` asks the finder for a NAME
that is not served (importlib's ``_handle_fromlist``), and the reason is in the ImportError.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from outlast.compat.nvrx.surface import PACKAGE, REFUSED, SERVED
from outlast.errors import UsageError


class Finder(MetaPathFinder, Loader):
    """Finds NVRx's modules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib's
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        """Find a module of the package.

        Raises:
            ModuleNotFoundError: it is not served; the text says what to use.
        """
        if fullname.partition(".")[0] != PACKAGE:
            return None
        if fullname not in SERVED:
            raise ModuleNotFoundError(why_not(fullname))
        return ModuleSpec(fullname, self, origin="outlast.compat.nvrx", is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to importlib."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names; each is imported when it is first used."""
        package, homes = module.__name__, SERVED[module.__name__]

        def get(name: str) -> Any:
            if f"{package}.{name}" in SERVED:
                return import_module(f"{package}.{name}")
            if name not in homes:
                raise AttributeError(why_not(f"{package}.{name}"))
            home, _, attribute = homes[name].partition(":")
            try:
                found = vars(module)[name] = getattr(import_module(home), attribute)
            except UsageError as error:  # a framework is absent or too old
                raise ImportError(f"{package}.{name}: {error}") from error
            return found

        public = sorted(name for name in homes if not name.startswith("_"))
        vars(module).update(__getattr__=get, __all__=public, __dir__=lambda: public)


def why_not(fullname: str) -> str:
    """Return the sentence about a module or name that is not served."""
    around = fullname
    while around:
        reason = REFUSED.get(around.partition(".")[2])
        if reason is not None:
            return f"{fullname}: outlast does not serve it: {reason}"
        if SERVED.get(around):
            break
        around = around.rpartition(".")[0]
    below = (name.removeprefix(f"{around}.").partition(".")[0] for name in SERVED if _is_below(name, around))
    names = ", ".join(sorted({*SERVED[around], *below}))
    return f"{fullname}: outlast does not serve it; {around} has {names}; see docs/reference/nvrx.md"


def _is_below(name: str, around: str) -> bool:
    """Whether something is served by a module below another one."""
    return bool(SERVED[name]) and name.startswith(f"{around}.")
