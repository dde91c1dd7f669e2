"""The protocols between outlast and what can be replaced: clock, exchange, and the four extension points.

A :class:`Detector` reports faults, a :class:`Tier` holds copies of checkpoints, a :class:`Scheduler` gives
nodes and a :class:`Framework` owns the training loop. Other packages register theirs by entry points
(:mod:`outlast.plugins`); ``docs/how-to/add-a-*.md`` shows one of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from outlast.errors import OutlastError
from outlast.recovery.policy.events import Fault, FaultKind


class ExchangeFailed(OutlastError):
    """Ranks did not answer in an exchange, or the store between them is gone."""


class Stateful(Protocol):
    """An object that returns its state and takes it back: a model, an optimizer, a scheduler, a sampler."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Replace the state by one that ``state_dict`` returned."""
        ...


class Clock(Protocol):
    """Two readings of time; neither compares with another host's."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start, for durations and deadlines."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch, for display and for what outlives a process."""
        ...


class Exchange(Protocol):
    """A round in which every rank hands in a text and gets everyone's.

    All ranks call :meth:`gather` in the same order with the same topics.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        ...

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        """Return every rank's value, ordered by rank.

        Args:
            topic: what the round is about; appears in errors.
            value: what this rank says.
            timeout: seconds to wait for the others.

        Raises:
            ExchangeFailed: names the ranks that did not answer in time.
        """
        ...


@dataclass(frozen=True)
class RankView:
    """A living rank of this node, as a detector sees it.

    Args:
        rank: its number in the job.
        pid: of its process.
        step: completed steps; -1: none is known.
    """

    rank: int
    pid: int
    step: int


@dataclass(frozen=True)
class NodeView:
    """One generation on one node, as a detector sees it.

    Args:
        node: name of the node.
        generation: number of the generation.
        step: completed steps of its slowest rank; -1: none is known.
        ranks: the ranks of this node that live.
    """

    node: str
    generation: int
    step: int
    ranks: tuple[RankView, ...] = ()

    def fault(
        self, reason: str, rank: int = -1, kind: FaultKind = FaultKind.CRASH, signature: str = ""
    ) -> Fault:
        """Return a fault of this generation.

        Args:
            reason: one sentence for the event log.
            rank: the culprit; -1: none can be named.
            kind: decides what is tried against it; see the fault model.
            signature: equal for equal causes; default the reason.
        """
        return Fault(kind, self.node, rank, self.generation, self.step, reason, signature or reason)


class Detector(Protocol):
    """Looks for faults on one node while a generation runs; it decides nothing.

    The agent polls its own detectors (ended processes, hangs) in its loop. A detector of the entry point
    group ``outlast.detectors`` (a callable without arguments that returns it) has a thread of its own in the
    agent's process, where it is also imported and made: it may read files or ask a driver, and must not
    import torch. If it raises, or a call takes longer than 30 seconds, it is disabled with a note; the job
    goes on without it.
    """

    @property
    def name(self) -> str:
        """What notes and evidence call it."""
        ...

    def poll(self, now: float, node: NodeView) -> Sequence[Fault]:
        """Return the faults found since the last call.

        A fault of an older generation is dropped, and of several faults in one generation the first counts.

        Args:
            now: monotonic seconds.
            node: what runs on this node.
        """
        ...

    def deadline(self, now: float) -> float:
        """Return the monotonic time at which to poll next at the latest; infinite: none."""
        ...


class StoredCopy(Protocol):
    """An open copy of a checkpoint: named files, written once."""

    def read(self, file: str, nbytes: int | None = None) -> bytes:
        """Return a small file's content; raises as :meth:`stream` does."""
        ...

    def require(self, file: str, nbytes: int) -> object:
        """Check that a file is there with its size; raises as :meth:`stream` does."""
        ...

    def stream(self, file: str, nbytes: int | None, take: Callable[[memoryview], None]) -> None:
        """Give a file's content away in order, in parts of any size.

        Args:
            file: its name.
            nbytes: the size that it must have; None: any.
            take: is called with each part, which is valid during the call.

        Raises:
            DamagedCopy: it is missing, or of another size.
            OSError: the tier did not answer, or refused.
        """
        ...


