"""One rank's part in saving and restoring, for a session or for a script without one.

A save captures the state, compares what ranks share of it, and stages it in memory; the writer of the node
brings it to disk while training continues.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from outlast import _torch_compat
from outlast.agreement.worker.reports import Rounds
from outlast.checkpoint.content.memory import share_of_processors
from outlast.checkpoint.content.state import Capturer, LiveState
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.load.fetching import gather_parts
from outlast.checkpoint.load.groups import AddedGroups
from outlast.checkpoint.load.parallel import ParallelLoad
from outlast.checkpoint.load.restorer import Restored, Restorer
from outlast.checkpoint.policy.manifest import (
    Identity,
    alike_files,
    copy_name,
    parse_copy_name,
    place_of,
    rank_files,
)
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.save.rendezvous import POLL, Place, SaveRendezvous, introduce, poll, with_room
from outlast.checkpoint.save.sharing import NO_PART, Sharing, compare, digesters
from outlast.checkpoint.save.staging import Fingerprint, Order, RankLayout, Stager, Taken
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, Status
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer_process import lock_holder
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointError, SaveFailed
from outlast.ports import Clock, Exchange
from outlast.recovery.policy.events import Note, Quarantined, Record, SaveLost

__all__ = ["Checkpointer", "Identity", "Restored"]

_LOOK = 0.25  # seconds between two looks into the durable tier by a rank that waits for the writer

_MOMENTS = 2  # of Adam; an optimizer that has not stepped yet will hold so many tensors for each parameter
_SLOW = 2.0  # seconds of waiting for a buffer after which a slow disk is reported
_OWNER_SECONDS = 5.0  # for which a removed memory folder is waited for
_ROOM_SECONDS = 30.0  # that a save which is due on disk waits for room in memory
_NOTICEABLE = 0.1  # seconds; waiting longer for a buffer is worth a line in the event log


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
        self._memory = memory
        self._place = place or Place.of("", {}, "")
        self._call_saver = call_saver
        self._failures, self._why = 0, ""
        self._failing = self._failing_since = 0.0  # seconds from the first loss in a row, and its time
        self._sharing: Sharing | None = None
        self._shared: frozenset[str] = frozenset()  # keys of tensors that all ranks hold alike
        self._staged: Order | None = None
        self._began = ""  # the copy that this generation began from
        self._capture, self._layout = Capturer().capture, RankLayout(identity)
        self._waits_since, self._reported = 0.0, False  # for a buffer
        self._closing = contextlib.ExitStack()
        with_room(self._around, memory.make, settings.timeout)

    @property
    def generation(self) -> int:
        """The generation under which this rank saves."""
        return self._around.identity.generation

    @property
    def alone(self) -> bool:
        """Whether all copies are where this rank sees them: on one node, and in no global tier."""
        return not self._around.settings.global_url and self._members.together is None

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers in which a save is seen to arrive, from the one that outlives most to the fastest."""
        beyond = self._around.settings.global_url and self._members.together is None
        return (*(("global",) if beyond else ()), "local", "memory")

    def restore(self, state: Mapping[str, object], avoid: Collection[str] = ()) -> Restored | None:
        """Load the newest copy that every rank can verify, byte for byte, before a live tensor changes.

        Args:
            state: the live objects, by the names they were saved under.
            avoid: copies that must not be loaded.

        Returns:
            What was loaded; None when nothing was ever saved here.

        Raises:
            NoUsableCheckpoint: copies exist and none can be used, each listed with its reason; or all that
                the run has saved are gone.
            CheckpointMismatch: a sound copy of another run, world size, model or newer format.
            UsageError: a live object cannot be restored in place, something in the state cannot be saved
                exactly, or the nodes cannot save together.
            CheckpointError: a rank failed in a way that says nothing about the copies, the writer does not
                answer, or a rank cannot stage.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            ExchangeFailed: ranks did not answer.
        """
        state = LiveState(state)
        around = self._join(state, avoid)
        restored = Restorer(around, state, avoid, self._groups).restore()
        self._follow("" if restored is None else restored.name, state)
        return restored

    def _join(self, state: Mapping[str, object], avoid: Collection[str]) -> SaveContext:
        """Meet the other ranks, and have the writer of this node serve them; see :class:`SaveRendezvous`.

        Returns:
            The surroundings, with the tiers in memory.
        """
        around, identity = self._around, self._around.identity
        meeting = SaveRendezvous(around, self._memory, self._place, self._call_saver)
        self._staged = None  # of the session before; its copies may be lost
        self._shared, self._sharing = frozenset(), None
        self._compared = identity.world_size == 1 or not around.settings.ckpt_fully_parallel_save
        members = self._members = meeting.hold(lambda: self._expected(state), avoid)
        self._threads = share_of_processors(len(members.ranks))
        self._speaks = identity.rank == members.ranks[0]
        self._stage = stage = Stage(members.stage, members.private)
        self._limit = meeting.buffers
        self.close()  # after a rollback, else two threads would make buffers for one pool
        self._buffers = self._buffers_of(rank_files(identity.rank, identity.world_size)[0])
        self._stager = Stager(
            self._memory,
            identity,
            members.ranks,
            self._buffers,
            self._nudge,
            self._threads,
            around.settings.staging == "lazy",
        )
        self._closing.callback(self._stager.close)
        around = replace(around, memory=stage.tier, threads=self._threads, buffers=self._buffers)
        node, credentials = self._place.node, self._place.credentials
        if identity.world_size > 1:
            around = replace(around, parallel=ParallelLoad(around, stage, members, node, credentials))
        if self._speaks:
            stage.drop_landing()  # of a generation that was killed
        if members.together is None and not meeting.has_parts:
            return around
        torn = gather_parts(around, stage, members, node, credentials)
        return replace(around, replicas=(stage.joined, *stage.replica_tiers()), torn=torn)

    def _follow(self, loaded: str, state: Mapping[str, object]) -> None:
        """Report to the writer what was loaded, and have the optimizers wait for lazy staging."""
        around, stager = self._around, self._stager
        self._members = replace(self._members, loaded=loaded)
        if place_of(loaded)[1] != around.identity.generation:  # else it loaded a copy of its own
            self._began = loaded
        stager.began = self._began
        if self._speaks:
            introduce(around, self._memory, self._members, around.settings.timeout)
            self._stage.drop_joined()
            self._stage.drop_landing(0 if self._compared else self._limit)
            if self._compared:  # the ranks share no files
                self._stage.drop_pools(0)
        if not stager.lazy:
            return
        if _torch_compat.has_cuda_graph():
            stager.lazy = False
            around.record(
                Note,
                reason="staging is eager: a CUDA graph was captured before session.restore, and its"
                " steps of an optimizer cannot be noticed; restore before the capture, or set"
                ' staging = "eager"',
            )
        for name, holder in state.items():
            if isinstance(holder, torch.optim.Optimizer):
                self._wait_before_steps(name, holder)

    def _wait_before_steps(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer wait until what lazy staging copies is copied."""
        steppers = _torch_compat.steppers_of(optimizer)
        for one in steppers:
            one.register_step_pre_hook(lambda *_: self._stager.until_copied())
        if not steppers:
            self._stager.lazy = False
            self._around.record(
                Note,
                reason=f"staging is eager: {name}, a {type(optimizer).__qualname__}, has no hooks before a"
                " step, and neither has an optimizer in it",
            )

    def prepare(self, state: Mapping[str, object]) -> None:
        """Begin to make buffers, after the first step: by then the size of the state is known.

        Before that, the ranks find what all of them hold alike, if every optimizer has its state by now;
        otherwise they do so at the first save.
        """
        state = LiveState(state)
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        if not self._compared:
            sized = all(
                one.state or not any(group["params"] for group in one.param_groups) for one in optimizers
            )
            agreed = self._around.rounds.hold("sized", lambda: {"sized": sized})
            if all(report.data["sized"] for report in agreed.reports):
                self._share(state)
        self._buffers.prepare_beside(self._expected(state))

    def _expected(self, state: Mapping[str, object]) -> int:
        """Return how large this rank's file will be once every optimizer has stepped."""
        nbytes = self._layout.of(self._capture(state), self._shared, 0).nbytes
        for holder in state.values():
            if isinstance(holder, torch.optim.Optimizer) and not holder.state:
                groups = (one for group in holder.param_groups for one in group["params"])
                nbytes += _MOMENTS * sum(one.numel() * one.element_size() for one in groups)
        return nbytes

    def _buffers_of(self, file: str) -> Buffers:
        """Return the buffers of a file, until the next session."""
        found = Buffers(self._stage, self._members.session, file, self._limit, self._around.waiting)
        self._closing.callback(found.close)
        return found

    def _share(self, state: Mapping[str, object]) -> None:
        """Find what all ranks hold alike, and have each write a part of it from now on."""
        around, members = self._around, self._members
        self._compared = True
        lasting = {name: one for name, one in state.items() if not getattr(one, "outlast_optional", False)}
        spread = digesters(self._threads).map
        held = compare(around, lasting, spread)
        nodes = (
            (members.ranks,) if members.together is None else (one.ranks for one in members.together.nodes)
        )
        files = min(len(held), *map(len, nodes))
        if self._speaks:
            self._stage.drop_pools(files)
        if not held:
            return
        self._shared = frozenset(held)
        self._sharing = sharing = Sharing(
            around,
            held,
            files,
            members.ranks.index(around.identity.rank),
            lambda number, count: self._buffers_of(alike_files(number, count)[0]),
            spread,
        )
        self._buffers.hand_over(sharing.buffers)
        if sharing.buffers is not None:
            sharing.buffers.prepare_beside(sharing.nbytes)
        nbytes = sum(one.numel() * one.element_size() for one in held.values())
        around.record(
            Note,
            reason=f"{len(held)} tensor(s) of {nbytes >> 20} MiB are the same on all ranks: each is written"
            " once a node; digests are compared at every save",
        )

    @property
    def waited(self) -> float:
        """Seconds of the latest save in which this rank waited for the others."""
        return 0.0 if self._sharing is None else self._sharing.waited

    @property
    def ready(self) -> bool:
        """Whether a save of this rank need not wait for the pages of a buffer."""
        shared = None if self._sharing is None else self._sharing.buffers
        return self._buffers.ready and (shared is None or shared.ready)

    def stage(self, order: Order, state: Mapping[str, object]) -> bool:
        """Save while training goes on; after :meth:`restore`.

        A step is staged once: a later order for it can only send the same state to further tiers.

        Args:
            order: the step, and where its state goes.
            state: what :meth:`restore` will get back, by name.

        Returns:
            Whether the state is on its way; False: this save was lost, and the older copies stay.

        Raises:
            UsageError: something in the state of a rank cannot be saved exactly.
            SaveFailed: too many saves in a row were lost.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            ExchangeFailed: ranks that share tensors did not answer.
        """
        around, timeout = self._around, self._around.settings.timeout
        if not self._compared:
            self._share(state)
        before = self._staged
        again = before if before is not None and before.step == order.step else None
        began = time.monotonic()
        try:  # before anything that may fail on this rank alone: the others wait for it
            taken = None if again is not None else self._take(order, state)
        except OSError as error:
            return self._lost(order, str(error), time.monotonic() - began)
        self._keep_saver()
        self._require_hope(self._memory.status())
        # the rank that writes the table may have ended, with the folder's owner: nobody would remove the rest
        if not poll(self._memory.introduced, _OWNER_SECONDS):
            return self._lost(
                order, f"{self._memory.root} is gone, and this node has no writer", _OWNER_SECONDS
            )
        if again is not None:
            return self._order_more(again, order)
        assert taken is not None
        self._staged = None
        began, self._waits_since, self._reported = time.monotonic(), 0.0, False
        try:
            self._stager.fence()  # an error of the save before is no reason to try this one again
            if before is not None:  # only now it is known that its record is there
                self._failures = 0
            patience = timeout if order.urgent else _ROOM_SECONDS if order.durable else 0.0
            waited = with_room(around, lambda: self._stager.stage(taken, timeout), patience)
            why = f"no buffer came free within {timeout:g} s: the disk takes less than is saved"
        except OSError as error:
            waited, why = None, str(error)
        if waited is None:
            return self._lost(order, why, time.monotonic() - began)
        self._staged, self._fingerprint = order, Fingerprint.of(taken.captured)
        if waited > _NOTICEABLE:
            around.record(
                Note,
                reason=f"step {order.step} waited {waited:.2f} s for a free checkpoint buffer: the disk is"
                " slow, or saves come faster than it takes them; a longer save interval or more buffers help",
            )
        return True

    def save(self, order: Order, state: Mapping[str, object]) -> bool:
        """Save, and return when the step is on disk, or lost; see :meth:`stage`."""
        return self.stage(replace(order, waits=True), state) and self.durable(order.step)

    def _take(self, order: Order, state: Mapping[str, object]) -> Taken:
        """Capture a state, and compare what ranks share of it; every rank calls it for the same orders."""
        began, sharing = time.monotonic(), self._sharing
        if sharing is None:
            captured, share = self._capture(state), NO_PART
        else:
            captured, share = sharing.share(self._capture, state, order.step)
        layout = self._layout.of(captured, share.borrowed, order.step)
        return Taken(order, state, captured, layout, share, began)

    def changed(self, step: int, state: Mapping[str, object]) -> list[str]:
        """Return what has changed since this process saved a step; nothing where it has not saved it."""
        if self._staged is None or self._staged.step != step:
            return []
        return self._fingerprint.changed(self._capture(state))

    def _order_more(self, first: Order, order: Order) -> bool:
        """Order that a staged state goes to further tiers, if it is due there."""
        began = time.monotonic()
        session, urgent = self._members.session, first.urgent or order.urgent
        try:
            self._stager.fence()
            if order.durable and (not first.durable or urgent > first.urgent):
                wish = {"step": order.step, "durable": True, "urgent": urgent, "why": order.why}
                wish["waits_since"] = time.monotonic() if order.waits else None
                self._stage.leave_wish(copy_name(order.step, self.generation), session, wish)
        except OSError as error:
            self._staged = None
            return self._lost(order, str(error), time.monotonic() - began)
        self._staged = replace(first, durable=first.durable or order.durable, urgent=urgent)
        self._memory.ring()
        return True

    def _nudge(self) -> None:
        """Wake the writer that a save waits for, and report a long wait for a buffer."""
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _SLOW and not self._reported:
            self._reported = True
            around = self._around
            why = f"the disk is slow ({around.tier.folder})"
            if not lock_holder(self._memory.lock):
                why = f"no checkpoint writer is at work in {self._memory.root}"
            around.record(
                Note,
                reason=f"a save waits for a free checkpoint buffer: {why};"
                f" it waits up to checkpoints.timeout, {around.settings.timeout:g} s",
            )
        self._keep_saver()
        self._memory.ring()

    def _keep_saver(self) -> None:
        """Ensure that a writer runs and knows the ranks, also after the memory folder was removed."""
        if not self._speaks:
            return
        self._call_saver()
        if not self._memory.introduced():
            with contextlib.suppress(SaveFailed):  # tried again at the next save
                introduce(self._around, self._memory, self._members, 0.0)

    def _lost(self, order: Order, why: str, seconds: float) -> bool:
        now = time.monotonic()
        self._failing_since = self._failing_since if self._failures else now
        self._failures, self._failing = self._failures + 1, now - self._failing_since
        self._why = why
        self._around.record(
            SaveLost, step=order.step, seconds=seconds, reason=f"{why}; the older checkpoints stay"
        )
        return False

    def _require_hope(self, status: Status | None) -> None:
        settings, own = self._around.settings, (self._failures, self._failing, self._why)
        disk = (0, 0.0, "") if status is None else (status.failures, status.failing, status.error)
        for failures, seconds, why in (disk, own):
            if failures >= settings.max_failed_saves and seconds >= settings.max_failed_seconds:
                raise SaveFailed(
                    f"{failures} saves in a row, over {seconds:.0f} s, could not be written to"
                    f" {self._around.tier.folder}: {why}; the older checkpoints stay; the job stops rather"
                    " than train unsaved"
                )

    def progress(self) -> Status | None:
        """Return how far the writer is, None where it has published nothing; from any thread.

        Without a launcher the writer belongs to rank 0 and ends with it; then the copies on disk count.
        """
        status = self._memory.status()
        if status is None and not self._memory.root.exists():
            found = [at for name in self._around.tier.names() if (at := parse_copy_name(name))]
            steps = [step for step, generation in found if generation == self.generation]
            return Status(0, durable_step=max(steps)) if steps else None
        return status

    def flush(self) -> None:
        """Have the newest complete copy in memory brought to disk, by this rank alone. From any thread."""
        self._memory.ask_to_flush()

    def settle(self) -> None:
        """Wait until the writer knows of everything that was staged; before this process ends."""
        with contextlib.suppress(OSError):
            self._stager.fence()

    def close(self) -> None:
        """Complete the copy that is under way, and end the threads that stage; other states are lost."""
        self._closing.close()

    def durable(self, step: int) -> bool:
        """Wait until a step that was staged is on disk; return whether it is.

        Raises:
            SaveFailed: too many durable saves in a row were lost.
            CheckpointError: the writer does not answer.
        """
        self.settle()
        with self._around.waiting():
            return self._until_durable(step)

    def _until_durable(self, step: int) -> bool:
        deadline = time.monotonic() + self._around.settings.timeout
        wanted, look = copy_name(step, self.generation), time.monotonic() + _LOOK
        while True:
            status = self._memory.status()
            if status is not None and status.durable_step >= step:
                return True
            if status is not None and status.lost_step >= step:
                self._require_hope(status)
                return False
            if time.monotonic() > look:  # the writer may have ended since, with its owner
                look += _LOOK
                with contextlib.suppress(OSError):
                    if wanted in self._around.tier.names():
                        return True
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"step {step} is not on disk after {self._around.settings.timeout:g} s; it is staged in"
                    f" {self._memory.root}"
                )
            self._keep_saver()
            time.sleep(POLL)

    def names(self) -> list[str]:
        """Return the copies on disk and in memory, when all that was staged has become one; older ones first.

        Raises:
            CheckpointError: the writer does not answer.
        """
        on_disk = self._around.tier.names()
        self.settle()

        def committed() -> bool:
            self._keep_saver()
            return all(session != self._members.session for _, session in self._stage.stagings())

        if not poll(committed, self._around.settings.timeout):
            raise CheckpointError(
                f"what is staged in {self._memory.root} was not committed to memory in time"
            )
        return sorted({*on_disk, *self._stage.tier.names()}, key=place_of)

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
            self._staged = None
            with contextlib.suppress(OSError):  # another rank of this node may do so at the same time
                self._stage.tier.discard(name)
            if around.leads and name in around.tier.names():
                around.tier.quarantine(name, {"name": name, "reason": why, "time": around.clock.wall()})
                step = place_of(name)[0]
                around.record(Quarantined, step=step, checkpoint=name, reason=why)
