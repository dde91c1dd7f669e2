"""Between two calls of a training function: put away what one left, take the seat for the next.

What has to be let go of when a training function is left, and its process goes on.

Objects that a training function has trained and left, and then hands to a session once more.

A function that is entered again finds what stands outside of it as the fault left it. A checkpoint that is
loaded sets that right. Where there is none yet, training would begin at step 0 with trained weights.
"""

from __future__ import annotations

import gc
import random
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
from outlast.worker import bootstrap

_todo: list[Callable[[], None]] = []


def when_left(do: Callable[[], None]) -> None:
    """Have something done when the function is left before its end; kept only until then."""
    _todo.append(do)


def leave() -> None:
    """Do it all, the latest first."""
    while _todo:
        _todo.pop()()


def forget(error: BaseException | None) -> None:
    """Drop what an exception, and all that led to it, keeps alive: locals of the frames it went through."""
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
    """Let go of the session and of every process group; return the gloo devices that are left even so."""
    leave()
    preemption.unequip()
    gc.collect()  # models first: the reducer of one that outlives its group waits for the group's threads
    destroy_process_groups()
    if device_threads():
        gc.collect()
    return devices_left()


def take_seat(seat: Mapping[str, Any]) -> bool:
    """Become a rank of the next generation: pulse page, environment, logs, stack dumps.

    Returns:
        False where that generation has ended before, so that its page is gone.
    """
    close_kept()  # whoever lets this rank in has seen that all others left their functions
    try:
        heartbeat.change(seat["pulse"])
    except FileNotFoundError:
        return False
    settings.export(seat["variables"])
    sys.argv[1:] = seat["args"]
    bootstrap.append_to(seat["stdout"], seat["stderr"])
    bootstrap.answer_with_stacks(seat["stacks"])
    return True


class Leftovers:
    """Threads and child processes that outlive the function.

    What is there for the first time may be there for good: a library's monitor, a loader that stands outside.
    """

    def __init__(self) -> None:
        self._known: set[threading.Thread | BaseProcess] | None = None

    def more(self) -> list[str]:
        """Return names of what was not there when the function was left last time; empty the first time."""
        threads = (one for one in threading.enumerate() if one.name != flight_recorder.THREAD)
        found: set[threading.Thread | BaseProcess] = {*threads, *active_children()}
        known, self._known = self._known, found
        if known is None:
            return []
        kinds = (
            ("thread" if isinstance(one, threading.Thread) else "process", one.name) for one in found - known
        )
        return sorted(f"{kind} {name}" for kind, name in kinds)


class RandomStates:
    """The random states as they are now, so that each call begins with the same ones."""

    def __init__(self) -> None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = None if torch is None else torch.get_rng_state()
        cuda = torch is not None and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if torch is not None and cuda else None

    def bring_back(self) -> None:
        """Set them."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._torch is not None:
            sys.modules["torch"].set_rng_state(self._torch)
        if self._cuda is not None:
            sys.modules["torch"].cuda.set_rng_state_all(self._cuda)


_left: dict[int, weakref.ref[object]] = {}  # by id; neither a tensor nor any object can be compared safely


def training(state: Mapping[str, object]) -> None:
    """Take note of what is trained from now on, for the case that the function is left."""
    parts = {id(part): weakref.ref(part) for _, part in _parts(state)}
    when_left(lambda: _left.update(parts))


def loaded() -> None:
    """Forget it all: a checkpoint has set it right."""
    _left.clear()


def refuse(state: Mapping[str, object]) -> None:
    """Refuse to begin anew with what was trained before.

    Raises:
        ObjectReused: names the object.
    """
    for name, part in _parts(state):
        found = _left.get(id(part))
        if found is not None and found() is part:
            raise ObjectReused(
                f"session.restore: {name} was built outside of the resilient function: it was trained before"
                " the function was left, and there is no checkpoint yet that could set it back; build it"
                " inside of the function"
            )


def _parts(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield what makes up the state, as far as it can be told again; plain containers cannot."""
    for name, holder in state.items():
        if type(holder).__weakrefoffset__:
            yield name, holder
        if isinstance(holder, torch.nn.Module):
            yield from ((f"{name}.{path}", one) for path, one in holder.named_parameters())
