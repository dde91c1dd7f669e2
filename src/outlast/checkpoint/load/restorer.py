"""Restoring with all ranks: look, agree on an order, read and verify, agree again, then touch the objects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
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
    flags: Mapping[str, list[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _Attempt:
    """One rank's part in trying one copy."""

    def __init__(
        self,
        around: SaveContext,
        plan: LoadPlan,
        state: Mapping[str, object],
        marks: Marks,
        groups: AddedGroups,
    ) -> None:
        self._around = around
        self._groups = groups
        self._plan = plan
        self._marks = marks
        self._state = state
        self._received: Received | None = None
        self.cursor: Any = None  # the data cursor of the copy, once it is applied
        self.flags: dict[str, list[str]] = {}  # and its flags

    def examine(self) -> dict[str, Any]:
        """Read and verify this rank's part and compare it with the live objects.

        They stay untouched, but for parameter groups, which can be taken back.
        """
        damaged: list[tuple[str, str]] = []
        tiers = [tier for tier in self._around.tiers if self._serves(tier)]
        for tier in tiers or [self._around.tier]:
            try:
                return {**self._examine_from(tier), "tier": tier.name, "damaged": damaged}
            except DamagedCopy as error:
                if tier is tiers[-1]:
                    raise
                damaged.append((tier.name, str(error)))
        raise AssertionError("the last tier returns or raises")

    def needs_disk(self) -> bool:
        """Say whether no tier in memory serves this rank."""
        return not any(map(self._serves, self._around.tiers[:-1]))

    def _serves(self, tier: DirectoryTier) -> bool:
        plan, identity = self._plan, self._around.identity
        mark = self._marks.of(tier.name, plan.name, plan.commit)
        if mark is not None and not (plan.suspect and mark.bearing is CopyStatus.SUSPECT):
            return False
        if plan.name not in tier.names():
            return False
        return serves(inspect(tier, plan.name, ()), identity.rank, identity.world_size)

    def _examine_from(self, tier: DirectoryTier) -> dict[str, Any]:
        """Examine a tier's copy, first what has landed of it, then what is on disk."""
        parallel = self._around.parallel
        if parallel is not None and tier is self._around.tier and parallel.has_landed(self._plan.name):
            try:
                with tier.open(self._plan.name) as folder, parallel.over(folder) as landed:
                    return self._examine_in(landed)
            except (DamagedCopy, OSError) as error:
                if isinstance(error, DamagedCopy) and not is_shared(error.damage.file):
                    raise
                self._around.record(Note, reason=f"{error}: what has landed in memory is not used")
        with tier.open(self._plan.name) as folder:
            return self._examine_in(folder)

    def _examine_in(self, folder: CopyFolder) -> dict[str, Any]:
        """Examine a copy, through a buffer if one is lent and there are pages for it."""
        buffers = self._around.buffers
        if buffers is not None:
            try:
                return self._examine_through(folder, buffers.lend)
            except OSError as error:  # of the disk, or of the memory folder: the second try shows it
                if not buffers.lends:
                    raise
                buffers.take_back()
                self._around.record(Note, reason=f"{error}: private memory is used for the load")
        return self._examine_through(folder, lambda *_: None)

    def _examine_through(self, folder: CopyFolder, lend: Lend) -> dict[str, Any]:
        plan = self._plan
        try:
            require_shapes(self._state)
            received = open_part(
                folder,
                plan.name,
                plan.commit,
                self._around.identity,
                self._state,
                self._around.threads,
                lend,
            )
            for name, holder in self._state.items():
                if getattr(holder, "outlast_optional", False):
                    received.saved.setdefault(name, {})
            self._groups.fit(self._state, received.saved, received.parameters)
            require_fit(self._state, received.saved, received.kinds, received.parameters)
            received.fill()
        except CheckpointMismatch as error:
            raise CheckpointMismatch(
                f"{plan.name} is sound but does not fit: {error}; nothing was loaded or changed"
            ) from error
        self._received = received
        return {"nbytes": received.nbytes, "left": received.left}

    def apply(self) -> dict[str, Any]:
        """Put this rank's part into the live objects."""
        received = self._received
        assert received is not None, "examine() came first on every rank"
        note = received.note
        self._received, self.cursor = None, received.cursor
        self.flags = received.flags
        try:
            land(self._state, received.saved, self._around.threads, received.views)
            notes = (note, apply(self._state, received.saved, received.random, received.parameters))
        except (CheckpointMismatch, RuntimeError) as error:  # a device failed, or has no room
            raise CheckpointMismatch(
                f"{self._plan.name} is sound, but {error}; the live objects hold some of it and must not"
                " be used"
            ) from error
        finally:
            received.saved.clear()
        return {"note": "; ".join(filter(None, notes)), "copy": f"{self._plan.name} {self._plan.commit}"}


