"""What a run does now: a fold of its event logs, record by record.

``outlast top``, the status line of ``outlast run`` and ``outlast metrics`` show the same :class:`Now`. A fold
takes records as they are written and keeps no log, so its memory does not grow with the run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.manifest import place_of
from outlast.recovery.policy import events
from outlast.recovery.policy.events import FaultKind, Record, RecoveryAction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RATE_SECONDS = 60.0  # over which a rate is measured: twelve records of progress, which come every 5 s
_LEAST_POINTS = 3  # of a rate: steps may take longer than RATE_SECONDS
_MOST_STEPS = 1 << 63  # of a script's loop; what a worker tells is not trusted
_REMEMBERED = 4096  # faults and actions that two nodes may write; they do within seconds


class State(str, Enum):
    """What a run is doing, as far as its log says."""

    EMPTY = "empty"  # nothing is in the log
    STARTING = "starting"  # from the launcher's start to the first step of its first generation
    TRAINING = "training"
    RECOVERING = "recovering"  # from an action to the first step of the next generation
    ENDED = "ended"  # the launcher wrote its end


@dataclass(frozen=True)
class NodeNow:
    """A node of the run.

    Args:
        generation: newest of its records.
        ranks: workers that it started in its latest generation.
        step: completed by its slowest rank; -1: not known.
        heard: wall time of its latest record.
        present: it has ranks of the newest generation.
        lost: it was found lost, and has written nothing since.
    """

    name: str
    generation: int
    ranks: int
    step: int
    heard: float
    present: bool
    lost: bool


@dataclass(frozen=True)
class CheckpointNow:
    """The newest checkpoint of a tier: ``disk``, or ``script`` for one that the script announced."""

    tier: str
    step: int
    time: float


@dataclass(frozen=True)
class IncidentNow:
    """The latest fault that led to an action.

    Args:
        rank: -1: none can be named.
        step: -1: before the first one.
        time: wall time at which the fault was seen.
    """

    kind: str
    node: str
    rank: int
    step: int
    time: float
    reason: str
    action: str
    action_reason: str
    source: str = ""  # of the step, a StepSource


@dataclass(frozen=True)
class SlowNow:
    """A rank that slows the job now, and at what."""

    rank: int
    node: str
    slowdown: float
    activity: str


@dataclass(frozen=True)
class Now:
    """A run at this moment.

    Args:
        ranks: of the newest generation.
        nodes: all that have written a log, by name.
        step: completed by the slowest rank; -1: not known.
        source: who tells the step, a ``StepSource``; ``counted``: from 0 after each restart.
        rate: steps a second in the last minute of the generation; None: not known, or the run does not train.
        total: steps after which the script's loop ends; 0: not known.
        stepped: wall time of the record that told ``step`` first; 0: none.
        heard: wall time of the latest record; 0: none.
        launches: starts of the launcher on the node that has the most.
        faults: that led to an action, by kind.
        actions: by ``RecoveryAction``, the end of the job included.
        end: the last launcher's last word; None: it goes on, or was killed.
        starts_at: wall time before which no new workers are started; 0: nothing waits.
    """

    run_id: str = ""
    state: State = State.EMPTY
    generation: int = 0
    ranks: int = 0
    nodes: tuple[NodeNow, ...] = ()
    step: int = -1
    source: str = ""
    rate: float | None = None
    total: int = 0
    stepped: float = 0.0
    heard: float = 0.0
    launches: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    actions: Mapping[str, int] = field(default_factory=dict)
    checkpoints: tuple[CheckpointNow, ...] = ()
    saves: int = 0
    saves_lost: int = 0
    incident: IncidentNow | None = None
    slow: tuple[SlowNow, ...] = ()
    end: events.RunEnded | None = None
    starts_at: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the present rate, faults left out; None: not known."""
        if not self.rate or self.total <= 0 or self.step < 0:
            return None
        return max(0, self.total - self.step) / self.rate

    @property
    def restarts(self) -> int:
        """Generations that a fault has begun."""
        return sum(count for action, count in self.actions.items() if action != RecoveryAction.STOP.value)


