"""What has to be let go of when a training function is left, and its process goes on."""

from __future__ import annotations

from collections.abc import Callable

_todo: list[Callable[[], None]] = []


def when_left(do: Callable[[], None]) -> None:
    """Have something done when the function is left before its end; kept only until then."""
    _todo.append(do)


def leave() -> None:
    """Do it all, the latest first."""
    while _todo:
        _todo.pop()()
