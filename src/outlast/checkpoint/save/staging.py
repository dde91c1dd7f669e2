"""Staging: a rank's state goes to the memory tier, and the writer does the rest.

``eager``: the state is copied before the call returns; a thread tells the writer. ``lazy``: what
only optimizers change is copied while the next forward and backward run; a hook before each
optimizer's step waits for the copy. Digests of these tensors are taken before the call returns, and
compared with the copy: where something else has changed one, in whatever way (``.data``, a view of
numpy's), the save is lost: a torn state never becomes a checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
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
from outlast.checkpoint.content.rank_file import document_of, text_of, whose_alike
from outlast.checkpoint.content.state import Captured, Derived
from outlast.checkpoint.content.tensor_digest import Mark, digest_of_copy, is_marked, marks_of
from outlast.checkpoint.content.transfers import CopyPlan
from outlast.checkpoint.content.typed_forms import Json
from outlast.checkpoint.content.typed_json import Encoder
from outlast.checkpoint.policy.manifest import Identity, alike_files, copy_name, rank_files
from outlast.checkpoint.policy.table import TensorEntry
from outlast.checkpoint.save.buffers import Buffer, Buffers
from outlast.checkpoint.save.rendezvous import poll
from outlast.checkpoint.save.sharing import Share, digesters
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, staged_file
from outlast.errors import CheckpointError
from outlast.files import when_there_is_room, write_whole

_COPY_PATIENCE = 600.0
_EXIT_PATIENCE = 30.0
_START_SECONDS = 1.0  # in which a thread that the system has started is at work
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
class Taken:
    """A captured state whose tensors are still the live ones.

    Args:
        order: what is to become of it.
        state: the live objects.
        captured: what was captured of them.
        layout: of the rank's own file.
        share: this rank's part in what ranks share.
        began: monotonic seconds at which the save began.
    """

    order: Order
    state: Mapping[str, object]
    captured: Captured
    layout: Layout
    share: Share
    began: float


class DeviceMoment:
    """The work that the devices of some tensors had to do at one time, on this thread's streams.

    A copy beside training comes after it, on streams of its own: on the default stream it would wait for all
    kernels of training, and training on another stream would not wait for it. CUDA and HIP; tensors on the
    host need nothing of this.

    Args:
        tensors: of any devices; those on the host do not count.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {one.device for one in tensors if one.device.type == "cuda"}
        self._events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Run copies after that moment, on streams of their own; when the block ends, they are done."""
        streams = [(torch.cuda.Stream(one), event) for one, event in self._events.items()]  # type: ignore[no-untyped-call]
        with contextlib.ExitStack() as stack:
            for stream, event in streams:
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream, _ in streams:
                stream.synchronize()


@dataclass(frozen=True)
class Fingerprint:
    """Shows at low cost whether live objects have changed: values, and address and version of each tensor.

    Random states are left out: whoever draws a number between two saves has not changed what is registered.

    Args:
        values: the typed JSON of each object, by name.
        tensors: address and version counter, by key.
    """

    values: Mapping[str, Json]
    tensors: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, captured: Captured) -> Fingerprint:
        """Return that of a state."""
        tensors = list(captured.tensors.values())
        places = zip(map(torch.Tensor.data_ptr, tensors), map(attrgetter("_version"), tensors), strict=True)
        return cls(captured.values, dict(zip(captured.tensors, places, strict=True)))

    def changed(self, captured: Captured) -> list[str]:
        """Return what has changed since: names of objects, and keys of tensors that were written to.

        A tensor that an object makes anew for each ``state_dict`` shows nothing.
        """
        now = Fingerprint.of(captured)
        names = [name for name, value in now.values.items() if self.values.get(name, value) != value]
        written = [
            key
            for key, (address, version) in now.tensors.items()
            if self.tensors.get(key, (0, 0))[0] == address and self.tensors[key][1] != version
        ]
        return [*names, *written]


@dataclass(frozen=True)
class _Copying:
    """A state that is being copied into its files: the rank's own one, and perhaps one that ranks share."""

    taken: Taken
    files: list[tuple[Layout, Buffer]]
    unclaim: contextlib.ExitStack  # gives the buffers back
    late: frozenset[str]  # keys of the tensors that are copied late
    marks: dict[str, Mark]  # of those in the rank's own file
    moment: DeviceMoment
    cursor: object

    def changed(self) -> Iterator[str]:
        """Yield the tensors whose copies differ from the digests that were taken before the copy."""
        tensors, digests = self.taken.captured.tensors, self.taken.share.digests
        for number, (layout, buffer) in enumerate(self.files):
            image = as_tensor(buffer.memory)
            for key in layout.entries if number else self.marks:
                entry = layout.entries[key]
                octets = image[entry.begin : entry.end]
                same = (
                    digest_of_copy(octets, tensors[key]) == digests[key]
                    if number
                    else is_marked(octets, self.marks[key])
                )
                if not same:
                    yield key


