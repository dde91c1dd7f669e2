"""The detectors of the agent: ended processes, silent ranks, and those that other packages register."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outlast import plugins
from outlast.hang.agent.monitor import Watch
from outlast.hang.agent.response import Hangs
from outlast.hang.policy.attribution import Seen
from outlast.ports import Detector, NodeView
from outlast.recovery.agent import Ends
from outlast.recovery.policy.events import Fault

PATIENCE = 30.0  # seconds for one call of a registered detector, its import included
_LOOK_EVERY = 0.25  # at what registered detectors have found
_STORE_PATIENCE = 1.0  # seconds in which the ends of ranks are reported first
_SHORTEST, _LONGEST = 0.05, 60.0  # seconds between two calls of a registered detector


@dataclass(frozen=True)
class Exits:
    """Reports which of the processes that have ended failed first."""

    ends: Ends
    name: str = "exits"

    def poll(self, now: float, node: NodeView) -> Sequence[Fault]:
        """Return the fault of the rank that failed first, once the ends have settled."""
        fault = self.ends.fault(node.generation, node.step, now)
        return () if fault is None else (fault,)

    def deadline(self, now: float) -> float:
        """Return when the ends will have settled."""
        del now
        limit = self.ends.deadline()
        return math.inf if limit is None else limit


@dataclass(frozen=True)
class Silences:
    """Reports hangs; ranks that are silent and not convicted get more time.

    Args:
        watch: reads the heartbeat pages.
        hangs: names the culprit.
        ends: knows which ranks are about to end with an exception: their silence is no hang.
        note: takes what is to be said.
        tell: takes what the agents of other nodes need to know.
    """

    watch: Watch
    hangs: Hangs
    ends: Ends
    note: Callable[[str], None]
    tell: Callable[[Seen], None]
    name: str = "hangs"

    def poll(self, now: float, node: NodeView) -> Sequence[Fault]:
        """Examine the ranks that were silent for too long at the watch's last look."""
        del now, node  # the watch has looked just before
        generation, silents = self.watch.generation, self.watch.silents
        if generation is None or not silents or self.ends.leaving(generation, time.monotonic()):
            return ()
        found = self.hangs.examine(silents, generation, self.watch)
        if found.note:
            self.note(found.note)
        if found.fault is None:
            self.watch.excuse(silents, time.monotonic(), found.look_in)
        if found.seen is not None:
            self.tell(found.seen)
        return () if found.fault is None else (found.fault,)

    def deadline(self, now: float) -> float:
        """Return when the first timeout expires, or the pages have to be read again."""
        return self.watch.deadline(now)


@dataclass
class Stores:
    """Reports a store that ended before every rank had made a step.

    Ranks that are connecting would try again for 30 minutes, and nothing wakes them. Ranks that are connected
    get an error, and those that have made a step may never need the store again.

    Args:
        gone: whether it has ended so early.
    """

    gone: Callable[[], bool]
    name: str = "stores"
    _since: float = math.inf

    def poll(self, now: float, node: NodeView) -> Sequence[Fault]:
        """Return a fault once it has been gone for a while: a rank that ended with it is reported instead."""
        self._since = min(self._since, now) if self.gone() else math.inf
        if now < self._since + _STORE_PATIENCE:
            return ()
        self._since = math.inf
        reason = "the process that serves the store of the ranks has ended before they had made a step"
        return (node.fault(reason, signature="store gone"),)

    def deadline(self, now: float) -> float:
        """Return when it has been gone for long enough."""
        del now
        return self._since + _STORE_PATIENCE


class _Registered(threading.Thread):
    """A detector of another package, in a thread of its own; nothing that it does stops the agent."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"detector-{name}", daemon=True)
        self.view: NodeView | None = None
        self.found: deque[Fault] = deque()
        self.failure = ""
        self.calling: float | None = None  # since when it has not returned
        self._label = name
        self._closed = threading.Event()

    def run(self) -> None:
        try:
            self.calling = time.monotonic()
            detector: Detector = plugins.load(plugins.DETECTORS, self._label)()
            while not self._closed.is_set():
                self.calling = time.monotonic()
                pause = self._poll(detector)
                self.calling = None
                self._closed.wait(pause)
        except Exception as error:  # noqa: BLE001 - code of another package; the job goes on without it
            self.failure = f"{type(error).__name__}: {error}"

    def _poll(self, detector: Detector) -> float:
        """Have it look once, and return the seconds until the next time."""
        if self.view is None:
            return _LOOK_EVERY
        for fault in detector.poll(time.monotonic(), self.view):
            if not isinstance(fault, Fault):
                raise TypeError(f"poll() returned {type(fault).__name__}, expected faults")
            self.found.append(fault)
        now = time.monotonic()
        return min(max(detector.deadline(now) - now, _SHORTEST), _LONGEST)

    def overdue(self, now: float) -> bool:
        """Say whether a call takes too long."""
        since = self.calling
        return since is not None and now - since > PATIENCE

    def close(self) -> None:
        """Have it end after the present call, which is not waited for."""
        self._closed.set()


class Registered:
    """The detectors of other packages: reports what their threads have found.

    Args:
        note: takes what is to be said.
    """

    name = "registered"

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._active: dict[str, _Registered] = {}
        self._new: deque[_Registered] = deque()
        # Reading what is installed takes 40 ms, which the agent has better use for.
        thread = threading.Thread(target=self._begin, name="detectors", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this node limits threads
            self._begin()

    def _begin(self) -> None:
        for name in plugins.names(plugins.DETECTORS):
            one = _Registered(name)
            try:
                one.start()
            except RuntimeError as error:
                one.failure = f"no thread for it: {error}"
            self._new.append(one)

    def poll(self, now: float, node: NodeView) -> Sequence[Fault]:
        """Return what was found in this generation; disable detectors that raised or do not return."""
        while self._new:
            one = self._new.popleft()
            self._active[one.name.removeprefix("detector-")] = one
        faults: list[Fault] = []
        for name, one in list(self._active.items()):
            one.view = node
            while one.found:
                fault = one.found.popleft()
                evidence = (*fault.evidence, ("detector", name))
                faults.append(replace(fault, node=node.node, since=fault.since or now, evidence=evidence))
            if one.overdue(now):
                self._disable(name, f"a call has taken more than {PATIENCE:.0f} s")
            elif one.failure:
                self._disable(name, one.failure)
        return [fault for fault in faults if fault.generation == node.generation]

    def _disable(self, name: str, why: str) -> None:
        self._active.pop(name).close()
        self._note(f"detector {name} is disabled: {why}; the job goes on without it")

    def deadline(self, now: float) -> float:
        """Return when to look at what they have found."""
        return now + _LOOK_EVERY if self._active or self._new else math.inf

    def close(self) -> None:
        """Have the threads end; they are not waited for."""
        for one in self._active.values():
            one.close()
