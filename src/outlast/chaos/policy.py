"""Scenarios: which faults are injected and when, and the machine that decides which one is due.

A scenario is data: a tuple of :class:`Injection`, made one after the other. It contains no times: an
injection waits for observed progress, so that one seed gives one sequence of faults on a fast host and on a
slow one. Random choices are made by ``draw``, a function that returns numbers in [0, 1) from a seed.

After an injection that ends or stops a process, the next one waits until a newer generation has completed a
step: faults within a recovery have to be requested (``Condition.AT_ONCE``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


JITTER = 0.2  # Megatron Bridge, simulated_fault_base_delay: delay = base + U(0, 0.2) * base
RANDOM = "random"  # Megatron Bridge, simulated_fault_type: one of the next two
RANDOM_CHOICES = ("rank_killed", "rank_hung")
DEMO_LAST_STEP = 220  # the last injection of the demo waits for this step at the latest


class Target(str, Enum):
    """What an injection is made to."""

    WORKER = "worker"
    AGENT = "agent"
    CHECKPOINT = "checkpoint"


class Place(str, Enum):
    """From where an injection can be made."""

    OUTSIDE = "outside"  # by anybody: a signal, a changed file
    INSIDE = "inside"  # only within the worker's own process
    CUDA = "cuda"  # within the worker's own process, on a CUDA device


@dataclass(frozen=True)
class FaultSpec:
    """One line of the table of faults."""

    target: Target
    place: Place
    effect: str


_WORKER_OUTSIDE = (Target.WORKER, Place.OUTSIDE)
_WORKER_INSIDE = (Target.WORKER, Place.INSIDE)
_CHECKPOINT = (Target.CHECKPOINT, Place.OUTSIDE)

FAULTS: dict[str, FaultSpec] = {
    # Megatron Bridge, simulated_fault_type
    "rank_killed": FaultSpec(*_WORKER_OUTSIDE, "SIGKILL to a worker"),
    "rank_hung": FaultSpec(*_WORKER_OUTSIDE, "SIGSTOP to a worker: alive, but silent"),
    # NVRx, shared_utils/inject_fault.py
    "GPU_ERROR": FaultSpec(Target.WORKER, Place.CUDA, "an index out of bounds in a kernel"),
    "GPU_SLEEP": FaultSpec(Target.WORKER, Place.CUDA, "a kernel that does not end"),
    "WORKLOAD_EXC": FaultSpec(*_WORKER_INSIDE, "an exception out of a function of the script"),
    "ASYNC_EXC": FaultSpec(*_WORKER_INSIDE, "an exception set in the main thread by another one"),
    "SIGNAL_EXC": FaultSpec(*_WORKER_INSIDE, "an exception raised by a handler of SIGUSR1"),
    "OS_ABORT": FaultSpec(*_WORKER_OUTSIDE, "SIGABRT"),
    "LOCK_GIL": FaultSpec(*_WORKER_INSIDE, "the interpreter's lock is taken and never given back"),
    "SEGFAULT": FaultSpec(*_WORKER_OUTSIDE, "SIGSEGV"),
    "SIGINT": FaultSpec(*_WORKER_OUTSIDE, "SIGINT to a worker"),
    "SIGKILL": FaultSpec(*_WORKER_OUTSIDE, "SIGKILL to a worker"),
    "SIGTERM": FaultSpec(*_WORKER_OUTSIDE, "SIGTERM to a worker"),
    "SIGSTOP": FaultSpec(*_WORKER_OUTSIDE, "SIGSTOP to a worker"),
    # outlast
    "agent_killed": FaultSpec(Target.AGENT, Place.OUTSIDE, "SIGKILL to the agent of a node"),
    "bit_flipped": FaultSpec(*_CHECKPOINT, "one bit of the newest checkpoint is another one"),
    "page_zeroed": FaultSpec(*_CHECKPOINT, "4096 bytes of the newest checkpoint are zero"),
    "file_truncated": FaultSpec(*_CHECKPOINT, "a file of the newest checkpoint has lost its end"),
}


class Condition(str, Enum):
    """What must have been observed, besides the step, before an injection is due."""

    RUNNING = "running"  # the newest generation completes steps
    TIMEOUTS_LEARNED = "timeouts-learned"  # hangs are found by what was learned, not by first guesses
    JUST_SAVED = "just-saved"  # a checkpoint was committed since the last look
    AT_ONCE = "at-once"  # directly after the injection before it


@dataclass(frozen=True)
class Injection:
    """One fault to be made.

    Args:
        fault: a key of FAULTS.
        rank: whose worker; -1 where the target is not a worker.
        after_step: not before every rank has completed that many steps.
        condition: what else must have been observed.
        seed: chooses file, bit and the like.
    """

    fault: str
    rank: int
    after_step: int
    condition: Condition = Condition.RUNNING
    seed: int = 0


@dataclass(frozen=True)
class Observation:
    """What was read of the run so far.

    Args:
        generation: the newest one.
        step: steps that every rank of it has completed.
        running: it has completed a step.
        timeouts_learned: learned timeouts are in force.
        saves: checkpoints committed since the run began.
    """

    generation: int
    step: int
    running: bool
    timeouts_learned: bool
    saves: int


class Scenario:
    """Says which of its injections are due.

    Args:
        injections: in the order in which they are made.
        patience: seconds within which each one must become due.
    """

    def __init__(self, injections: tuple[Injection, ...], patience: float) -> None:
        self._left = list(injections)
        self._patience = patience
        self._since: float | None = None
        self._generation = -1  # of the newest fault that a newer generation has to answer
        self._saves = -1

    @property
    def left(self) -> tuple[Injection, ...]:
        """Injections that have not been due yet."""
        return tuple(self._left)

    def handle(self, seen: Observation, now: float) -> tuple[Injection, ...]:
        """Return what is to be injected now, in order; each injection is returned once."""
        if self._since is None:
            self._since = now
        due: list[Injection] = []
        while self._left and (
            self._is_due(self._left[0], seen) or (due and self._left[0].condition is Condition.AT_ONCE)
        ):
            due.append(self._left.pop(0))
            if FAULTS[due[-1].fault].target is not Target.CHECKPOINT:
                self._generation = seen.generation
            self._since = now
        self._saves = seen.saves
        return tuple(due)

    def _is_due(self, injection: Injection, seen: Observation) -> bool:
        if not seen.running or seen.generation <= self._generation or seen.step < injection.after_step:
            return False
        if injection.condition is Condition.TIMEOUTS_LEARNED:
            return seen.timeouts_learned
        if injection.condition is Condition.JUST_SAVED:
            return 0 <= self._saves < seen.saves
        return True

    def deadline(self) -> float | None:
        """Return when the next injection is overdue; None when all were made or none was asked for."""
        return None if self._since is None or not self._left else self._since + self._patience

    def tick(self, now: float) -> str:
        """Return why the scenario cannot be carried out, "" while it can."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return ""
        waiting = self._left[0]
        return (
            f"{waiting.fault} was not due within {self._patience:g} s: "
            f"step {waiting.after_step} and condition {waiting.condition.value!r} were not observed"
        )


