"""Changes to a run's copies from outside of it, each under the lock of the run folder.

The lock is held while something is changed, not while bytes are read before it: a job that starts meanwhile
is not turned away, the change is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from outlast import files
from outlast.checkpoint.policy.copies import LOCAL, Copies
from outlast.checkpoint.policy.lineage import left_behind
from outlast.checkpoint.policy.manifest import place_of, some
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.policy.retention import Removal, removals
from outlast.checkpoint.policy.trust import Trust
from outlast.checkpoint.tiers.inventory import verify
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.tools.listing import QUARANTINE, Entry, Item, Target, items, look
from outlast.checkpoint.writer_process import lock_holder
from outlast.errors import (
    CheckpointError,
    CheckpointMismatch,
    CorruptCopy,
    RunFolderBusy,
    RunFolderUnusable,
    UsageError,
)
from outlast.observe.run_folder import pid_in

_PARTS = 64  # of a copy, at most, after each of which a reader says how far it is
_AGAINST = ("suspect", "quarantined")
_NOTHING: Mapping[str, str] = {}


def read_all(item: Item, advance: Callable[[int], None]) -> Entry:
    """Look at a copy and read every byte of it.

    Args:
        item: the copy.
        advance: takes the bytes that were read since the last call.
    """
    entry = look(item)
    manifest = entry.manifest
    if entry.copy.state is not CopyState.WHOLE or manifest is None:
        return entry
    everybody = tuple(manifest.ranks)
    width = -(-len(everybody) // _PARTS)
    for first in range(0, len(everybody), width):
        ranks = everybody[first : first + width]
        found = verify(item.tier, item.name, ranks)
        if found.state is not CopyState.WHOLE:
            return replace(entry, copy=found)
        advance(manifest.nbytes * len(ranks) // len(everybody))
    return entry


@contextmanager
def changing(target: Target) -> Iterator[None]:
    """Keep launchers away; a folder of copies that belongs to no run has nobody to keep away.

    Raises:
        RunFolderBusy: a run goes on there, or its writer is still at work on this node.
        RunFolderUnusable: the run folder cannot be written, or does not say which run it is.
    """
    if target.folder is None:
        yield
        return
    root = target.folder.root
    if not target.run_id:
        raise RunFolderUnusable(f"{root / 'run.json'} does not say which run this is; nothing was changed")
    try:
        target.folder.claim(target.run_id)
    except RunFolderBusy as error:
        raise RunFolderBusy(
            f"run folder {root}: a run goes on there (pid {_holder(root / 'lock')}); nothing was changed;"
            " wait until it has ended"
        ) from error
    try:
        memory = _memory_of(target)
        if memory is not None and lock_holder(memory.lock):
            raise RunFolderBusy(
                f"run folder {root}: the run has ended and its checkpoint writer still writes; nothing was"
                " changed; try again in a moment"
            )
        yield
    finally:
        target.folder.release()


def _holder(path: os.PathLike[str]) -> str:
    with open(path, errors="replace") as lock:
        return pid_in(lock.fileno())


def set_aside(target: Target, item: Item, reason: str, damage: Mapping[str, str] = _NOTHING) -> str:
    """Move a copy into the quarantine and return by which name it is found there.

    Args:
        target: where.
        item: the copy.
        reason: why.
        damage: fields that say where the copy is damaged.

    Raises:
        UsageError: it is there already.
        CheckpointError: nothing is damaged, and the run would go on from the same state out of memory.
        RunFolderBusy: a run goes on.
        OSError: the file system refused; the copy stays where it is.
    """
    if item.aside:
        raise UsageError(f"{item.label} is in quarantine already: {item.reason}")
    with changing(target):
        in_memory = None if damage else _in_memory(target, item.name)
        if in_memory is not None:
            raise CheckpointError(
                f"{item.name} is in memory, too, left by a launcher that was killed, and the run would go on"
                f" from there: {in_memory}; nothing was changed; remove that folder first"
            )
        note = {"name": item.name, "reason": reason, **damage, "time": time.time()}
        aside = target.tier.quarantine(item.name, note)
    return f"{QUARANTINE}/{aside}"


def _memory_of(target: Target) -> MemoryFolder | None:
    if target.folder is None:
        return None
    root = target.folder.memory
    if root is None and target.run_id:
        root = default_root(target.run_id, target.folder.root)
    if root is None:
        return None
    try:
        files.require_private(root)
    except (OSError, RunFolderUnusable):  # it is gone, or a stranger's, in which nothing is of this run
        return None
    return MemoryFolder(root)


def _in_memory(target: Target, name: str) -> os.PathLike[str] | None:
    memory = _memory_of(target)
    if memory is None:
        return None
    members = memory.members()
    tier = (Stage(memory.root) if members is None else Stage(members.stage, members.private)).tier
    return tier.folder / name if name in tier.names() else None


def release(target: Target, item: Item, advance: Callable[[int], None]) -> str:
    """Let a copy be loaded again, after every byte of it was read, and return its name.

    It is moved out of the quarantine if it is there, and the run takes note that a person trusts it.

    Raises:
        UsageError: it is not in quarantine and no suspect, or there is a copy of its name.
        CorruptCopy: it is damaged.
        CheckpointError: it cannot be read to the end.
        CheckpointMismatch: another version or another run wrote it.
        RunFolderBusy: a run goes on.
        OSError: the file system refused.
    """
    if not item.aside and item.name not in avoided(target):
        raise UsageError(f"{item.name} is not in quarantine and no suspect; nothing was changed")
    with changing(target):
        pass
    entry = read_all(item, advance)
    stays = "it stays in quarantine" if item.aside else "nothing was changed"
    if entry.copy.state is CopyState.DAMAGED:
        raise CorruptCopy(f"{item.label} is damaged: {entry.copy.reason}; {stays}")
    if entry.copy.state is CopyState.INCOMPATIBLE:
        raise CheckpointMismatch(f"{item.label}: {entry.copy.reason}; {stays}")
    if entry.copy.state is CopyState.UNREADABLE:
        raise CheckpointError(f"{item.label} cannot be read: {entry.copy.reason}; {stays}")
    if target.run_id and entry.copy.run_id != target.run_id:
        raise CheckpointMismatch(
            f"{item.label} was written by run {entry.copy.run_id!r}, this is run {target.run_id!r}; {stays}"
        )
    tier, place = target.tier, target.tier.folder / QUARANTINE
    with changing(target):
        if item.aside and item.name in tier.names():
            raise UsageError(f"{item.name} is in {tier.folder}, too; {stays}")
        _tell_the_run(target, item.name)
        if item.aside:
            os.rename(place / item.aside, tier.folder / item.name)
            (place / f"{item.aside}.reason.json").unlink(missing_ok=True)
            for folder in (tier.folder, place):
                _sync(folder)
    return item.name


def _tell_the_run(target: Target, name: str) -> None:
    """Leave word for the next launcher, whose decider keeps the trust in copies."""
    folder = target.folder
    state = None if folder is None else folder.recall()
    if folder is None or state is None:
        return
    known = state.get("released")
    released = {**(known if isinstance(known, dict) else {}), name: "outlast ckpt release"}
    folder.write(folder.job_state, {**state, "released": released})


def _sync(folder: os.PathLike[str]) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def trusted(target: Target) -> Mapping[str, tuple[str, str]]:
    """Return how far the run trusts each copy, by place: a word, and why; empty when nothing is known."""
    state = None if target.folder is None else target.folder.recall()
    copies = Copies()
    try:
        copies.restore((state or {})["copies"], dict((state or {}).get("released", {})))
    except (KeyError, TypeError, ValueError):
        return {}
    return copies.standing()


def trust_in(standing: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str] | None:
    """Return what is known of a copy by name; what speaks against it in any tier goes first."""
    found = [one for place, one in standing.items() if place.rpartition("/")[2] == name]
    against = (one for one in found if one[0] in _AGAINST)
    return next(against, standing.get(f"{LOCAL}/{name}"))


def look_over(target: Target, chosen: Iterable[Item]) -> list[Entry]:
    """Look at copies, without reading their tensors, and at how far the run trusts them."""
    standing = trusted(target)
    return [replace(look(item), trust=trust_in(standing, item.name)) for item in chosen]


def avoided(target: Target) -> frozenset[str]:
    """Return the copies that the run loads last or not at all, because of a fault after they were loaded."""
    standing = trusted(target)
    names = {place.rpartition("/")[2] for place in standing}
    return frozenset(name for name in names if (trust_in(standing, name) or ("",))[0] in _AGAINST)


@dataclass(frozen=True)
class Keep:
    """How many copies stay; see :func:`outlast.checkpoint.policy.retention.removals`."""

    last_n: int
    ancestors: int = 0


@dataclass(frozen=True)
class Plan:
    """What a removal of old copies would do.

    Args:
        removals: the oldest first.
        first: the copy that is loaded next when they are gone.
        left: copies that retention does not count, by name, each with the reason.
    """

    removals: tuple[Removal, ...]
    first: Item | None
    left: dict[str, str]


def plan(target: Target, keep: Keep) -> Plan:
    """Say which copies retention gives up.

    Raises:
        UsageError: copies of several runs are there, and nobody says which of them counts.
    """
    entries = [look(item) for item in items(target) if not item.aside]
    whole = [entry for entry in entries if entry.copy.state is CopyState.WHOLE]
    runs = {entry.copy.run_id for entry in whole}
    if not target.run_id and len(runs) > 1:
        raise UsageError(
            f"{target.tier.folder}: copies of several runs are there ({some(runs)}); nothing was removed"
        )
    run_id = target.run_id or next(iter(runs), "")
    ours = {entry.copy.name: entry.item for entry in whole if entry.copy.run_id == run_id}
    left = {
        entry.copy.name: entry.copy.reason or f"of run {entry.copy.run_id!r}"
        for entry in entries
        if entry.copy.name not in ours
    }
    standing, avoid = trusted(target), avoided(target)
    proven = [one for one in ours if standing.get(f"{LOCAL}/{one}", ("",))[0] == Trust.PROVEN.value]
    newest = max(proven, key=place_of, default="")
    began = {entry.copy.name: entry.copy.began for entry in whole if entry.copy.name in ours}
    gone = removals(began, keep.last_n, {newest}, avoid, keep.ancestors)
    kept = ours.keys() - {removal.name for removal in gone}
    aside = left_behind({name: began[name] for name in kept if name not in avoid})
    first = max(kept, key=lambda name: (name not in avoid, name not in aside, place_of(name)), default="")
    return Plan(gone, ours.get(first), left)


def prune(target: Target, keep: Keep, advance: Callable[[int], None]) -> Iterator[tuple[Removal, str]]:
    """Remove old copies, after the one that would be loaded next was read and found sound.

    Yields:
        What was to be removed, and why it could not be, or an empty text.

    Raises:
        UsageError: copies of several runs are there.
        CheckpointError: the copy that would be loaded next is not sound; nothing was removed.
        RunFolderBusy: a run goes on, or has made other copies meanwhile; nothing was removed.
    """
    planned = plan(target, keep)
    if planned.first is None or not planned.removals:
        return
    found = read_all(planned.first, advance).copy
    if found.state is not CopyState.WHOLE:
        raise CheckpointError(
            f"{found.name} would be the newest that stays, and is {found.state.value}: {found.reason};"
            " nothing was removed; set it aside first (outlast ckpt verify --quarantine)"
        )
    with changing(target):
        if plan(target, keep) != planned:
            raise RunFolderBusy(
                f"{target.tier.folder}: a run was here meanwhile; nothing was removed; try again"
            )
        for removal in planned.removals:
            try:
                target.tier.discard(removal.name)
            except OSError as error:
                yield removal, str(error)
            else:
                yield removal, ""
