"""What other packages register by an entry point: detectors, tiers, schedulers and frameworks.

A package names a callable in the group of its kind, in ``pyproject.toml``::

    [project.entry-points."outlast.detectors"]
    smoke = "my_package:Smoke"

The protocols are in :mod:`outlast.ports`, which says what each callable is given.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from outlast.errors import UsageError

DETECTORS, TIERS = "outlast.detectors", "outlast.tiers"
SCHEDULERS, FRAMEWORKS = "outlast.schedulers", "outlast.frameworks"


def names(group: str) -> list[str]:
    """Return the names that are registered in a group; nothing is imported."""
    return sorted({point.name for point in metadata.entry_points(group=group)})


def load(group: str, name: str) -> Callable[..., Any]:
    """Import what is registered under a name and return it.

    Raises:
        UsageError: nothing is, or it cannot be imported.
    """
    found = [point for point in metadata.entry_points(group=group) if point.name == name]
    if not found:
        raise UsageError(
            f"{group}: nothing is registered as {name!r}, found {', '.join(names(group)) or 'none'}"
        )
    try:
        loaded: Callable[..., Any] = found[0].load()
    except Exception as error:  # whatever the package raises while it is imported
        raise UsageError(
            f"{group}: {name} ({found[0].value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return loaded
