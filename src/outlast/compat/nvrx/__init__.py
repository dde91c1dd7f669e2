"""NVRx's modules, served by outlast: a script that imports ``nvidia_resiliency_ext`` runs as it is.

``install()`` makes them importable in this process. ``python -m outlast.compat.nvrx SCRIPT`` does so and runs
an unchanged script. What is served and what is refused is in docs/reference/nvrx.md, from
:mod:`outlast.compat.nvrx.surface`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys

from outlast import settings
from outlast.compat.nvrx.finder import Finder
from outlast.compat.nvrx.surface import PACKAGE
from outlast.errors import UsageError

__all__ = ["install"]
_LOG = logging.getLogger("outlast")


def install() -> None:
    """Serve ``nvidia_resiliency_ext`` in this process; a second call changes nothing.

    An installed package of that name is not used, which rank 0 logs.

    Raises:
        UsageError: the installed package has been imported already.
    """
    if any(isinstance(one, Finder) for one in sys.meta_path):
        return
    there = next((name for name in sys.modules if name.partition(".")[0] == PACKAGE), None)
    if there is not None:
        raise UsageError(
            f"outlast.compat.nvrx.install: found {there} imported already, expected nothing of {PACKAGE}: two"
            " versions of it would be mixed; call install() before the first import"
        )
    found = importlib.util.find_spec(PACKAGE)
    if found is not None and settings.worker_context().rank == 0:
        where = found.origin or next(iter(found.submodule_search_locations or ()), "an unknown place")
        _LOG.warning("%s is served by outlast; the package installed at %s is not used", PACKAGE, where)
    sys.meta_path.insert(0, Finder())
