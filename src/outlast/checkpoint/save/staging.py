"""Staging: a rank's state goes to the memory tier, and the writer does the rest.

``eager``: the state is copied before the call returns; a thread tells the writer. ``lazy``: what
only optimizers change is copied while the next forward and backward run; a hook before each
optimizer's step waits for the copy. Digests of these tensors are taken before the call returns, and
compared with the copy: where something else has changed one, in whatever way (``.data``, a view of
numpy's), the save is lost: a torn state never becomes a checkpoint.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outlast.checkpoint.content.codecs import local_of
from outlast.checkpoint.content.format import (
    Layout,
    lay_out,
    notes_of,
    rank_document,
    readdress,
)
from outlast.checkpoint.content.memory import as_tensor
from outlast.checkpoint.content.rank_file import text_of
from outlast.checkpoint.content.recapture import Capturer
from outlast.checkpoint.content.state import Captured
from outlast.checkpoint.content.tensor_digest import Mark, digest_of_copy, is_marked, marks_of
from outlast.checkpoint.content.transfers import CopyPlan
from outlast.checkpoint.content.typed_json import Encoder
from outlast.checkpoint.policy.manifest import Identity, copy_name, rank_files
from outlast.checkpoint.policy.table import TensorEntry
from outlast.checkpoint.save.buffers import Buffer, Buffers
from outlast.checkpoint.save.fingerprint import Fingerprint
from outlast.checkpoint.save.sharing import NO_PART, Share, Sharing, digesters
from outlast.checkpoint.save.streams import DeviceMoment
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, staged_file, write_whole
from outlast.errors import CheckpointError
from outlast.files import when_there_is_room

_COPY_PATIENCE = 600.0
_EXIT_PATIENCE = 30.0
_ROOM_SECONDS = 30.0  # that a record waits for room in memory; what it is about is there already


@dataclass(frozen=True)
class Order:
    """What the writer has to do with a staged state.

    Args:
        step: completed steps.
        durable: it goes to disk, too.
        why: one sentence for the event log.
        cursor: where in the data the next step reads.
        urgent: the job is about to end: it goes to the global tier, too, whatever is due there.
        waits: training stands still until it is on disk.
    """

    step: int
    durable: bool
    why: str
    cursor: object = None
    urgent: bool = False
    waits: bool = False


@dataclass(frozen=True)
class _Copying:
    """A state that is on its way into a buffer, or into two."""

    order: Order
    captured: Captured
    layout: Layout
    buffer: Buffer
    late: frozenset[str]  # keys of the tensors that are copied late
    marks: dict[str, Mark]  # of those in the rank's own file
    moment: DeviceMoment
    cursor: object
    share: Share

    @property
    def images(self) -> list[tuple[Layout, Buffer]]:
        """The files that are written."""
        return [(self.layout, self.buffer), *self.share.written]

    def changed(self) -> Iterator[str]:
        """Yield the tensors whose copies are not what the tensors were when they were marked or compared."""
        image = as_tensor(self.buffer.memory)
        for key, mark in self.marks.items():
            entry = self.layout.entries[key]
            if not is_marked(image[entry.begin : entry.end], mark):
                yield key
        for layout, buffer in self.share.written:
            image = as_tensor(buffer.memory)
            for key, entry in layout.entries.items():
                copy, tensor = image[entry.begin : entry.end], self.captured.tensors[key]
                if digest_of_copy(copy, tensor) != self.share.digests[key]:
                    yield key


@dataclass(frozen=True)
class Taken:
    """A captured state whose tensors are still the live ones, with this rank's part in what ranks share."""

    order: Order
    captured: Captured
    share: Share
    began: float  # monotonic seconds


@dataclass(frozen=True)
class _LaidOut:
    """A layout, and of what."""

    form: object
    borrowed: frozenset[str]
    kinds: list[tuple[Any, ...]]
    notes: dict[str, str]
    layout: Layout


