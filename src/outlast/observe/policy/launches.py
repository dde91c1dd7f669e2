"""What a launch runs, and how that differs from the launch before in the same run folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_RUNNERS = frozenset(  # modules that run the script which is their argument
    {
        *("cProfile", "profile", "pdb", "trace", "coverage", "kernprof", "line_profiler", "memory_profiler"),
        *("scalene", "viztracer", "memray", "pyinstrument", "debugpy", "ipdb"),
    }
)
_INTERPRETER = re.compile(
    r"(.*/)?((python|pypy)[\d.]*|(ba|da|z|k)?sh|env|nice|numactl|taskset|nsys|ncu|strace)"
)
_MOST = 8  # arguments that are named
_LONG = 120  # characters of one
_SCRIPTS = (".py", ".sh")
_NUMBER = re.compile(r"-[\d.]")


def unwrapped(command: Sequence[str]) -> tuple[str, ...]:
    """Return the script and the arguments that a command runs, where its program is one that runs scripts.

    A profiler, an interpreter or a shell does. Code on the command line is ``("-c", code, ...)``. Any other
    command is returned as it is.
    """
    program, *rest = command
    if program in _RUNNERS or _INTERPRETER.fullmatch(program):
        for at, one in enumerate(rest[:-1]):
            if one == "-c":
                return tuple(rest[at:])
            if one == "-m" and rest[at + 1] not in _RUNNERS:
                return tuple(rest[at + 1 :])
            if one.endswith(_SCRIPTS):
                return tuple(rest[at:])
        if rest and rest[-1].endswith(_SCRIPTS):
            return (rest[-1],)
    return tuple(command)


def arguments_that_differ(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the arguments that only one of two launches has; empty: they are the same, in any order."""
    then, here = Counter(_options(before)), Counter(_options(now))
    if then == here:
        return ""
    return f"{_listed(here - then)} (before: {_listed(then - here)})"


def _options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values behind each option."""
    found: list[str] = []
    for one in arguments:
        option = one.startswith("-") and not _NUMBER.match(one)
        if not option and found and found[-1].startswith("-"):
            found[-1] += f" {one}"
        else:
            found.append(one)
    return found


def _listed(options: Counter[str]) -> str:
    named = [one if len(one) <= _LONG else f"{one[:_LONG]}..." for one in options.elements()]
    more = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return ", ".join(named[:_MOST]) + more if named else "none"
