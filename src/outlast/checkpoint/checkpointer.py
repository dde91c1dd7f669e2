"""The facade: what a session, or a script without one, saves and restores with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.content.state import LiveState
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.load.groups import AddedGroups
from outlast.checkpoint.load.restorer import Restored, Restorer
from outlast.checkpoint.policy.manifest import Identity, place_of
from outlast.checkpoint.save.engine import Engine
from outlast.checkpoint.save.rendezvous import Place
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Status
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.ports import Clock, Exchange
from outlast.recovery.policy.events import Quarantined, Record

__all__ = ["Checkpointer", "Identity", "Restored"]


class Checkpointer:
    """Saves and restores the state of one rank, together with all others.

    Every rank calls the same methods in the same order. What one rank runs into is known to all
    of them before any returns; no rank is left waiting longer than the timeout.

    Args:
        folder: the tier, or its path.
        identity: this rank.
        exchange: between the ranks.
        settings: retention, timeouts, limits.
        clock: for durations and records.
        record: takes records; called on rank 0 only.
        memory: the memory folder of this node.
        call_saver: sees to it that a writer runs, where this process is the one to start it.
        place: where this rank is; None: a node like this host, reached from it alone.
        waiting: entered around each wait for the disk.
        training: its name, where the job has several.
    """

    def __init__(
        self,
        folder: Path | DirectoryTier,
        identity: Identity,
        exchange: Exchange,
        settings: CheckpointOptions,
        clock: Clock,
        record: Callable[[Record], None],
        memory: MemoryFolder,
        call_saver: Callable[[], object],
        place: Place | None = None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        training: str = "",
    ) -> None:
        self.exchange = exchange
        tier = folder if isinstance(folder, DirectoryTier) else DirectoryTier(folder)
        rounds = Rounds(exchange, settings.timeout)
        self._around = SaveContext(
            tier, identity, rounds, settings, clock, record, training=training, waiting=waiting
        )
        self._groups = AddedGroups()
        self._engine = Engine(self._around, memory, place or Place.of("", {}, ""), call_saver)

    def stage(self, order: Order, state: Mapping[str, object]) -> bool:
        """Save while training goes on; after :meth:`restore`.

        Args:
            order: the step, and what is to become of it.
            state: what :meth:`restore` will get back, by name.

        Returns:
            Whether it is on its way; False when this save was lost and the older ones stay.

        Raises:
            UsageError: something in the state cannot be saved exactly.
            SaveFailed: too many saves in a row were lost.
        """
        return self._engine.save(order, state)

    def save(self, order: Order, state: Mapping[str, object]) -> bool:
        """Save, and return when the step is on disk, or lost; see :meth:`stage`."""
        return self.stage(replace(order, waits=True), state) and self.durable(order.step)

    def prepare(self, state: Mapping[str, object]) -> None:
        """Begin to make buffers, after the first step: by then the size of the state is known."""
        self._engine.prepare(LiveState(state))

    @property
    def ready(self) -> bool:
        """Whether a save of this rank need not wait for the pages of a buffer."""
        return self._engine.ready

    @property
    def waited(self) -> float:
        """Seconds of the latest save in which this rank waited for the others."""
        return self._engine.waited

    def changed(self, step: int, state: Mapping[str, object]) -> list[str]:
        """Return what has changed since this process saved a step; nothing where it has not saved it."""
        return self._engine.changed(step, state)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Where a save can be seen to arrive, from the tier that outlives most to the quickest."""
        beyond = ("global",) if self._around.settings.global_url and self._engine.alone else ()
        return (*beyond, "local", "memory")

    def progress(self) -> Status | None:
        """Return how far the writer is, None where it has published nothing; from any thread."""
        return self._engine.progress()

    def flush(self) -> None:
        """Have the newest complete copy in memory brought to disk, by this rank alone. From any thread."""
        self._engine.flush()

    def settle(self) -> None:
        """Wait until the writer knows of everything that was staged; before this process ends."""
        self._engine.settle()

    def close(self) -> None:
        """End the threads that stage; what was not staged by now is lost."""
        self._engine.close()

    def durable(self, step: int) -> bool:
        """Wait until a staged step is on disk; return whether it is; see :meth:`Engine.durable`."""
        return self._engine.durable(step)

    @property
    def generation(self) -> int:
        """The generation under which this rank saves."""
        return self._around.identity.generation

    @property
    def alone(self) -> bool:
        """Whether all copies are where this rank sees them: on one node, and in no global tier."""
        return not self._around.settings.global_url and self._engine.alone

    def names(self) -> list[str]:
        """Return the copies on disk and in memory, when all that was staged has become one; older ones first.

        Raises:
            CheckpointError: the writer does not answer.
        """
        found = {*self._around.tier.names(), *self._engine.names()}
        return sorted(found, key=place_of)

    def put_away(self, names: Collection[str], why: str) -> None:
        """Set copies aside so that training can go on from an older one and save the same steps again.

        Args:
            names: see :meth:`names`; every rank gives the same.
            why: one sentence for the event log.

        Raises:
            OSError: one of them cannot be moved.
        """
        around = self._around
        for name in names:
            self._engine.forget(name)
            if around.leads and name in around.tier.names():
                around.tier.quarantine(name, {"name": name, "reason": why, "time": around.clock.wall()})
                step = place_of(name)[0]
                around.record(Quarantined, step=step, checkpoint=name, reason=why)

    def restore(self, state: Mapping[str, object], avoid: Collection[str] = ()) -> Restored | None:
        """Load the newest copy that every rank can verify; every byte is, before a live tensor is touched.

        Args:
            state: the live objects, by the names they were saved under.
            avoid: copies that must not be loaded.

        Returns:
            What was loaded; None when nothing was ever saved here.

        Raises:
            NoUsableCheckpoint: copies exist and none can be used, each listed with its reason; or all that
                the run has saved are gone.
            CheckpointMismatch: a sound copy of another run, world size, model or newer format.
            UsageError: a live object cannot be restored in place.
            CheckpointError: a rank failed in a way that says nothing about the copies.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            ExchangeFailed: ranks did not answer.
        """
        state = LiveState(state)
        around = self._engine.join(state, avoid)
        restored = Restorer(around, self._groups).restore(state, avoid)
        self._engine.follow("" if restored is None else restored.name, state)
        return restored