class RankLayout:
    """Places a rank's own tensors in its file: as the last time, if their forms are equal.

    Args:
        identity: the rank.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._known: _LaidOut | None = None

    def of(self, captured: Captured, borrowed: Collection[str], step: int) -> Layout:
        """Return the layout of a state's own tensors, without those in other files.

        Args:
            captured: the state.
            borrowed: keys of the tensors in other files.
            step: completed steps.
        """
        notes, pieces, known = notes_of(step, self._identity), captured.pieces, self._known
        apart = frozenset(borrowed)
        if known is None or known.form is not captured.form or known.borrowed != apart:
            own = {key: one for key, one in captured.tensors.items() if key not in apart}
            kinds = [(key, one.dtype, one.shape, one.stride(), pieces.get(key)) for key, one in own.items()]
            if known is None or known.kinds != kinds:
                known = _LaidOut(captured.form, apart, kinds, notes, lay_out(own, notes, pieces))
            else:
                known = replace(known, form=captured.form, borrowed=apart)
            self._known = known
        return readdress(known.layout, known.notes, notes)


@dataclass(frozen=True)
class _Route:
    """How some of the tensors of one form come into a file.

    Args:
        form: of the state.
        entries: of the file.
        late: which of the tensors are copied late.
        keys: of the tensors that this route copies: the late ones, or all others.
        plan: of their copy.
    """

    form: object
    entries: Mapping[str, TensorEntry]
    late: Collection[str]
    keys: Sequence[str]
    plan: CopyPlan


class Stager:
    """Stages one rank's states.

    Args:
        folder: the memory folder, for waking the writer.
        identity: this rank.
        ranks: all ranks of this node; the writer waits for them.
        buffers: this rank's.
        nudge: sees to it that the writer is awake.
        threads: that copy while training stands still.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        identity: Identity,
        ranks: tuple[int, ...],
        buffers: Buffers,
        nudge: Callable[[], None],
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._folder = folder
        self._nudge = nudge
        self._identity = identity
        self._ranks = ranks
        self._buffers = buffers
        self._rest: queue.SimpleQueue[tuple[_Copying, float] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._copied = threading.Event()  # the copy is complete, and may still have to be compared
        self._copied.set()
        self._thread = threading.Thread(target=self._serve, name="staging", daemon=True)
        self._thread.start()
        self._wait_at_exit = lambda: self._idle.wait(_EXIT_PATIENCE)
        atexit.register(self._wait_at_exit)  # a script that ends or raises has still been saved
        self._untold: OSError | None = None
        self.replays = False  # a CUDA graph steps an optimizer
        self.layout = RankLayout(identity)
        self.capture = Capturer().capture
        self._routes: dict[tuple[int, bool], _Route] = {}
        self._late: tuple[tuple[object, list[bool]], frozenset[str]] = ((None, []), frozenset())
        self._sharing: Sharing | None = None
        self.fingerprint: Fingerprint | None = None  # of the latest state
        self.began = ""  # the copy that this generation began from

    def prepare(self, nbytes: int) -> None:
        """Begin to make the buffers that states of a size will need, as far as there is room."""
        self._buffers.prepare_beside(nbytes)

    @property
    def ready(self) -> bool:
        """Whether a save need not wait for the pages of a buffer."""
        shared = None if self._sharing is None else self._sharing.buffers
        return self._buffers.ready and (shared is None or shared.ready)

    def share(self, sharing: Sharing) -> None:
        """From now on write only a part of what all ranks hold alike."""
        self._sharing = sharing
        self._buffers.hand_over(sharing.buffers)
        sharing.prepare()

    def close(self) -> None:
        """End the thread, after the copy that is under way, and let go of the buffers."""
        self._rest.put(None)
        self._thread.join(_COPY_PATIENCE)
        atexit.unregister(self._wait_at_exit)
        self._buffers.close()
        if self._sharing is not None and self._sharing.buffers is not None:
            self._sharing.buffers.close()

    def take(self, order: Order, state: Mapping[str, object]) -> Taken:
        """Capture a state, and compare what ranks share of it; every rank does for the same orders.

        Raises:
            UsageError: something in the state of a rank cannot be saved exactly.
            PeerFailed: an object's own code raised on another rank; there its exception is raised as it is.
            OSError: it raised that on some rank.
            ExchangeFailed: ranks did not answer.
        """
        began = time.monotonic()
        if self._sharing is None:
            return Taken(order, self.capture(state), NO_PART, began)
        return Taken(order, *self._sharing.share(self.capture, state, order.step), began)

    @property
    def waited(self) -> float:
        """Seconds that this rank waited for the others when they compared last."""
        return 0.0 if self._sharing is None else self._sharing.waited

    def stage(
        self, taken: Taken, state: Mapping[str, object], timeout: float, lazily: bool = False
    ) -> float | None:
        """Stage a state; return the seconds that were spent waiting for a buffer, None when none came free.

        Args:
            taken: the state, and what is to become of it.
            state: the live objects.
            timeout: seconds to wait for a buffer.
            lazily: let what optimizers change be copied in the background.

        Raises:
            OSError: the memory folder refused.
        """
        self.fence()
        order, captured, share = taken.order, taken.captured, taken.share
        began = time.monotonic()
        self.fingerprint = Fingerprint.of(captured)
        layout = self.layout.of(captured, share.borrowed, order.step)
        name = copy_name(order.step, self._identity.generation)
        buffer = self._buffers.claim(name, layout.nbytes, timeout, self._nudge)
        if buffer is None:
            return None
        waited = buffer.waited
        if share.buffers is not None:
            left = began + timeout - time.monotonic()
            if not self._claim_second(share, name, left, buffer):
                return None
        late = self._late_keys(state, captured) if lazily and not self.replays else frozenset[str]()
        marked = {key: captured.tensors[key] for key in late & layout.entries.keys()}
        marks = marks_of(marked, digesters(self._threads).map)
        late &= layout.entries.keys() | share.written_keys
        cursor = Encoder().encode(order.cursor, ("cursor",))
        moment = DeviceMoment(captured.tensors[key] for key in late)
        copying = _Copying(order, captured, layout, buffer, late, marks, moment, cursor, share)
        self._copy(self._threads, copying, late=False)
        blocked = time.monotonic() - taken.began
        self._copied.clear()
        self._idle.clear()  # also where nothing is late: who wakes the writer may have to wait behind it
        self._rest.put((copying, blocked))
        return waited

    def _claim_second(self, share: Share, name: str, timeout: float, first: Buffer) -> bool:
        """Take the buffer of this rank's shared file; return whether one came free."""
        try:
            if share.claim(name, timeout, self._nudge):
                return True
        except OSError:
            self._buffers.give_back(first)
            raise
        self._buffers.give_back(first)
        return False

    def until_copied(self) -> None:
        """Wait until nothing is being copied any more; called before an optimizer changes a parameter.

        Raises:
            CheckpointError: a copy within this host's memory did not end.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self.replays = True  # without this hook, from now on
        self._wait_for(self._copied)

    def _wait_for(self, event: threading.Event) -> None:
        if not event.wait(_COPY_PATIENCE):
            raise CheckpointError(
                f"staging: the state is not copied after {_COPY_PATIENCE:g} s; this rank ends rather than"
                " change what is being saved"
            )

    def fence(self) -> None:
        """Wait until the latest state is copied, and record the result.

        Raises:
            CheckpointError: a copy within this host's memory did not end.
            OSError: it ended, but the writer could not be told.
        """
        self.until_copied()
        if not self._idle.is_set():  # it may wait for room in memory
            with self._buffers.waiting():
                self._wait_for(self._idle)
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold

    def _copy(self, threads: int, copying: _Copying, late: bool) -> None:
        """Copy what is copied late, or all else."""
        tensors = copying.captured.tensors
        for number, (layout, buffer) in enumerate(copying.images):
            route = self._routes.get((number, late))
            if route is None or not (
                route.form is copying.captured.form
                and route.entries is layout.entries
                and route.late == copying.late
            ):
                entries = layout.entries
                keys = [key for key in entries if (key in copying.late) is late]
                plan = CopyPlan.of([tensors[key] for key in keys], [entries[key].begin for key in keys])
                route = _Route(copying.captured.form, entries, copying.late, keys, plan)
                self._routes[number, late] = route
            here = [tensors[key] for key in route.keys]
            route.plan.copy(here, as_tensor(buffer.memory), threads)

    def _late_keys(self, state: Mapping[str, object], captured: Captured) -> frozenset[str]:
        """Return the keys of the tensors that nothing but an optimizer's step changes."""
        replayed = [_is_capturable(one) for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        known, late = self._late
        if known[0] is not captured.form or known[1] != replayed:
            late = frozenset(_of_optimizers(state, captured))
            self._late = (captured.form, replayed), late
        return late

    def _serve(self) -> None:
        while (next_one := self._rest.get()) is not None:
            self._finish(*next_one)
            self._copied.set()
            self._idle.set()

    def _finish(self, copying: _Copying, blocked: float) -> None:
        """Copy the tensors of lazy staging, and mark the buffer as complete."""
        error = ""
        try:
            with copying.moment.awaited():
                if copying.late:
                    self._copy(1, copying, late=True)
            self._copied.set()
            changed = next(copying.changed(), "")
            if changed:
                step = copying.order.step
                error = f"step {step}: {changed} was changed while it was copied; the save was aborted"
        except Exception as caught:  # noqa: BLE001 - a thread has nobody to raise to; the writer reports it
            error = f"{type(caught).__name__}: {caught}"
        try:
            when_there_is_room(
                lambda: self._leave_record(copying, blocked, error), _ROOM_SECONDS, lambda _: None
            )
        except OSError as caught:
            self._untold = caught
            copying.share.give_back()
            self._buffers.give_back(copying.buffer)

    def _leave_record(self, copying: _Copying, blocked: float, error: str) -> None:
        """Mark the buffer as complete; from here on the writer owns it."""
        order, identity, layout = copying.order, self._identity, copying.layout
        memory = copying.buffer.memory
        memory[: len(layout.header)] = layout.header
        share = copying.share
        record = {
            "run_id": identity.run_id,
            "step": order.step,
            "world_size": identity.world_size,
            "parallelism": identity.parallelism,
            "ranks": self._ranks,
            "durable": order.durable,
            "why": order.why if self._buffers.in_memory else f"{order.why}; staged on disk",
            "urgent": order.urgent,
            "cursor": copying.cursor,
            "began": self.began,
            "blocked": blocked,
            "waits_since": time.monotonic() if order.waits else None,
            "error": error,
            "shared": len(share.layouts),
            "writes": share.own,
        }
        share.leave_document(order.step, identity)
        document = rank_document(copying.captured, layout, order.step, identity, share.borrowed)
        path = copying.buffer.path
        write_whole(path.with_name(rank_files(identity.rank, identity.world_size).document), document)
        staged = path.with_name(staged_file(identity.rank, identity.world_size))
        write_whole(staged, text_of(record).encode())
        self._folder.ring()


def _of_optimizers(state: Mapping[str, object], captured: Captured) -> set[str]:
    """Return the keys of the tensors that nothing but an optimizer's step changes.

    Parts of distributed tensors are not among them: late copies of them are not tried out. Nor is what a
    capturable optimizer has: a CUDA graph that is replayed changes it without a hook, at every step.
    """
    owned: set[int] = set()
    for holder in state.values():
        if isinstance(holder, torch.optim.Optimizer) and not _is_capturable(holder):
            of_groups = (one for group in holder.param_groups for one in group["params"])
            of_states = (one for values in holder.state.values() for one in values.values())
            for one in (*of_groups, *of_states):
                if isinstance(one, torch.Tensor):
                    owned.add(local_of(one).untyped_storage().data_ptr())
    tensors = captured.tensors.items()
    found = {key for key, one in tensors if one.untyped_storage().data_ptr() in owned}
    return found - captured.pieces.keys()


def _is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("capturable", False) for group in optimizer.param_groups)