def delay(base: float, draw: Callable[[], float]) -> float:
    """Return seconds to wait before an injection: base + U(0, 0.2) * base (Megatron Bridge)."""
    return base + JITTER * base * draw()


def concrete(fault: str, draw: Callable[[], float]) -> str:
    """Return the fault itself, and for ``random`` one that chance picks."""
    return RANDOM_CHOICES[int(draw() * len(RANDOM_CHOICES))] if fault == RANDOM else fault


def demo(world_size: int, save_interval: int, draw: Callable[[], float]) -> tuple[Injection, ...]:
    """Return the demo's scenario: a crash, a hang, a bad checkpoint before a crash, a lost agent.

    Ranks, distances and the flipped bit are drawn. The hang comes half way between two saves, so
    that it meets a step: a save is rare, and its timeout is learned later.
    """
    step = 0

    def later(least: int) -> int:
        nonlocal step
        step += least + int(draw() * least * 0.5)
        return step

    def rank() -> int:
        return int(draw() * world_size)

    def between_saves(at: int) -> int:
        return at - at % save_interval + save_interval // 2

    return (
        Injection("rank_killed", rank(), later(30)),
        Injection("rank_hung", rank(), between_saves(later(40)), Condition.TIMEOUTS_LEARNED),
        Injection("bit_flipped", -1, later(40), Condition.JUST_SAVED, seed=int(draw() * 2**31)),
        Injection("rank_killed", rank(), step, Condition.AT_ONCE),
        Injection("agent_killed", -1, later(35)),
    )