class RankLayout:
    """Places a rank's own tensors in its file: as the last time, if their forms are equal.

    Args:
        identity: the rank.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._notes = notes_of(0, identity)
        self._kinds = Derived[list[tuple[Any, ...]]]()
        self._layout = Derived[Layout]()

    def of(self, captured: Captured, borrowed: Collection[str], step: int) -> Layout:
        """Return the layout of a state's own tensors, without those in other files.

        Args:
            captured: the state.
            borrowed: keys of the tensors in other files.
            step: completed steps.
        """
        apart, pieces = frozenset(borrowed), captured.pieces

        def own() -> Iterator[tuple[str, torch.Tensor]]:
            return ((key, one) for key, one in captured.tensors.items() if key not in apart)

        kinds = self._kinds.of(
            (captured.form, apart),
            lambda: [(key, one.dtype, one.shape, one.stride(), pieces.get(key)) for key, one in own()],
        )
        layout = self._layout.of(kinds, lambda: lay_out(dict(own()), self._notes, pieces))
        return readdress(layout, self._notes, notes_of(step, self._identity))


class Stager:
    """Stages one rank's states.

    Args:
        folder: the memory folder, for waking the writer.
        identity: this rank.
        ranks: all ranks of this node; the writer waits for them.
        buffers: this rank's.
        nudge: sees to it that the writer is awake.
        threads: that copy while training stands still.
        lazy: whether what optimizers change is copied in the background; it becomes False when an optimizer
            may step without a call of :meth:`until_copied`.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        identity: Identity,
        ranks: tuple[int, ...],
        buffers: Buffers,
        nudge: Callable[[], None],
        threads: int = 1,
        lazy: bool = False,
    ) -> None:
        self._threads = threads
        self._folder = folder
        self._nudge = nudge
        self._identity = identity
        self._ranks = ranks
        self._buffers = buffers
        self.lazy = lazy
        self._copied = threading.Event()  # the copy is complete, and may still have to be compared
        self._copied.set()
        self._finishing: threading.Thread | None = None  # the latest save
        atexit.register(self._join, _EXIT_PATIENCE)  # a script that ends or raises still completes its save
        self._unreported: OSError | None = None
        self._plans = defaultdict[tuple[int, bool], Derived[tuple[list[str], CopyPlan]]](Derived)
        self._late = Derived[frozenset[str]]()
        self.began = ""  # the copy that this generation began from

    def close(self) -> None:
        """Wait until the copy that is under way is complete."""
        self._join(_COPY_PATIENCE)
        atexit.unregister(self._join)

    def _join(self, timeout: float) -> bool:
        """Wait for the thread of the latest save; return whether it has ended."""
        if self._finishing is not None and self._finishing.is_alive():
            self._finishing.join(timeout)
        return not self._is_finishing()

    def _is_finishing(self) -> bool:
        return self._finishing is not None and self._finishing.is_alive()

    def stage(self, taken: Taken, timeout: float) -> float | None:
        """Stage a state; return the seconds that were spent waiting for buffers, None when none came free.

        Args:
            taken: the state, and what is to become of it.
            timeout: seconds to wait for buffers.

        Raises:
            OSError: the memory folder refused.
        """
        self.fence()
        order, captured, share = taken.order, taken.captured, taken.share
        began = time.monotonic()
        name = copy_name(order.step, self._identity.generation)
        pools = [(self._buffers, taken.layout)]
        if share.buffers is not None:
            pools.append((share.buffers, share.layouts[share.own]))
        files: list[tuple[Layout, Buffer]] = []
        with contextlib.ExitStack() as unclaim:
            for pool, each in pools:
                left = began + timeout - time.monotonic()
                buffer = pool.claim(name, each.nbytes, left, self._nudge)
                if buffer is None:
                    return None
                unclaim.callback(pool.give_back, buffer)
                files.append((each, buffer))
            waited = time.monotonic() - began
            late = self._late_keys(taken.state, captured) if self.lazy else frozenset[str]()
            late &= {key for each, _ in files for key in each.entries}
            marked = {key: captured.tensors[key] for key in late & taken.layout.entries.keys()}
            marks = marks_of(marked, digesters(self._threads).map)
            cursor = Encoder().encode(order.cursor, ("cursor",))
            moment = DeviceMoment(captured.tensors[key] for key in late)
            copying = _Copying(taken, files, unclaim.pop_all(), late, marks, moment, cursor)
        self._copy(self._threads, copying, late=False)
        blocked = time.monotonic() - taken.began
        # also where nothing is late: the thread that wakes the writer may lose its processor to it
        thread = threading.Thread(target=self._finish, args=(copying, blocked), name="staging", daemon=True)
        self._finishing = thread  # before it runs: a signal's handler may raise, and close() must know it
        try:
            self._copied.clear()
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or the system refuses another thread
                self._finish(copying, blocked)
        except BaseException:  # raised again, once it is known whether the thread runs
            if not poll(lambda: thread.is_alive() or self._copied.is_set(), _START_SECONDS):
                self._copied.set()  # nothing else ends the wait for the copy
            raise
        return waited

    def until_copied(self) -> None:
        """Wait until nothing is being copied any more; called before an optimizer changes a parameter.

        Raises:
            CheckpointError: a copy within this host's memory did not end.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self.lazy = False  # the graph will step the optimizer without this hook
        _require(self._copied.wait(_COPY_PATIENCE))

    def fence(self) -> None:
        """Wait until the latest state is copied, and record the result.

        Raises:
            CheckpointError: a copy within this host's memory did not end.
            OSError: it ended, but the writer could not be told.
        """
        self.until_copied()
        if self._is_finishing():  # it may wait for room in memory
            with self._buffers.waiting():
                _require(self._join(_COPY_PATIENCE))
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            raise unreported

    def _copy(self, threads: int, copying: _Copying, late: bool) -> None:
        """Copy what is copied late, or all else."""
        captured = copying.taken.captured

        def plan(entries: Mapping[str, TensorEntry]) -> tuple[list[str], CopyPlan]:
            keys = [key for key in entries if (key in copying.late) is late]
            return keys, CopyPlan.of(
                [captured.tensors[key] for key in keys], [entries[key].begin for key in keys]
            )

        for number, (layout, buffer) in enumerate(copying.files):
            basis = captured.form, layout.entries, copying.late
            keys, route = self._plans[number, late].of(basis, functools.partial(plan, layout.entries))
            route.copy([captured.tensors[key] for key in keys], as_tensor(buffer.memory), threads)

    def _late_keys(self, state: Mapping[str, object], captured: Captured) -> frozenset[str]:
        """Return the keys of the tensors that nothing but an optimizer's step changes."""
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        stepped = [id(one) for each in optimizers for group in each.param_groups for one in group["params"]]
        basis = captured.form, stepped, list(map(_is_capturable, optimizers))
        return self._late.of(basis, lambda: frozenset(_of_optimizers(state, captured)))

    def _finish(self, copying: _Copying, blocked: float) -> None:
        """Copy the tensors of lazy staging, and mark the buffers as complete."""
        error = ""
        try:
            with copying.moment.awaited():
                if copying.late:
                    self._copy(1, copying, late=True)
            self._copied.set()
            changed = next(copying.changed(), "")
            if changed:
                step = copying.taken.order.step
                error = f"step {step}: {changed} was changed while it was copied; the save was aborted"
        except Exception as caught:  # noqa: BLE001 - a thread has nobody to raise to; the writer reports it
            error = f"{type(caught).__name__}: {caught}"
        self._copied.set()
        try:
            when_there_is_room(
                lambda: self._leave_record(copying, blocked, error), _ROOM_SECONDS, lambda _: None
            )
        except OSError as caught:
            self._unreported = caught
            copying.unclaim.close()

    def _leave_record(self, copying: _Copying, blocked: float, error: str) -> None:
        """Mark the buffers as complete; from here on the writer owns them."""
        taken, identity = copying.taken, self._identity
        order, share = taken.order, taken.share
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
        for number, (layout, buffer) in enumerate(copying.files):
            buffer.memory[: len(layout.header)] = layout.header
            if number:
                names = alike_files(share.own, len(share.layouts))
                values = {"identity": whose_alike(order.step, identity), "aliases": {}, **layout.place}
                document = document_of(values, layout.listing)
            else:
                names = rank_files(identity.rank, identity.world_size)
                document = rank_document(taken.captured, layout, order.step, identity, share.borrowed)
            write_whole(buffer.path.with_name(names.document), document)
        staged = copying.files[0][1].path.with_name(staged_file(identity.rank, identity.world_size))
        write_whole(staged, text_of(record).encode())
        self._folder.ring()


def _require(copied: bool) -> None:
    if not copied:
        raise CheckpointError(
            f"staging: the state is not copied after {_COPY_PATIENCE:g} s; this rank ends rather than"
            " change what is being saved"
        )


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