@dataclass
class _Node:
    state: State = State.STARTING
    begun: int = 0  # the latest generation that was started here
    generation: int = 0
    world: int = 0
    ranks: int = 0
    step: int = -1
    source: str = ""
    stepped: float = 0.0
    heard: float = 0.0
    launches: int = 0
    points: deque[tuple[float, int]] = field(default_factory=deque)  # clocks at which the step was higher
    clock: float = 0.0  # of the latest record that told a step
    fault: events.FaultSeen | None = None  # not answered yet
    end: events.RunEnded | None = None

    def begin(self) -> None:
        """Forget the steps and the end of the launch or generation before."""
        self.step, self.source, self.stepped = -1, "", 0.0
        self.points.clear()
        self.end = None

    def reached(self, record: Record, step: int, source: str = "") -> None:
        """Note a step of the generation; steps of another source than before are not those steps."""
        if source and self.source and source != self.source:
            self.step = -1
            self.points.clear()
        self.source = source or self.source
        self.clock = record.clock
        if step > self.step or not self.points:
            self.stepped = record.time
            self.points.append((record.clock, step))
        while len(self.points) > _LEAST_POINTS and self.clock - self.points[1][0] >= RATE_SECONDS:
            self.points.popleft()
        self.step = max(self.step, step)

    @property
    def rate(self) -> float | None:
        """Steps a second up to the latest record; None once no step came for longer than that."""
        if len(self.points) < 2:
            return None
        (began, low), (ended, high) = self.points[0], self.points[-1]
        if ended <= began or self.clock - ended > max(RATE_SECONDS, ended - began):
            return None
        return (high - low) / (max(self.clock, ended) - began)


