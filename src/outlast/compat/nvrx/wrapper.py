"""NVRx's ``inprocess.Wrapper`` over :func:`outlast.resilient`.

Parameters that mean the same are passed on; the others are refused with the reason that is in the table of
docs/how-to/in-process-restart.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from outlast.compat.nvrx.plugins import FrozenState, RestartAbort
from outlast.errors import RestartsSpent, UsageError
from outlast.inprocess import CallWrapper, resilient

_PLUGINS = ("initialize", "abort", "finalize", "health_check", "completion", "terminate")
_TIMEOUTS = {
    "soft_timeout": "hang_timeout",
    "hard_timeout": "hard_timeout",
    "barrier_timeout": "barrier_timeout",
}
_WATCHED = (
    "ranks do not watch each other. The agent sees a death at once, and nodes exchange messages"
    " (--ping-timeout)"
)
_MONITOR = "there is no monitor; the agent looks every --ft-workload-check-interval"
_STORE = "a process of the launcher serves the store"
_PROCESS = "there is no monitor process; the launcher writes the event log"
ABSENT: Mapping[str, str] = {
    "heartbeat_interval": _WATCHED,
    "heartbeat_timeout": _WATCHED,
    "monitor_thread_interval": _MONITOR,
    "monitor_process_interval": _MONITOR,
    "progress_watchdog_interval": _MONITOR,
    "completion_timeout": (
        "ranks that have returned wait for those of their node; a rank that hangs meanwhile is found by its"
        " own timeout"
    ),
    "last_call_wait": "the agent does not wait to collect faults",
    "termination_grace_time": "a rank that does not leave gets SIGKILL; the last committed checkpoint counts",
    "store_factory": _STORE,
    "store_kwargs": _STORE,
    "rank_assignment": "ranks keep their numbers, and a lost one is forked again",
    "monitor_process_logfile": _PROCESS,
    "monitor_process_pidfile": _PROCESS,
}
"""Parameters that have no effect here, and why."""


class Wrapper:
    """Restarts a function in process after a fault, as ``outlast.resilient`` does, under ``outlast run``.

    Args:
        named: ``enabled``; ``soft_timeout``, ``hard_timeout`` and ``barrier_timeout`` as timedelta, each with
            outlast's default if it is left out; ``initialize``, ``abort``, ``finalize``, ``health_check``,
            ``completion`` and ``terminate``, which take a :class:`FrozenState`. A None counts as left out.

    Raises:
        UsageError: a parameter has no effect here, is unknown, or is not valid; on the call: no agent.
    """

    def __init__(self, **named: Any) -> None:
        given = {name: value for name, value in named.items() if value is not None}
        known = {"enabled", *_TIMEOUTS, *_PLUGINS}
        problems = [
            f"{name} has no effect here, leave it out: {ABSENT[name]}" for name in ABSENT if name in given
        ]
        problems += [
            f"{name}: unknown; expected some of {', '.join(sorted(known))}"
            for name in sorted(given.keys() - known - ABSENT.keys())
        ]
        problems += [
            f"{name}: found {given[name]!r}, expected a datetime.timedelta"
            for name in _TIMEOUTS
            if not isinstance(given.get(name, timedelta()), timedelta)
        ]
        problems += [
            f"{name}: found {given[name]!r}, expected an object that takes the state"
            for name in _PLUGINS
            if not callable(given.get(name, Wrapper))
        ]
        if problems:
            raise UsageError(f"inprocess.Wrapper: {'; '.join(problems)}")
        self._plugins = {name: given[name] for name in _PLUGINS if name in given}
        self._options = {
            ours: given[name].total_seconds() for name, ours in _TIMEOUTS.items() if name in given
        }
        self._options["enabled"] = given.get("enabled", True)
        resilient(**self._options)  # refuses what is not valid before anything is wrapped

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with restarts."""
        first: list[tuple[int, int]] = []

        def adapted(plugin: Callable[[FrozenState], object]) -> Callable[[CallWrapper], object]:
            return lambda call: plugin(_state(call, first))

        plugins = {name: adapted(plugin) for name, plugin in self._plugins.items()}
        inner = resilient(**self._options, **plugins)(fn)

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except RestartAbort as error:
                raise RestartsSpent(f"inprocess.Wrapper: no more restarts: {error}") from error

        return wrapped


def _state(call: CallWrapper, first: list[tuple[int, int]]) -> FrozenState:
    if not first:
        first.append((call.rank, call.world_size))
    return FrozenState(
        rank=call.rank,
        world_size=call.world_size,
        active_rank=call.rank,
        active_world_size=call.world_size,
        initial_rank=first[0][0],
        initial_world_size=first[0][1],
        iteration=call.iteration,
    )
