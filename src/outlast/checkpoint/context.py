"""What saving and restoring share: the tier, the other ranks, the clock and the event log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.policy.manifest import Identity, in_training
from outlast.checkpoint.policy.placement import Gathering
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.ports import Clock
from outlast.recovery.policy.events import Record

if TYPE_CHECKING:
    from outlast.checkpoint.load.parallel import ParallelLoad
    from outlast.checkpoint.save.buffers import Buffers

OUTAGE_SECONDS = 20.0  # for which a file system may refuse what is asked for at a start


@dataclass(frozen=True)
class SaveContext:
    """One rank's ties to the world.

    Args:
        tier: where durable copies are.
        identity: this rank.
        rounds: with the other ranks.
        settings: retention, timeouts, limits.
        clock: for durations and records.
        sink: takes records; rank 0 alone uses it.
        memory: the memory tier of this node, which is looked into first.
        replicas: copies of other nodes' parts that this node has in memory.
        torn: copies in memory of which a part is missing or that must not be loaded, newer than what can be.
        training: its name; empty: the job has one.
        threads: that this rank may use while training stands still.
        parallel: lets ranks read shared files together; None: this rank is alone.
        buffers: the pool that lends a buffer to the load of this rank's own file; None: there is none.
        waiting: entered around a wait for the disk, which is held against ``settings.timeout`` alone.
    """

    tier: DirectoryTier
    identity: Identity
    rounds: Rounds
    settings: CheckpointOptions
    clock: Clock
    sink: Callable[[Record], None]
    memory: DirectoryTier | None = None
    replicas: tuple[DirectoryTier, ...] = ()
    torn: tuple[Gathering, ...] = ()
    training: str = ""
    threads: int = 1
    parallel: ParallelLoad | None = None
    buffers: Buffers | None = None
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def tiers(self) -> tuple[DirectoryTier, ...]:
        """All tiers, the fastest first."""
        return (self.tier,) if self.memory is None else (self.memory, *self.replicas, self.tier)

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once for all of them."""
        return self.identity.rank == 0

    def record(self, kind: type[Record], **fields: Any) -> None:
        """Write a record of the leading rank; the others keep quiet."""
        if self.leads:
            clock = self.clock
            generation = self.identity.generation
            named = in_training(self.training, fields)
            self.sink(kind(time=clock.wall(), clock=clock.monotonic(), generation=generation, **named))
