"""The variables that a script sets before it imports what the zygote has imported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from outlast import files
from outlast.errors import RunFolderUnusable
from outlast.recovery.policy.events import StartedAgain

_ENVIRONMENTS = 5  # zygotes that are started because the script sets variables
_MOST_BYTES = 1 << 20  # of the file of one rank
_MOST_OF_ONE = 1 << 16  # bytes; the kernel starts no process with a variable of twice as many


class ScriptSets:
    """The variables that the script sets before it imports what the zygote has imported.

    Args:
        base: the environment that all ranks begin with.
    """

    def __init__(self, base: Mapping[str, str]) -> None:
        self._base = base
        self._sets: dict[str, str | None] = {}
        self._generation = 0
        self._told: dict[str, str | None] = {}
        self._changes = 0

    @property
    def environment(self) -> dict[str, str]:
        """What a zygote is started with."""
        return {name: value for name, value in {**self._base, **self._sets}.items() if value is not None}

    @property
    def originals(self) -> dict[str, str | None]:
        """What the ranks begin with, of the variables that a zygote is started with other values of."""
        return {name: self._base.get(name) for name in self._sets}

    def take(self, again: StartedAgain, values: Path) -> tuple[str, bool]:
        """Record what one rank reported.

        Returns:
            why no zygote can import for all ranks, or ""; and whether anything is new.
        """
        found = _read(values)
        if not found:
            return again.reason, False
        if again.generation != self._generation:
            self._generation, self._told = again.generation, {}
        differing = sorted(
            name for name in found.keys() & self._told.keys() if found[name] != self._told[name]
        )
        if differing:
            return f"the script sets {', '.join(differing)} to other values on other ranks", False
        self._told |= found
        if self._sets.items() >= found.items():
            return "", False
        self._changes += 1
        self._sets |= found
        if self._changes > _ENVIRONMENTS:
            return f"the script sets {', '.join(sorted(found))} to another value each time", False
        return "", True


def _read(path: Path) -> dict[str, str | None]:
    """Return the variables that a rank has written down, and remove the file; nothing: it makes no sense."""
    try:
        found = json.loads(files.read_private(path, _MOST_BYTES))
    except (OSError, RunFolderUnusable, ValueError, RecursionError):
        found = {}
    with suppress(OSError):
        path.unlink()
    if not isinstance(found, dict) or not all(_can_be_set(*one) for one in found.items()):
        return {}
    return found


def _can_be_set(name: str, value: object) -> bool:
    """Say whether a process can be started with a variable."""
    try:
        size = len(os.fsencode(name)) + (0 if value is None else len(os.fsencode(str(value))))
    except UnicodeEncodeError:
        return False
    text = name + (value if isinstance(value, str) else "")
    fits = bool(name) and "=" not in name and "\0" not in text and size < _MOST_OF_ONE
    return fits and (value is None or isinstance(value, str))
