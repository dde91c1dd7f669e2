"""Cleanup between two calls of a training function, and the assignment of the rank for the next call.

Objects from outside of the function still have the state of the interrupted call. Loading a checkpoint resets
it. Without a checkpoint, training would begin at step 0 with trained weights: :func:`refuse` prevents that.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from outlast import settings
from outlast.errors import ObjectReused
from outlast.hang.worker import flight_recorder, heartbeat
from outlast.inprocess.worker.abort import (
    Remaining,
    close_kept,
    destroy_process_groups,
    device_threads,
    devices_left,
)
from outlast.preemption import worker as preemption
from outlast.stragglers.policy.measuring import SAMPLER
from outlast.worker import bootstrap

_todo: list[Callable[[], None]] = []


def when_left(do: Callable[[], None]) -> None:
    """Register a hook for the case that the function is interrupted; it runs once."""
    _todo.append(do)


def leave() -> None:
    """Run the hooks, the latest first."""
    while _todo:
        _todo.pop()()


def forget(error: BaseException | None) -> None:
    """Drop the local variables that an exception and its causes keep alive."""
    seen: set[int] = set()
    rest = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        rest += [one.__context__, one.__cause__]
        one.__context__ = one.__cause__ = None


def put_away() -> Remaining:
    """Drop the session and all process groups; return the gloo devices that are left."""
    leave()
    preemption.unequip()
    gc.collect()  # models first: a reducer that outlives its group waits for the group's threads
    destroy_process_groups()
    if device_threads():
        gc.collect()
    return devices_left()


def take_seat(seat: Mapping[str, Any]) -> bool:
    """Become a rank of the next generation: heartbeat page, environment, logs, stack dumps.

    Returns:
        False if that generation has ended already, so that its page is gone.
    """
    close_kept()  # the agent has seen that all other ranks left their functions
    try:
        heartbeat.change(seat["heartbeat"])
    except FileNotFoundError:
        return False
    settings.export(seat["variables"])
    sys.argv[1:] = seat["args"]
    bootstrap.append_to(seat["stdout"], seat["stderr"])
    bootstrap.answer_with_stacks(seat["stacks"])
    return True


_OURS = (flight_recorder.THREAD, SAMPLER)


class Leftovers:
    """Threads and child processes that the function leaves behind.

    Those of the first call are not reported: they may be a library's monitor, or a loader from outside.
    """

    def __init__(self) -> None:
        self._known: set[threading.Thread | BaseProcess] | None = None

    def more(self) -> list[str]:
        """Return the names of those that are new since the last call; empty the first time."""
        threads = (one for one in threading.enumerate() if one.name not in _OURS)
        found: set[threading.Thread | BaseProcess] = {*threads, *active_children()}
        known, self._known = self._known, found
        if known is None:
            return []
        kinds = (
            ("thread" if isinstance(one, threading.Thread) else "process", one.name) for one in found - known
        )
        return sorted(f"{kind} {name}" for kind, name in kinds)


_left: dict[int, weakref.ref[object]] = {}  # by id, since comparing tensors is not safe


def training(state: Mapping[str, object]) -> None:
    """Record what is trained, for the case that the function is interrupted."""
    parts = {id(part): weakref.ref(part) for _, part in _parts(state)}
    when_left(lambda: _left.update(parts))


def loaded() -> None:
    """Forget it: a checkpoint was loaded."""
    _left.clear()


def refuse(state: Mapping[str, object]) -> None:
    """Refuse to start at step 0 with objects that were trained before.

    Raises:
        ObjectReused: names the object.
    """
    for name, part in _parts(state):
        found = _left.get(id(part))
        if found is not None and found() is part:
            raise ObjectReused(
                f"session.restore: {name} was created outside of the resilient function and trained before"
                " the restart, and there is no checkpoint yet that could reset it; create it inside of the"
                " function"
            )


def _parts(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the objects of the state that can be recognised again; plain containers cannot."""
    for name, holder in state.items():
        if type(holder).__weakrefoffset__:
            yield name, holder
        if isinstance(holder, torch.nn.Module):
            yield from ((f"{name}.{path}", one) for path, one in holder.named_parameters())