class Tier(Protocol):
    """Holds whole copies of checkpoints, by name.

    The durable folder of a run, folders beyond it and object stores are tiers. A tier of the entry point
    group ``outlast.tiers`` is registered under a URL's scheme, and its callable is given the URL and the
    mapping ``global_options``: ``global_url = "vault://..."`` has copies go there and come back. Checkpoints
    are digested before they go there and after they come back; a tier verifies nothing. The calls of one
    process come from one thread at a time: of the checkpoint writer while training goes on, of rank 0 at a
    restore. They may take as long as the transfer does. An OSError says that the tier does not answer or
    refuses: a save is noted as not done there, a restore goes on with what other tiers have.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def names(self) -> list[str]:
        """Return the names of the copies that are whole and not set aside."""
        ...

    def open(self, name: str) -> AbstractContextManager[StoredCopy]:
        """Open a copy for reading; OSError: it is not there."""
        ...

    def add(self, name: str, *groups: Mapping[str, memoryview | bytes]) -> None:
        """Write a whole copy; only when all of it is stored does its name appear.

        Args:
            name: of the copy.
            groups: files by name; each group is stored before the next one, and the last file is COMMIT.
        """
        ...

    def discard(self, name: str) -> None:
        """Remove a copy."""
        ...

    def quarantine(self, name: str, reason: dict[str, Any]) -> str:
        """Set a copy aside with the reason, so that it is not listed; return its name there."""
        ...


@dataclass(frozen=True)
class Allocation:
    """What a scheduler has given a job, as one of its nodes sees it.

    Args:
        job: the scheduler's id of the job; the same after a requeue.
        nodes: number of nodes.
        node_rank: place of this node, from 0.
        node: name of this node; empty: the host's.
        endpoint: "host:port" at which the agents meet; needed with several nodes.
        ends: when the scheduler ends the job, seconds since the epoch; infinite: not known.
        grace: seconds from the scheduler's signal to the kill; 0: not known.
    """

    job: str
    nodes: int = 1
    node_rank: int = 0
    node: str = ""
    endpoint: str = ""
    ends: float = math.inf
    grace: float = 0.0


class Scheduler(Protocol):
    """Gives a job its nodes, and takes it back into its queue.

    ``outlast run --scheduler NAME`` asks the one of that name: Slurm, Kubernetes, Ray, or one of the entry
    point group ``outlast.schedulers`` (a callable without arguments that returns it). It is called in the
    launcher's main thread before the agent starts and after it has ended; it has no bound on time but the
    user's patience, and an exception ends the command.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def detect(self, environment: Mapping[str, str]) -> Allocation | None:
        """Return what the environment says of the job; None: this process is in none of this scheduler's."""
        ...

    def requeue(self, allocation: Allocation, reason: str) -> int:
        """Ask for the job to be started again; return the exit code with which this process has to end.

        It is called on node 0 alone, at most as often as the budget of requeues allows.
        """
        ...


class Loop(Protocol):
    """What a framework tells of its loop; all calls come from the main thread of every rank."""

    @property
    def should_stop(self) -> bool:
        """Whether the loop has to end now: the state is saved; equal on every rank."""
        ...

    def step_done(self, step: int) -> int:
        """Take note of so many completed steps, and save if that is due.

        Returns:
            The completed steps from which the loop goes on: ``step``, or fewer after a rollback.
        """
        ...

    def saved(self, step: int) -> None:
        """Take note that a checkpoint of the framework's own exists at a step; rank 0's call counts."""
        ...


class Framework(Protocol):
    """A library that owns the training loop, made known to outlast.

    :func:`outlast.integrations.frameworks.follow` asks the frameworks of the entry point group
    ``outlast.frameworks`` (a callable without arguments that returns one), in the order of their names. It
    runs on the main thread of every rank, before training; an exception is the script's.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def owns(self, trainer: object) -> bool:
        """Say whether an object is a trainer of this framework; imports nothing that the script has not."""
        ...

    def state(self, trainer: object) -> Mapping[str, Any]:
        """Return what is saved and restored, by name; empty: the framework has checkpoints of its own."""
        ...

    def resume(self, trainer: object, step: int) -> None:
        """Have the trainer go on after so many completed steps; its state is loaded already."""
        ...

    def attach(self, trainer: object, loop: Loop) -> None:
        """Have the trainer call ``loop.step_done`` after each step, and end where ``loop.should_stop``."""
        ...