class Restorer:
    """One rank's part in restoring."""

    def __init__(self, around: SaveContext, groups: AddedGroups | None = None) -> None:
        self._around = around
        self._groups = groups or AddedGroups()
        self._looked_at: dict[str, str] = {}  # the copies that some rank sees

    def restore(self, state: Mapping[str, object], avoid: Collection[str]) -> Restored | None:
        """Load once; see :meth:`outlast.checkpoint.checkpointer.Checkpointer.restore`."""
        self._groups.begin(state)
        try:
            found = self._restore(state, avoid)
        except BaseException:
            self._groups.undo()
            raise
        finally:
            if self._around.buffers is not None:
                self._around.buffers.take_back()
        self._groups.keep()
        return found

    def _restore(self, state: Mapping[str, object], avoid: Collection[str]) -> Restored | None:
        started = self._around.clock.monotonic()
        recall = Recall(self._around, avoid) if self._around.settings.global_url else None
        while True:
            resolution, unusable = self._survey(avoid)
            for plan in resolution.plans:
                place = None if plan.suspect else (plan.step, plan.generation)
                if recall is not None and recall.newer(place):
                    break
                attempt = _Attempt(self._around, plan, state, Marks(avoid), self._groups)
                parallel = self._around.parallel
                damaged = parallel and parallel.land(plan.name, plan.commit, attempt.needs_disk)
                agreed = damaged or self._around.rounds.hold("examined", attempt.examine)
                if agreed.fine:
                    self._note_missing(plan, unusable, Marks(avoid).durable)
                    return self._finish(plan, attempt, agreed, unusable, started)
                self._groups.undo()
                unusable[plan.name] = agreed.text
                self._put_away(plan, agreed)
            else:
                if resolution.refusal:
                    raise CheckpointMismatch(resolution.refusal)
                if recall is None or not recall.newer(None):
                    break
        self._require_new(resolution, unusable, Marks(avoid).durable)
        return None

    def _note_missing(self, plan: LoadPlan, unusable: dict[str, str], known: Collection[str]) -> None:
        """Report newer copies that the run has on disk by what the launcher knows, and that nobody sees."""
        for name in () if self._around.settings.global_url else known:  # some may be there alone
            if place_of(name) > (plan.step, plan.generation) and name not in unusable | self._looked_at:
                unusable[name] = "the run has saved it, and it is not there any more"

    def _require_new(self, resolution: Resolution, unusable: dict[str, str], known: Collection[str]) -> None:
        """Check that a run of which nothing can be loaded has never saved.

        Raises:
            NoUsableCheckpoint: it has; ``known`` are copies that it has on disk by what the launcher knows.
        """
        torn = self._around.torn
        for one in torn:
            seen = unusable.setdefault(one.name, one.reason)
            if one.missing and seen != one.reason:
                unusable[one.name] = "; ".join(filter(None, (seen, one.why)))
        if not unusable and known:
            raise NoUsableCheckpoint(
                f"the run has saved {some(known)}, and none of its checkpoints is there any more: not in"
                f" {self._around.tier.folder}, not in any other tier; nothing was loaded, and a run that has"
                " saved does not start anew by itself; put them back, or name another folder (--run-dir) if"
                " that is what you want"
            )
        if not unusable or (not known and self._never_complete(resolution, unusable)):
            return
        listed = "".join(f"\n  {name}: {reason}" for name, reason in unusable.items())
        again = (
            "start it again with the nodes that saved what is missing, or "
            if any(one.missing and one.why for one in torn)
            else ""
        )
        raise NoUsableCheckpoint(
            f"none of {len(unusable)} checkpoint(s) in tier {self._around.tier.name}"
            f" ({self._around.tier.folder}) can be used; nothing was loaded, and a run that has saved does"
            f" not start anew by itself; {again}name an empty folder if that is what you want:{listed}"
        )

    def _never_complete(self, resolution: Resolution, unusable: Mapping[str, str]) -> bool:
        """Say whether all there is are parts of the first save of all, which some node never completed.

        A node keeps its newest two parts; where nobody has more than one, there was no save before. A node
        that has left the job since may have the part that is missing.
        """
        torn = self._around.torn
        parts = {one.name for one in resolution.excluded if one.incomplete} | {one.name for one in torn}
        if len(parts) != 1 or unusable.keys() != parts or any(one.why for one in torn):
            return False
        [name] = parts
        self._around.record(
            Note, reason=f"{name} was the first save and never complete ({unusable[name]}): a new start"
        )
        return True

    def _survey(self, avoid: Collection[str]) -> tuple[Resolution, dict[str, str]]:
        """Return what to try, and why each other copy cannot be used."""
        around = self._around
        tier = around.tier
        marks = Marks(avoid)
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
                    copies[name] = preferred([copies[name], found], marks) if name in copies else found
            return {"copies": codec.values_of(tuple(copies.values())), "quarantined": tier.quarantined()}

        agreed = around.rounds.hold("inventory", look)
        agreed.raise_common(CheckpointError)
        inventories = [codec.convert(report.data["copies"], tuple[Copy, ...]) for report in agreed.reports]
        resolution = resolve(inventories, avoid, around.identity.run_id)
        self._looked_at = {copy.name: "" for inventory in inventories for copy in inventory}
        unusable = {
            f"quarantine/{name}": reason
            for report in agreed.reports
            for name, reason in report.data["quarantined"].items()
        }
        for excluded in resolution.excluded:
            unusable[excluded.name] = excluded.reason
            self._exclude(excluded)
        return resolution, unusable

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
        around = self._around
        name, reason = excluded.name, excluded.reason
        only_in_memory = excluded.aside and name not in around.tier.names()
        if only_in_memory:  # by every rank, before the first drops it: any of them may be killed now
            with contextlib.suppress(OSError):
                around.tier.remember(name, {"name": name, "reason": reason, "tier": "memory"})
        if excluded.aside:
            self._drop_from_memory(name)
        if not around.leads:
            return
        if only_in_memory:
            around.record(Quarantined, step=excluded.step, checkpoint=f"memory/{name}", reason=reason)
            return
        if not excluded.aside:
            around.record(Note, reason=f"{name} is passed over: {reason}")
            return
        damage = excluded.damage or Damage("", "", "")
        note = {
            "name": name,
            "reason": reason,
            "rank": excluded.rank,
            **vars(damage),
            "time": around.clock.wall(),
        }
        try:
            around.tier.quarantine(name, note)
        except OSError as error:
            around.record(
                Note, reason=f"{name} is passed over ({reason}); it could not be moved away: {error}"
            )
        else:
            around.record(Quarantined, step=excluded.step, checkpoint=name, reason=reason)

    def _finish(
        self, plan: LoadPlan, attempt: _Attempt, examined: Agreed, unusable: Mapping[str, str], started: float
    ) -> Restored:
        around = self._around
        try:
            require_claimed([report.data["left"] for report in examined.reports])
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{plan.name} is sound but does not fit: {error}") from error
        applied = around.rounds.hold("applied", attempt.apply)
        if applied.worst[1].outcome in (Outcome.DAMAGED, Outcome.SYSTEM):
            raise OutlastError(
                f"{plan.name} was sound when it was verified and could not be read again: {applied.text};"
                " the live objects hold some of it and must not be used; start again, and restore anew"
            ) from applied.error
        if not applied.fine:
            applied.raise_common(CheckpointMismatch)
        copies = {report.data["copy"] for report in applied.reports}
        if len(copies) > 1:
            raise OutlastError(
                f"ranks restored different copies: one expected, {some(sorted(copies))} found; the live"
                " objects must not be used; start again, and restore anew"
            )
        nbytes = sum(report.data["nbytes"] for report in examined.reports)
        seconds = around.clock.monotonic() - started
        self._note_sources(plan, examined)
        before = [f"{name} ({why})" for name, why in unusable.items() if not name.startswith("quarantine/")]
        tiers = sorted({report.data["tier"] for report in examined.reports})
        reason = f"{plan.reason}, from {' and '.join(tiers)}" + (
            f"; passed over: {'; '.join(before)}" if before else ""
        )
        around.record(
            Loaded,
            step=plan.step,
            checkpoint=plan.name,
            nbytes=nbytes,
            seconds=seconds,
            reason=reason,
            places=tuple(f"{tier}/{plan.name}" for tier in tiers),
            digest=plan.digest,
        )
        for one in around.torn:
            if one.missing and one.why:
                around.record(Note, reason=f"{one.name} is newer and was not loaded: {one.reason}")
        notes: dict[str, list[int]] = {}
        for rank, report in enumerate(applied.reports):
            if report.data["note"]:
                notes.setdefault(report.data["note"], []).append(rank)
        lines = tuple(
            note if len(ranks) == len(applied.reports) else f"rank {some(ranks)}: {note}"
            for note, ranks in notes.items()
        )
        for line in lines:
            around.record(Note, reason=line)
        about = (nbytes, seconds, "+".join(tiers), attempt.flags, lines)
        return Restored(plan.step, plan.name, attempt.cursor, *about)

    def _note_sources(self, plan: LoadPlan, examined: Agreed) -> None:
        """Drop damaged copies in memory for which another tier's was loaded, and say so."""
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
