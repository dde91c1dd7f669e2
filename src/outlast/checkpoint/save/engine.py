"""One rank's part in saving while training continues, and after which steps it saves in memory.

Rank 0 measures the time of a step and of a save in memory and chooses the interval. The ranks take it over
after the first, second, fourth, ... save in memory of a generation, so the agreement costs next to nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.memory import share_of_processors
from outlast.checkpoint.content.state import Captured, capture
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.load.fetching import gather_parts
from outlast.checkpoint.load.parallel import ParallelLoad
from outlast.checkpoint.policy.cadence import FIRST_STEPS, best_steps, fault_rate
from outlast.checkpoint.policy.manifest import (
    alike_files,
    copy_name,
    parse_copy_name,
    place_of,
    rank_files,
)
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.save.mapping import current_device
from outlast.checkpoint.save.rendezvous import (
    POLL,
    Place,
    RoomAwaited,
    SaveRendezvous,
    introduce,
)
from outlast.checkpoint.save.sharing import Sharing, compare, digesters
from outlast.checkpoint.save.staging import Order, RankLayout, Stager
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, Status
from outlast.checkpoint.writer_process import lock_holder
from outlast.errors import CheckpointError, SaveFailed
from outlast.files import when_there_is_room
from outlast.ports import Exchange
from outlast.recovery.policy.events import Note, SaveLost

_LOOK = 0.25  # seconds between two looks into the durable tier by a rank that waits for the writer's word

_MOMENTS = 2  # Adam's; an optimizer that has not stepped yet will want that many more copies
_FRESH = 1.0  # seconds; durable saves that were lost are heard of that late at most
_SLOW = 2.0  # seconds of waiting for a buffer after which the disk is said to be slow
_OWNER_SECONDS = 5.0  # for which a removed memory folder is waited for
_ROOM_SECONDS = 30.0  # that a save which is due on disk waits for room in memory
_NOTICEABLE = 0.1  # seconds; waiting longer for a buffer is worth a line in the event log


class Engine:
    """Saves through the memory tier and the writer of this node.

    Every rank calls the same methods in the same order.

    Args:
        around: this rank's ties to the world.
        memory: the memory folder of this node.
        place: this rank's.
        call_saver: sees to it that a writer runs, where this process is the one to start it.
    """

    def __init__(
        self, around: SaveContext, memory: MemoryFolder, place: Place, call_saver: Callable[[], object]
    ) -> None:
        self._around = around
        self._memory = memory
        self._place = place
        self._call_saver = call_saver
        self._failures, self._why, self._told = 0, "", True
        self._failing = self._failing_since = 0.0  # seconds from the first loss in a row, and its time
        self._nbytes = 0
        self._shared: frozenset[str] = frozenset()  # keys of tensors that all ranks hold alike
        self._staged: Order | None = None
        self._began = ""  # the copy that this generation began from
        self._status: Status | None = None
        self._asked = -_FRESH
        self._waits_since, self._waits_told = 0.0, False  # for a buffer
        self._end: Callable[[], None] | None = None
        with RoomAwaited(around) as awaited:
            when_there_is_room(memory.make, around.settings.timeout, awaited.told)

    def join(self, state: Mapping[str, object], avoid: Collection[str]) -> SaveContext:
        """Meet the other ranks, and have the writer of this node serve them; see :class:`SaveRendezvous`.

        Returns:
            The surroundings, with the tiers in memory.

        Raises:
            UsageError: something in the state cannot be saved exactly, or the nodes cannot save together.
            CheckpointError: the writer does not answer, or a rank cannot stage.
        """
        around = self._around
        meeting = SaveRendezvous(around, self._memory, self._place, self._call_saver)
        self._staged = None  # of the session before; its copies may be lost
        self._shared = frozenset()
        self._compared = around.identity.world_size == 1 or not around.settings.ckpt_fully_parallel_save

        def nbytes() -> int:
            self._nbytes = self._expected(capture(state), state, RankLayout(around.identity))
            return self._nbytes

        members = self._members = meeting.hold(nbytes, avoid)
        threads = self._threads = share_of_processors(len(members.ranks))
        self._speaks = around.identity.rank == members.ranks[0]
        stage = Stage(members.stage, members.private)
        self._stage = stage
        self._limit = meeting.buffers
        file = rank_files(around.identity.rank, around.identity.world_size)[0]
        if self._end is not None:  # the job goes back: two makers of one pool's buffers would meet there
            self._end()
        self._buffers = buffers = self._buffers_of(file)
        self._stager = Stager(self._memory, around.identity, members.ranks, buffers, self._nudge, threads)
        self._end = self._stager.close
        around = replace(around, memory=stage.tier, threads=threads, buffers=buffers)
        if around.identity.world_size > 1:
            place = self._place
            parallel = ParallelLoad(around, stage, members, place.node, place.credentials)
            around = replace(around, parallel=parallel)
        if self._speaks:
            stage.drop_landing()  # of a generation that was killed
        if members.together is not None or meeting.parts_left:
            torn = gather_parts(around, stage, members, self._place.node, self._place.credentials)
            replicas = (stage.joined, *stage.replica_tiers())
            return replace(around, replicas=replicas, torn=torn)
        return around

    def prepare(self, state: Mapping[str, object]) -> None:
        """Begin to make buffers, after the first step, on all ranks.

        What all ranks hold alike is found out before, if every optimizer has its state by now; else at the
        first save.
        """
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        if not self._compared:
            sized = all(
                one.state or not any(group["params"] for group in one.param_groups) for one in optimizers
            )
            agreed = self._around.rounds.hold("sized", lambda: {"sized": sized})
            if all(report.data["sized"] for report in agreed.reports):
                self._share(state)
        self._stager.prepare(self._expected(self._stager.capture(state), state, self._stager.layout))

    @property
    def waited(self) -> float:
        """Seconds of the latest save in which this rank waited for the others."""
        return self._stager.waited

    @property
    def ready(self) -> bool:
        """Whether a save of this rank need not wait for the pages of a buffer."""
        return self._stager.ready

    def _buffers_of(self, file: str) -> Buffers:
        found = Buffers(self._stage, self._members.session, file, self._limit)
        found.waiting = self._around.waiting
        return found

    def _share(self, state: Mapping[str, object]) -> None:
        """Find out what all ranks hold alike, and have each write a part of it from now on."""
        around, members = self._around, self._members
        self._compared = True
        lasting = {name: one for name, one in state.items() if not getattr(one, "outlast_optional", False)}
        spread = digesters(self._threads).map
        held = compare(around.rounds, around.leads, lasting, spread)
        if not held:
            if self._speaks:
                self._stage.drop_pools(0)
            return
        nodes = (
            (members.ranks,) if members.together is None else (one.ranks for one in members.together.nodes)
        )
        files, own = min(map(len, nodes)), members.ranks.index(around.identity.rank)

        def buffers(number: int, count: int) -> Buffers:
            return self._buffers_of(alike_files(number, count)[0])

        def report(text: str) -> None:
            around.record(Note, reason=text)

        self._shared = frozenset(held)
        if self._speaks:
            self._stage.drop_pools(min(files, len(held)))
        sharing = Sharing(around.identity, around.rounds, held, files, own, buffers, spread, report)
        self._stager.share(sharing)
        nbytes = sum(one.numel() * one.element_size() for one in held.values())
        around.record(
            Note,
            reason=f"{len(held)} tensor(s) of {nbytes >> 20} MiB are the same on all ranks: each is written"
            " once a node; digests are compared at every save",
        )

    def _expected(self, captured: Captured, state: Mapping[str, object], layout: RankLayout) -> int:
        """Return how large this rank's file will be once every optimizer has stepped."""
        nbytes = layout.of(captured, self._shared, 0).nbytes
        for holder in state.values():
            if isinstance(holder, torch.optim.Optimizer) and not holder.state:
                groups = (one for group in holder.param_groups for one in group["params"])
                nbytes += _MOMENTS * sum(one.numel() * one.element_size() for one in groups)
        return nbytes

    def _nudge(self) -> None:
        """Wake the writer that a save waits for, and report a long wait for a buffer."""
        now = time.monotonic()
        if not self._waits_since:
            self._waits_since = now
        elif now - self._waits_since > _SLOW and not self._waits_told:
            self._waits_told = True
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

    def _is_served(self) -> bool:
        """Return whether the writer knows the ranks; wait a moment for the rank that introduces them.

        Where that one is gone, with the owner of the memory folder, nobody would remove what is staged.
        """
        deadline = time.monotonic() + _OWNER_SECONDS
        while not self._memory.introduced():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        return True

    def follow(self, loaded: str, state: Mapping[str, object]) -> None:
        """Tell the writer what was loaded, and hook the optimizers that lazy staging must wait for."""
        self._members = replace(self._members, loaded=loaded)
        if place_of(loaded)[1] != self._around.identity.generation:  # else it went back within its own path
            self._began = loaded
        self._stager.began = self._began
        if self._speaks:
            introduce(self._around, self._memory, self._members, self._around.settings.timeout)
            self._stage.drop_joined()
            self._stage.drop_landing(0 if self._compared else self._limit)
            if self._compared:  # it shares nothing
                self._stage.drop_pools(0)
        if self._around.settings.staging == "lazy":
            if _torch_compat.has_cuda_graph():
                self._stager.replays = True
                self._around.record(
                    Note,
                    reason="staging is eager: a CUDA graph was captured before session.restore, and nothing"
                    ' tells when it steps an optimizer; restore before the capture, or set staging = "eager"',
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
            self._stager.replays = True
            self._around.record(
                Note,
                reason=f"staging is eager: {name}, a {type(optimizer).__qualname__}, has no hooks before a"
                " step, and neither has an optimizer in it",
            )

    def save(self, order: Order, state: Mapping[str, object]) -> bool:
        """Stage a state; return whether it is on its way.

        A step is staged once: a later order for it says what else is to become of what is staged.

        Args:
            order: what is to become of it.
            state: the live objects.

        Raises:
            UsageError: something in the state of a rank cannot be saved exactly.
            SaveFailed: too many durable saves in a row were lost.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            ExchangeFailed: ranks that share tensors did not answer.
        """
        around = self._around
        if not self._compared:
            self._share(state)
        again = self._staged if self._staged is not None and self._staged.step == order.step else None
        began = time.monotonic()
        try:  # before anything that may fail on this rank alone: the others wait for it
            taken = None if again is not None else self._stager.take(order, state)
        except OSError as error:
            return self._lost(order, str(error), time.monotonic() - began)
        status = self._heard(order.durable)
        self._keep_saver()
        self._require_hope(status)
        if not self._is_served():
            return self._lost(
                order, f"{self._memory.root} is gone, and no writer of this node", _OWNER_SECONDS
            )
        if again is not None:
            return self._order_more(again, order)
        assert taken is not None
        self._staged = None
        began = time.monotonic()
        self._waits_since, self._waits_told = 0.0, False
        lazily = around.settings.staging == "lazy"
        try:
            self._stager.fence()  # what has become of the save before is no reason to try this one again
            with RoomAwaited(around) as awaited:
                waited = when_there_is_room(
                    lambda: self._stager.stage(taken, state, around.settings.timeout, lazily),
                    self._patience(order),
                    awaited.told,
                )
        except OSError as error:
            self._told = isinstance(error, FileNotFoundError)  # a folder that was removed is made again
            return self._lost(order, str(error), time.monotonic() - began)
        if waited is None:
            why = (
                f"no buffer came free within {around.settings.timeout:g} s: the disk takes less than is saved"
            )
            return self._lost(order, why, time.monotonic() - began)
        if self._told:  # also of the one before, which is known only now
            self._failures = 0
        self._told = True
        self._staged = order
        if waited > _NOTICEABLE:
            around.record(
                Note,
                reason=f"step {order.step} waited {waited:.2f} s for a free checkpoint buffer: the disk is"
                " slow, or saves come faster than it takes them; a longer save interval or more buffers help",
            )
        return True

    def changed(self, step: int, state: Mapping[str, object]) -> list[str]:
        """Return what has changed since a step was staged; nothing where it was not."""
        if self._staged is None or self._staged.step != step or self._stager.fingerprint is None:
            return []
        return self._stager.fingerprint.changed(self._stager.capture(state))

    def _patience(self, order: Order) -> float:
        """Return for how many seconds a save waits for room in memory."""
        if order.urgent:
            return self._around.settings.timeout
        return _ROOM_SECONDS if order.durable else 0.0

    def _order_more(self, first: Order, order: Order) -> bool:
        """Order a staged state to a further tier than at first, if it is due there."""
        began = time.monotonic()
        session, urgent = self._members.session, first.urgent or order.urgent
        try:
            self._stager.fence()
            if order.durable and (not first.durable or urgent > first.urgent):
                wish = {"step": order.step, "durable": True, "urgent": urgent, "why": order.why}
                wish["waits_since"] = time.monotonic() if order.waits else None
                self._stage.leave_wish(copy_name(order.step, self._around.identity.generation), session, wish)
        except OSError as error:
            self._staged = None
            return self._lost(order, str(error), time.monotonic() - began)
        self._staged = replace(first, durable=first.durable or order.durable, urgent=urgent)
        self._memory.ring()
        return True

    def _heard(self, newest: bool) -> Status | None:
        """Return the writer's status; it may be a moment old unless the newest is asked for."""
        now = time.monotonic()
        if newest or now - self._asked > _FRESH:
            self._status, self._asked = self._memory.status(), now
        return self._status

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

    @property
    def alone(self) -> bool:
        """Whether all ranks are on this node."""
        return self._members.together is None

    def progress(self) -> Status | None:
        """Return the writer's status; None: it has not written any.

        Without a launcher it is rank 0's, and ends with it; other ranks then see what it has left on disk.
        """
        status = self._memory.status()
        if status is None and not self._memory.root.exists():
            mine = self._around.identity.generation
            found = [
                at for name in self._around.tier.names() if (at := parse_copy_name(name)) and at[1] == mine
            ]
            return Status(0, durable_step=max(found)[0]) if found else None
        return status

    def flush(self) -> None:
        """Order the newest complete copy in memory to disk; callable from any thread."""
        self._memory.ask_to_flush()

    def settle(self) -> None:
        """Wait until the writer knows of everything that was staged."""
        with contextlib.suppress(OSError):
            self._stager.fence()

    def names(self) -> list[str]:
        """Return the copies in memory, after each staged state was committed or dropped.

        Raises:
            CheckpointError: the writer does not answer.
        """
        self.settle()
        deadline = time.monotonic() + self._around.settings.timeout
        while any(session == self._members.session for _, session in self._stage.stagings()):
            if time.monotonic() > deadline:
                raise CheckpointError(f"what is staged in {self._memory.root} is never committed to memory")
            self._keep_saver()
            time.sleep(POLL)
        return self._stage.tier.names()

    def forget(self, name: str) -> None:
        """Remove a copy from memory; another rank of this node may do so at the same time."""
        self._staged = None
        with contextlib.suppress(OSError):
            self._stage.tier.discard(name)

    def close(self) -> None:
        """End the threads that stage, once what is being copied has been."""
        if self._end is not None:
            self._end()

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
        wanted, look = copy_name(step, self._around.identity.generation), time.monotonic() + _LOOK
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


_NEWEST = 0.5  # weight of the newest measurement of a save


class MemorySaves:
    """Decides whether a step is saved in memory.

    Args:
        interval: steps between two such saves; None: chosen by cost and fault rate.
        restarts: of this job so far.
        timeout: seconds that ranks wait for each other.
        began: when this process began to train; monotonic seconds.
    """

    def __init__(self, interval: int | None, restarts: int, timeout: float, began: float) -> None:
        self._fixed = interval is not None
        self.steps = FIRST_STEPS if interval is None else interval
        self._restarts = restarts
        self._timeout = timeout
        self._began = began
        self._cost: float | None = None
        self._saves = 0
        self._training = 0.0
        self._trained = 0

    @property
    def reason(self) -> str:
        """Why a save is made, for the event log."""
        return f"memory every {self.steps} steps"

    def due(self, step: int) -> bool:
        """Say whether the state after a step is saved in memory; on multiples, as in Megatron."""
        return step > 0 and step % self.steps == 0

    def trained(self, seconds: float) -> None:
        """Take in the duration of a step."""
        self._training += seconds
        self._trained += 1

    def settle(self, clock: Callable[[], float]) -> float:
        """Return when a save begins, from which its cost is counted.

        Where the cost will be used, the device first finishes what training gave it: the first copy would
        wait for that, and it would count as the save's. It counts as training's.

        Args:
            clock: monotonic seconds.
        """
        began = clock()
        if self._fixed or (self._saves + 1) & self._saves or current_device() is None:
            return began
        torch.cuda.synchronize()
        now = clock()
        self._training += now - began
        return now

    def saved(self, seconds: float, exchange: Exchange, now: float) -> None:
        """Take in the duration of a save in memory; all ranks agree on the interval now and then."""
        self._saves += 1
        if self._fixed or self._saves & (self._saves - 1):
            return
        text = ""
        if exchange.rank == 0:
            before = seconds if self._cost is None else self._cost
            self._cost = _NEWEST * seconds + (1 - _NEWEST) * before
            rate = fault_rate(self._restarts, now - self._began)
            text = str(best_steps(self._cost, self._training / max(self._trained, 1), rate))
        self.steps = int(exchange.gather("schedule", text, self._timeout)[0])
        self._training, self._trained = 0.0, 0