class NowFold:
    """Takes the records of a run's logs, each log in its own order, and says what the run does now."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._run_id = ""
        self._total = self._begun = 0
        self._starts_at = 0.0
        self._faults: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._saves = self._saves_lost = 0
        self._newest: dict[str, CheckpointNow] = {}
        self._passed = (-1, -1, 0.0)  # the furthest checkpoint of a generation: that, step, time
        self._incident: IncidentNow | None = None
        self._slow: dict[tuple[int, str], events.StragglerSeen] = {}
        self._lost: dict[str, float] = {}  # nodes, and when they were found lost
        self._written: dict[tuple[object, ...], None] = {}  # by another node already

    def take(self, record: Record, node: str = "") -> None:
        """Take the next record of a node's log; "": the job has one node."""
        here = self._nodes.setdefault(node, _Node())
        here.heard = max(here.heard, record.time)
        here.generation = max(here.generation, record.generation)
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, here, record)

    def now(self) -> Now:
        """Return what the run does, from the records so far."""
        if not self._nodes:
            return Now()
        newest = max(one.begun for one in self._nodes.values())
        present = {name: one for name, one in self._nodes.items() if one.begun == newest}
        slowest = min(present.values(), key=lambda one: one.step)
        generation, saved, saved_at = self._passed
        if generation != newest:
            saved = -1  # every rank has passed a checkpoint of its generation; progress is told less often
        rates = [one.rate for one in present.values()]
        ends = [one.end for one in present.values()]
        known = [rate for rate in rates if rate is not None]
        state = _joined([one.state for one in present.values()])
        last = max(present.values(), key=lambda one: one.heard)
        return Now(
            run_id=self._run_id,
            state=state,
            generation=max(one.generation for one in self._nodes.values()),
            ranks=max(one.world for one in present.values()),
            nodes=tuple(
                NodeNow(
                    *(name, one.generation, one.ranks),
                    *(max(one.step, saved) if name in present else one.step, one.heard),
                    present=name in present,
                    lost=one.heard <= self._lost.get(name, -math.inf),
                )
                for name, one in sorted(self._nodes.items())
            ),
            step=max(slowest.step, saved),
            source=slowest.source,
            rate=min(known) if len(known) == len(rates) and state is State.TRAINING else None,
            total=self._total,
            stepped=slowest.stepped if slowest.step >= saved else saved_at,
            heard=max(one.heard for one in self._nodes.values()),
            launches=max(one.launches for one in self._nodes.values()),
            faults=dict(self._faults),
            actions=dict(self._actions),
            checkpoints=tuple(self._newest.values()),
            saves=self._saves,
            saves_lost=self._saves_lost,
            incident=self._incident,
            slow=tuple(
                SlowNow(one.rank, one.node, one.slowdown, one.activity) for one in self._slow.values()
            ),
            end=last.end if None not in ends else None,
            starts_at=self._starts_at if state is State.RECOVERING else 0.0,
        )

    def _is_first(self, *key: object) -> bool:
        """Say whether no node has written this yet: two leaders may write the same."""
        if key in self._written:
            return False
        self._written[key] = None
        if len(self._written) > _REMEMBERED:
            del self._written[next(iter(self._written))]
        return True

    def _pass(self, generation: int, step: int, time: float) -> None:
        self._passed = max(self._passed, (generation, step, time), key=lambda one: one[:2])

    def _on_run(self, here: _Node, record: events.RunStarted) -> None:
        self._passed = (-1, -1, 0.0)
        self._run_id = record.run_id or self._run_id
        here.begin()
        here.state, here.fault = State.STARTING, None
        here.launches += 1
        here.world = record.world_size

    def _on_generation(self, here: _Node, record: events.GenerationStarted) -> None:
        here.begin()
        here.begun, here.world, here.ranks = record.generation, record.world_size, len(record.pids)
        if record.generation > self._begun:
            self._begun, self._starts_at = record.generation, 0.0
            self._slow.clear()

    def _on_load(self, here: _Node, record: events.Loaded) -> None:
        here.step, here.stepped = record.step, record.time
        here.points.clear()
        self._passed = (record.generation, record.step, record.time)
        if not here.begun:  # a session without a launcher: nobody else says that it trains
            here.state = State.TRAINING

    def _on_step(self, here: _Node, record: events.FirstStep | events.Progress) -> None:
        here.reached(record, record.step, record.source)
        if isinstance(record, events.FirstStep):
            here.state = State.TRAINING

    def _on_plan(self, _: _Node, record: events.StepsPlanned) -> None:
        if record.total <= _MOST_STEPS:
            self._total = record.total

    def _on_save(self, here: _Node, record: events.Saved) -> None:
        if not self._is_first("saved", record.checkpoint):
            return
        self._saves += 1
        self._newest["disk"] = CheckpointNow("disk", record.step, record.time)
        self._pass(place_of(record.checkpoint.rpartition("/")[2])[1], record.step, record.time)
        if not here.begun:
            here.state = State.TRAINING
            here.reached(record, record.step)

    def _on_own(self, _: _Node, record: events.ScriptSaved) -> None:
        self._newest["script"] = CheckpointNow("script", record.step, record.time)
        self._pass(record.generation, record.step, record.time)

    def _on_lost_save(self, _: _Node, record: events.SaveLost) -> None:
        self._saves_lost += self._is_first("save_lost", record.generation, record.step)

    def _on_fault(self, here: _Node, record: events.FaultSeen) -> None:
        here.fault = record
        if record.fault == FaultKind.LOST.value and record.rank < 0:
            self._lost[record.node] = record.time

    def _on_action(self, here: _Node, record: events.ActionTaken) -> None:
        fault, here.fault = here.fault, None
        if record.action == RecoveryAction.NONE.value:
            return
        if record.action != RecoveryAction.STOP.value:
            here.state = State.RECOVERING
        if not self._is_first(record.action, record.next_generation):
            return
        self._actions[record.action] += 1
        self._starts_at = record.time + record.wait if record.wait else 0.0
        if fault is not None:
            self._faults[fault.fault] += 1
            self._incident = IncidentNow(
                fault.fault,
                fault.node,
                fault.rank,
                fault.step,
                fault.time,
                fault.reason,
                record.action,
                record.reason,
                fault.source,
            )

    def _on_straggler(self, _: _Node, record: events.StragglerSeen) -> None:
        key = (record.rank, record.section)
        if record.state == "on":
            self._slow[key] = record
        else:
            self._slow.pop(key, None)

    def _on_end(self, here: _Node, record: events.RunEnded) -> None:
        here.end, here.state = record, State.ENDED
        here.step = max(here.step, record.step)


def _joined(states: list[State]) -> State:
    """Return the state of a job from those of its nodes: that of the node that is the least far."""
    return min(states, key=(State.RECOVERING, State.STARTING, State.TRAINING, State.ENDED, State.EMPTY).index)


_HANDLERS: dict[type[Record], Callable[[NowFold, _Node, Any], None]] = {
    events.RunStarted: NowFold._on_run,
    events.GenerationStarted: NowFold._on_generation,
    events.FirstStep: NowFold._on_step,
    events.Progress: NowFold._on_step,
    events.StepsPlanned: NowFold._on_plan,
    events.Loaded: NowFold._on_load,
    events.Saved: NowFold._on_save,
    events.SaveLost: NowFold._on_lost_save,
    events.ScriptSaved: NowFold._on_own,
    events.FaultSeen: NowFold._on_fault,
    events.ActionTaken: NowFold._on_action,
    events.StragglerSeen: NowFold._on_straggler,
    events.RunEnded: NowFold._on_end,
}
