"""Restoring with all ranks: look, agree on an order, read and verify, agree again, then touch the objects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outlast import codec
from outlast.agreement.worker.reports import Agreed, Outcome
from outlast.checkpoint.content.restore import apply, require_fit
from outlast.checkpoint.content.state import require_shapes
from outlast.checkpoint.context import OUTAGE_SECONDS, SaveContext
from outlast.checkpoint.load.fetching import Recall
from outlast.checkpoint.load.groups import AddedGroups
from outlast.checkpoint.load.landing import land
from outlast.checkpoint.load.reading import Lend
from outlast.checkpoint.load.reshard import Received, open_part, require_claimed
from outlast.checkpoint.policy.manifest import is_shared, place_of, some
from outlast.checkpoint.policy.resolve import (
    Copy,
    CopyState,
    CopyStatus,
    Excluded,
    LoadPlan,
    Marks,
    Resolution,
    preferred,
    resolve,
)
from outlast.checkpoint.tiers.inventory import inspect, inspect_for, serves
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from outlast.errors import CheckpointError, CheckpointMismatch, NoUsableCheckpoint, OutlastError
from outlast.fields import Damage, DamagedCopy
from outlast.files import OUTAGE, when_there_is_room
from outlast.recovery.policy.events import Loaded, Note, Quarantined

_POLL = 0.25


@dataclass(frozen=True)
class Restored:
    """What was loaded.

    Args:
        step: completed steps.
        name: the copy's folder.
        cursor: the data cursor that was saved with it.
        nbytes: of the tensors of all ranks.
        seconds: from the call to the last tensor.
        tier: where it was read; several, joined by "+", where ranks have read different ones.
        flags: of this rank's modules when they were saved.
        notes: what is not as it was saved, of any rank.
    """

    step: int
    name: str
    cursor: Any
    nbytes: int
    seconds: float
    tier: str = ""
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Restorer:
    """One rank's part in restoring once.

    Args:
        around: this rank's ties to the world.
        state: the live objects.
        avoid: marks, see :mod:`outlast.checkpoint.policy.resolve`.
        groups: of the optimizers, before and during all loads of this process.
    """

    def __init__(
        self,
        around: SaveContext,
        state: Mapping[str, object],
        avoid: Collection[str],
        groups: AddedGroups | None = None,
    ) -> None:
        self._around = around
        self._state = state
        self._avoid = avoid
        self._marks = Marks(avoid)
        self._groups = groups or AddedGroups()
        self._seen: set[str] = set()  # the copies that some rank sees
        self._unusable: dict[str, str] = {}  # why, by name
        self._received: Received | None = None  # of the copy that is tried
        self._cursor: Any = None  # of the copy that was applied, and the flags of this rank's modules
        self._flags: Mapping[str, tuple[str, str]] = {}

    def restore(self) -> Restored | None:
        """Load; see :meth:`outlast.checkpoint.checkpointer.Checkpointer.restore`."""
        self._groups.begin(self._state)
        try:
            return self._restore()
        except BaseException:  # raised again: an interrupt, too, must not leave changed groups
            self._groups.undo()
            raise
        finally:
            self._groups.keep()
            self._received = None
            if self._around.buffers is not None:
                self._around.buffers.take_back()

    def _restore(self) -> Restored | None:
        around, started = self._around, self._around.clock.monotonic()
        recall = Recall(around, self._avoid) if around.settings.global_url else None
        while True:
            resolution = self._survey()
            for plan in resolution.plans:
                place = None if plan.suspect else (plan.step, plan.generation)
                if recall is not None and recall.newer(place):
                    break
                examined = self._examined(plan)
                if examined.fine:
                    return self._applied(plan, examined, started)
                self._groups.undo()
                self._received = None  # its memory, before another copy is read
                self._unusable[plan.name] = examined.text
                self._put_away(plan, examined)
                del examined  # its error holds memory of that copy
            else:
                if resolution.refusal:
                    raise CheckpointMismatch(resolution.refusal)
                if recall is None or not recall.newer(None):
                    break
        self._require_new(resolution)
        return None

    def _examined(self, plan: LoadPlan) -> Agreed:
        """Have all ranks read and verify their parts and compare them with the live objects.

        These stay unchanged, except for parameter groups, which can be restored.
        """
        around = self._around
        if around.parallel is not None:
            nearer = around.tiers[:-1]
            found = around.parallel.land(plan.name, plan.commit, lambda: not self._serving(plan, nearer))
            if found is not None:
                return found

        def examine() -> dict[str, Any]:
            damaged: list[tuple[str, str]] = []
            *others, last = self._serving(plan, around.tiers) or [around.tier]
            for tier in others:
                try:
                    return {**self._examine(plan, tier), "damaged": damaged}
                except DamagedCopy as error:
                    damaged.append((tier.name, str(error)))
            return {**self._examine(plan, last), "damaged": damaged}

        return around.rounds.hold("examined", examine)

    def _serving(self, plan: LoadPlan, tiers: Iterable[DirectoryTier]) -> list[DirectoryTier]:
        """Return the tiers that have a copy for this rank that no mark excludes."""
        identity, found = self._around.identity, []
        for tier in tiers:
            mark = self._marks.of(tier.name, plan.name, plan.commit)
            fits = mark is None or (plan.suspect and mark.bearing is CopyStatus.SUSPECT)
            if fits and plan.name in tier.names():
                copy = inspect(tier, plan.name, ())
                found += [tier] if serves(copy, identity.rank, identity.world_size) else []
        return found

    def _examine(self, plan: LoadPlan, tier: DirectoryTier) -> dict[str, Any]:
        """Examine a tier's copy, first what has landed of it, then what is on disk."""
        parallel = self._around.parallel
        with tier.open(plan.name) as folder:
            if parallel is not None and tier is self._around.tier and parallel.has_landed(plan.name):
                try:
                    with parallel.over(folder) as landed:
                        received = self._received = self._read(plan, landed)
                    return {"nbytes": received.nbytes, "left": received.left, "tier": tier.name}
                except (DamagedCopy, OSError) as error:
                    if isinstance(error, DamagedCopy) and not is_shared(error.damage.file):
                        raise
                    self._around.record(Note, reason=f"{error}: what has landed in memory is not used")
            received = self._received = self._read(plan, folder)
        return {"nbytes": received.nbytes, "left": received.left, "tier": tier.name}

    def _read(self, plan: LoadPlan, folder: CopyFolder) -> Received:
        """Read a copy, through a buffer if one is lent and there are pages for it."""
        buffers = self._around.buffers
        if buffers is not None:
            try:
                return self._read_through(plan, folder, buffers.lend)
            except OSError as error:  # of the disk, or of the memory folder: the second try shows it
                if not buffers.lends:
                    raise
                buffers.take_back()
                self._around.record(Note, reason=f"{error}: private memory is used for the load")
        return self._read_through(plan, folder, lambda *_: None)

    def _read_through(self, plan: LoadPlan, folder: CopyFolder, lend: Lend) -> Received:
        around, state = self._around, self._state
        try:
            require_shapes(state)
            received = open_part(folder, plan.name, plan.commit, around.identity, state, around.threads, lend)
            for name, holder in state.items():
                if getattr(holder, "outlast_optional", False):
                    received.saved.setdefault(name, {})
            kinds, parameters = received.document.kinds, received.document.parameters
            self._groups.fit(state, received.saved, parameters)
            require_fit(state, received.saved, kinds, parameters)
            received.fill()
        except CheckpointMismatch as error:
            raise CheckpointMismatch(
                f"{plan.name} is sound but does not fit: {error}; nothing was loaded or changed"
            ) from error
        return received

    def _apply(self, plan: LoadPlan) -> dict[str, Any]:
        """Put this rank's part into the live objects."""
        received = self._received
        assert received is not None, "it was examined on every rank"
        document = received.document
        self._received, self._cursor, self._flags = None, received.cursor, document.flags
        try:
            land(self._state, received.saved, self._around.threads, received.views)
            note = apply(self._state, received.saved, received.random, document.parameters)
        except (CheckpointMismatch, RuntimeError) as error:  # a device failed, or has no room
            raise CheckpointMismatch(
                f"{plan.name} is sound, but {error}; the live objects hold some of it and must not be used"
            ) from error
        finally:
            received.saved.clear()
        return {"note": "; ".join(filter(None, (received.note, note))), "copy": f"{plan.name} {plan.commit}"}

    def _require_new(self, resolution: Resolution) -> None:
        """Check that a run of which nothing can be loaded has never saved.

        Raises:
            NoUsableCheckpoint: it has saved; files, or the marks of the launcher, show that.
        """
        torn, unusable, known = self._around.torn, self._unusable, self._marks.durable
        for one in torn:
            seen = unusable.setdefault(one.name, one.reason)
            if (one.missing or one.fetch) and seen != one.reason:
                unusable[one.name] = "; ".join(filter(None, (seen, one.why)))
        if not unusable and known:
            raise NoUsableCheckpoint(
                f"the run has saved {some(known)}, and none of its checkpoints is there any more: not in"
                f" {self._around.tier.folder}, not in any other tier; nothing was loaded, and a run that has"
                " saved does not start anew by itself; put them back, or name another folder (--run-dir) if"
                " that is what you want"
            )
        if not unusable or (not known and self._never_complete(resolution)):
            return
        listed = "".join(f"\n  {name}: {reason}" for name, reason in unusable.items())
        again = "start it again, or " if any(one.fetch for one in torn) else ""
        if any(one.missing and one.why for one in torn):
            again = "start it again with the nodes that saved what is missing, or "
        raise NoUsableCheckpoint(
            f"none of {len(unusable)} checkpoint(s) in tier {self._around.tier.name}"
            f" ({self._around.tier.folder}) can be used; nothing was loaded, and a run that has saved does"
            f" not start anew by itself; {again}name an empty folder if that is what you want:{listed}"
        )

    def _never_complete(self, resolution: Resolution) -> bool:
        """Return whether there is only the first save of the run, and some node never completed its part.

        A node keeps its newest two parts; where nobody has more than one, there was no save before. A node
        that has left the job since may have the part that is missing.
        """
        torn = self._around.torn
        parts = {one.name for one in resolution.excluded if one.incomplete} | {one.name for one in torn}
        if len(parts) != 1 or self._unusable.keys() != parts or any(one.why for one in torn):
            return False
        [name] = parts
        reason = f"{name} was the first save and never complete ({self._unusable[name]}): a new start"
        self._around.record(Note, reason=reason)
        return True

    def _survey(self) -> Resolution:
        """Return what to try; note why each other copy cannot be used."""
        around, tier = self._around, self._around.tier
        rank, world_size = around.identity.rank, around.identity.world_size
        deadline = time.monotonic() + OUTAGE_SECONDS  # for all of it

        def seen(each: DirectoryTier, name: str) -> Copy | None:
            found = inspect_for(each, name, rank, world_size)
            while found.state is CopyState.UNREADABLE and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    if name not in each.names():  # its writer has removed it since
                        return None
                time.sleep(_POLL)  # what is passed over now is off the path of what is saved next
                found = inspect_for(each, name, rank, world_size)
            return replace(found, tier=each.name)

        def look() -> dict[str, Any]:
            copies: dict[str, Copy] = {}
            for each in around.tiers:
                for name in when_there_is_room(each.names, OUTAGE_SECONDS, passing=OUTAGE):
                    found = seen(each, name)
                    if found is None or not serves(found, rank, world_size):
                        continue
                    copies[name] = preferred([copies.get(name, found), found], self._marks)
            return {"copies": codec.values_of(tuple(copies.values())), "quarantined": tier.quarantined()}

        agreed = around.rounds.hold("inventory", look)
        agreed.raise_common(CheckpointError)
        inventories = [codec.convert(report.data["copies"], tuple[Copy, ...]) for report in agreed.reports]
        resolution = resolve(inventories, self._avoid, around.identity.run_id)
        self._seen = {copy.name for inventory in inventories for copy in inventory}
        self._unusable = {
            f"quarantine/{name}": reason
            for report in agreed.reports
            for name, reason in report.data["quarantined"].items()
        }
        for excluded in resolution.excluded:
            self._unusable[excluded.name] = excluded.reason
            self._exclude(excluded)
        return resolution

    def _put_away(self, plan: LoadPlan, agreed: Agreed) -> None:
        """Deal with a copy that some rank could not read, or raise when no other copy may be tried.

        Raises:
            CheckpointMismatch: it is sound and does not fit.
            UsageError: the live objects cannot be restored.
            CheckpointError: something failed that says nothing about the copy.
        """
        rank, report = agreed.worst
        if report.outcome is Outcome.DAMAGED:
            self._exclude(Excluded(plan.name, agreed.text, True, rank, report.damage))
        elif report.outcome is Outcome.SYSTEM:
            self._exclude(Excluded(plan.name, agreed.text))
        else:
            agreed.raise_common(CheckpointError)

    def _exclude(self, excluded: Excluded) -> None:
        around, name, reason = self._around, excluded.name, excluded.reason
        if not excluded.aside:
            around.record(Note, reason=f"{name} is passed over: {reason}")
            return
        on_disk = name in around.tier.names()
        if not on_disk:  # every rank does so before the first one drops it: any may be killed now
            with contextlib.suppress(OSError):
                around.tier.remember(name, {"name": name, "reason": reason, "tier": "memory"})
        self._drop_from_memory(name)
        if on_disk and around.leads:
            note = {"name": name, "reason": reason, "rank": excluded.rank, "time": around.clock.wall()}
            try:
                around.tier.quarantine(name, note | vars(excluded.damage or Damage("", "", "")))
            except OSError as error:
                why = f"{name} is passed over ({reason}); it could not be moved away: {error}"
                around.record(Note, reason=why)
                return
        place = name if on_disk else f"memory/{name}"
        around.record(Quarantined, step=excluded.step, checkpoint=place, reason=reason)

    def _applied(self, plan: LoadPlan, examined: Agreed, started: float) -> Restored:
        """Have all ranks put their parts into the live objects, and record it."""
        around, unusable = self._around, self._unusable
        for name in () if around.settings.global_url else self._marks.durable:  # some are only there
            if place_of(name) > (plan.step, plan.generation) and name not in unusable.keys() | self._seen:
                unusable[name] = "the run has saved it, and it is not there any more"
        try:
            require_claimed([report.data["left"] for report in examined.reports])
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{plan.name} is sound but does not fit: {error}") from error
        applied = around.rounds.hold("applied", lambda: self._apply(plan))
        if applied.worst[1].outcome in (Outcome.DAMAGED, Outcome.SYSTEM):
            raise OutlastError(
                f"{plan.name} was sound when it was verified, and {applied.text}; the live objects hold some"
                " of it and must not be used; start again, and restore anew"
            ) from applied.error
        applied.raise_common(CheckpointMismatch)
        copies = {report.data["copy"] for report in applied.reports}
        if len(copies) > 1:
            raise OutlastError(
                f"ranks restored different copies: one expected, {some(sorted(copies))} found; the live"
                " objects must not be used; start again, and restore anew"
            )
        self._drop_damaged(plan, examined)
        before = [f"{name} ({why})" for name, why in unusable.items() if not name.startswith("quarantine/")]
        tiers = sorted({report.data["tier"] for report in examined.reports})
        passed = f"; passed over: {'; '.join(before)}" if before else ""
        restored = Restored(
            plan.step,
            plan.name,
            self._cursor,
            nbytes=sum(report.data["nbytes"] for report in examined.reports),
            seconds=around.clock.monotonic() - started,
            tier="+".join(tiers),
            flags=self._flags,
            notes=_lines([report.data["note"] for report in applied.reports]),
        )
        around.record(
            Loaded,
            step=plan.step,
            checkpoint=plan.name,
            nbytes=restored.nbytes,
            seconds=restored.seconds,
            reason=f"{plan.reason}, from {' and '.join(tiers)}{passed}",
            places=tuple(f"{tier}/{plan.name}" for tier in tiers),
            digest=plan.digest,
        )
        newer = [one for one in around.torn if one.missing and one.why]
        for line in (
            *(f"{one.name} is newer and was not loaded: {one.reason}" for one in newer),
            *restored.notes,
        ):
            around.record(Note, reason=line)
        return restored

    def _drop_damaged(self, plan: LoadPlan, examined: Agreed) -> None:
        """Drop damaged copies in memory for which another tier's was loaded, and record that."""
        around = self._around
        for rank, report in enumerate(examined.reports):
            for tier, why in report.data["damaged"]:
                reason = f"rank {rank}: the copy in {tier} is damaged ({why}); another tier's is loaded"
                around.record(Quarantined, step=plan.step, checkpoint=f"{tier}/{plan.name}", reason=reason)
        if examined.reports[around.identity.rank].data["damaged"]:
            self._drop_from_memory(plan.name)

    def _drop_from_memory(self, name: str) -> None:
        """Remove a damaged copy; another rank of this node may do so at the same time."""
        for tier in self._around.tiers[:-1]:
            with contextlib.suppress(OSError):
                tier.discard(name)


def _lines(notes: Sequence[str]) -> tuple[str, ...]:
    """Return the notes of the ranks, each once, with the ranks if not all have it."""
    having: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        having.setdefault(note, []).append(rank)
    return tuple(
        note if len(ranks) == len(notes) else f"rank {some(ranks)}: {note}"
        for note, ranks in having.items()
        if note
    )
