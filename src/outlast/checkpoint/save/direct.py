"""Saving without the checkpoint writer: every rank writes its files, one commits, and all agree.

Three rounds: *begin* (rank 0 makes the folder), *written* (each rank wrote and synced its files),
*committed* (manifest, COMMIT, rename). Until the rename the folder has a temporary name, so a failure or a
kill at any point leaves the older copies as they were and nothing that looks like a new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outlast.agreement.worker.reports import Agreed
from outlast.checkpoint.content.digest import entries_of
from outlast.checkpoint.content.format import Staging, make_image
from outlast.checkpoint.content.state import capture
from outlast.checkpoint.content.typed_json import Encoder
from outlast.checkpoint.context import SaveContext
from outlast.checkpoint.policy.manifest import (
    FileEntry,
    Identity,
    Manifest,
    copy_name,
    parse_copy_name,
    place_of,
    rank_files,
)
from outlast.checkpoint.policy.resolve import Copy, CopyState
from outlast.checkpoint.save.fingerprint import Fingerprint
from outlast.checkpoint.tiers.inventory import Pruner, inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import CheckpointMismatch, SaveFailed, StaleGeneration, UsageError
from outlast.recovery.policy.events import Quarantined, Saved, SaveLost

if TYPE_CHECKING:
    from outlast.checkpoint.content.format import Image


def write_rank_files(
    tier: DirectoryTier, temporary: str, image: Image, identity: Identity
) -> tuple[FileEntry, FileEntry]:
    """Write a rank's two files and return their entries; no digest is taken from the disk.

    Raises:
        OSError: the file system refused.
    """
    files = rank_files(identity.rank, identity.world_size)
    tier.write(temporary, dict(zip(files, (image.tensors, image.document), strict=True)))
    return entries_of(files, len(image.tensors), image.digests, image.document)


class Saver:
    """One rank's part in saving; counts failures, which all ranks share."""

    def __init__(self, around: SaveContext) -> None:
        self._around = around
        self._staging = Staging()
        self._failures, self._failing_since = 0, 0.0
        self._pruner = Pruner(around.tier, around.identity.run_id, around.settings.keep_last_n, around.record)
        self._protected: set[str] = set()
        self._began = ""  # the copy that this generation began from
        self._avoid: frozenset[str] = frozenset()
        self._fence: int | None = None
        self._latest: tuple[int, Fingerprint] | None = None

    def changed(self, step: int, state: Mapping[str, object]) -> list[str]:
        """Return what has changed since a step was written; nothing where it was not."""
        if self._latest is None or self._latest[0] != step:
            return []
        return self._latest[1].changed(capture(state))

    def follow(self, loaded: str | None, avoid: Collection[str]) -> None:
        """Record the copy that this generation loaded, and those that must not be loaded."""
        self._protected = set() if loaded is None else {loaded}
        if place_of(loaded or "")[1] != self._around.identity.generation:  # else it went back on its path
            self._began = loaded or ""
        self._avoid = frozenset(avoid)
        self._fence = self._newest_generation() if self._around.leads else None

    def save(self, step: int, state: Mapping[str, object], why: str, cursor: object) -> bool:
        """Save once; see :meth:`outlast.checkpoint.checkpointer.Checkpointer.save`."""
        around = self._around
        started = around.clock.monotonic()
        begun = around.rounds.hold("begin", lambda: self._begin(step))
        temporary = begun.reports[0].data.get("temporary", "")
        self._require_one_step(begun, temporary)
        if not begun.fine:
            return self._lost(step, started, begun, temporary)
        if not temporary:
            return True
        written = around.rounds.hold("written", lambda: self._write(temporary, step, state))
        if not written.fine:
            return self._lost(step, started, written, temporary)
        files = [entry for report in written.reports for entry in report.data["files"]]
        committed = around.rounds.hold(
            "committed", lambda: self._commit(temporary, step, files, cursor) if around.leads else {}
        )
        if not committed.fine:
            return self._lost(step, started, committed, temporary)
        self._failures = 0
        name = copy_name(step, around.identity.generation)
        around.record(
            Saved,
            step=step,
            checkpoint=name,
            nbytes=sum(entry["nbytes"] for entry in files),
            seconds=around.clock.monotonic() - started,
            reason=why,
        )
        if around.leads:
            self._pruner.committed(name)
            self._pruner.prune(self._protected, self._avoid)
        return True

    def _begin(self, step: int) -> dict[str, Any]:
        around = self._around
        said: dict[str, Any] = {"step": step}
        if not around.leads:
            return said
        if self._fence is None:
            self._fence = self._newest_generation()
        name = copy_name(step, around.identity.generation)
        if name in around.tier.names():
            found = inspect(around.tier, name, None)
            if found.state is CopyState.WHOLE and found.run_id == around.identity.run_id:
                return said
            self._set_aside(found)
        return {**said, "temporary": around.tier.begin(name)}

    def _set_aside(self, found: Copy) -> None:
        """Move a damaged copy out of the way of one of the same name.

        Raises:
            CheckpointMismatch: it is not damaged, but not one of this run's either.
            OSError: it cannot be read, or not be moved.
        """
        around = self._around
        if found.state is CopyState.UNREADABLE:
            raise OSError(f"{found.name} is there and cannot be read: {found.reason}")
        if found.state is not CopyState.DAMAGED:
            whose = found.reason or f"written by run {found.run_id!r}, this is run {around.identity.run_id!r}"
            raise CheckpointMismatch(
                f"{found.name} is there already: {whose}; nothing was written or changed;"
                " give each run a folder of its own"
            )
        around.tier.quarantine(found.name, {"name": found.name, "reason": found.reason})
        around.record(Quarantined, step=found.step, checkpoint=found.name, reason=found.reason)

    def _require_one_step(self, begun: Agreed, temporary: str) -> None:
        """Refuse to mix steps in one checkpoint.

        Raises:
            UsageError: on every rank; names two ranks and their steps.
        """
        steps = [report.data.get("step") for report in begun.reports]
        for rank, step in enumerate(steps):
            if begun.fine and step != steps[0]:
                self._clear(temporary)
                raise UsageError(
                    f"save: rank 0 is at step {steps[0]}, rank {rank} at step {step}; nothing was written;"
                    " every rank saves at the same step"
                )

    def _write(self, temporary: str, step: int, state: Mapping[str, object]) -> dict[str, Any]:
        identity = self._around.identity
        captured = capture(state)
        self._latest = (step, Fingerprint.of(captured))
        image = make_image(captured, step, identity, self._staging)
        entries = write_rank_files(self._around.tier, temporary, image, identity)
        return {"files": [asdict(entry) for entry in entries]}

    def _commit(
        self, temporary: str, step: int, files: list[dict[str, Any]], cursor: object
    ) -> dict[str, Any]:
        around, identity = self._around, self._around.identity
        newest = self._newest_generation()
        if newest > max(identity.generation, self._fence or 0):
            raise StaleGeneration(
                f"step {step} of generation {identity.generation} was not saved: generation {newest} has"
                f" saved in {around.tier.folder} meanwhile; this one is over"
            )
        manifest = Manifest(
            run_id=identity.run_id,
            generation=identity.generation,
            step=step,
            world_size=identity.world_size,
            parallelism=identity.parallelism,
            cursor=Encoder().encode(cursor, ("cursor",)),
            created=around.clock.wall(),
            files=tuple(FileEntry(**entry) for entry in files),
            began=self._began,
        )
        try:
            around.tier.seal(temporary, manifest)
        except OSError:
            self._clear(copy_name(step, identity.generation))
            raise
        return {}

    def _newest_generation(self) -> int:
        places = map(parse_copy_name, self._around.tier.names())
        return max((place[1] for place in places if place is not None), default=0)

    def _clear(self, folder: str) -> None:
        """Remove the files of a failed save; what remains is removed at the next start."""
        if self._around.leads and folder:
            with contextlib.suppress(OSError):
                self._around.tier.discard(folder)

    def _lost(self, step: int, started: float, agreed: Agreed, temporary: str) -> bool:
        """Count and report a save that failed.

        Raises:
            UsageError: the state cannot be saved, now or later.
            CheckpointMismatch: the folder holds another run's copy of this name.
            StaleGeneration: a newer generation is at work.
            SaveFailed: too many in a row.
        """
        around = self._around
        self._clear(temporary)
        agreed.raise_common()
        now = around.clock.monotonic()
        self._failing_since = self._failing_since if self._failures else now
        self._failures += 1
        seconds = now - started
        around.record(
            SaveLost, step=step, seconds=seconds, reason=f"{agreed.text}; the older checkpoints stay"
        )
        if self._failures < around.settings.max_failed_saves:
            return False
        failing = now - self._failing_since  # rank 0's is that of all ranks: no two clocks agree
        said = around.rounds.hold("failing", lambda: {"seconds": failing})
        failing = said.reports[0].data["seconds"]
        if failing >= around.settings.max_failed_seconds:
            raise SaveFailed(
                f"{self._failures} saves in a row, over {failing:.0f} s, could not be written to"
                f" {around.tier.folder}, the last one at step {step}: {agreed.text}; the older checkpoints"
                " stay; the job stops rather than train unsaved"
            ) from agreed.error
        return False
