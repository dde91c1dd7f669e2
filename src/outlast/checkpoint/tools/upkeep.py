"""Changes to a run's copies from outside of it, each under the lock of the run folder.

The lock is held while something is changed, not while bytes are read before it: a job that starts meanwhile
is not turned away, the change is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from outlast.checkpoint.policy.copies import LOCAL, Copies, Trust
from outlast.checkpoint.policy.manifest import place_of, some
from outlast.checkpoint.policy.resolve import CopyState, Removal, left_behind, removals
from outlast.checkpoint.tiers.inventory import verify
from outlast.checkpoint.tools.listing import (
    AGAINST,
    QUARANTINE,
    Entry,
    Item,
    Target,
    items,
    look,
    memory_of,
    staged,
)
from outlast.checkpoint.writer_process import lock_holder
from outlast.errors import (
    CheckpointError,
    CheckpointMismatch,
    CorruptCopy,
    RunFolderBusy,
    RunFolderUnusable,
    UsageError,
)
from outlast.observe.progress import working
from outlast.observe.run_folder import CURES
from outlast.observe.text import clean

_NOTHING: Mapping[str, str] = {}
_NOT_RELEASED = {
    CopyState.DAMAGED: (CorruptCopy, " is damaged"),
    CopyState.INCOMPATIBLE: (CheckpointMismatch, ""),
    CopyState.UNREADABLE: (CheckpointError, " cannot be read"),
}


def read_all(item: Item) -> Entry:
    """Look at a copy and read every byte of it; a terminal shows how far that is."""
    entry = look(item)
    if entry.copy.state is not CopyState.WHOLE:
        return entry
    with working(clean(item.label), nbytes=entry.nbytes) as advance:
        return replace(entry, copy=verify(item.tier, item.name, None, advance))


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
        pid = next(iter(target.folder.holder().split()), "unknown")
        raise RunFolderBusy(
            f"run folder {root}: a run goes on there (pid {pid}); nothing was changed; wait until it has"
            " ended"
        ) from error
    try:
        memory = memory_of(target)
        if memory is not None and lock_holder(memory.lock):
            raise RunFolderBusy(
                f"run folder {root}: the run has ended and its checkpoint writer still writes; nothing was"
                " changed; try again in a moment"
            )
        yield
    finally:
        target.folder.release()


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
        for other in () if damage else staged(target):
            if other.name == item.name:
                raise CheckpointError(
                    f"{item.name} is in memory, too, left by a launcher that was killed, and the run would go"
                    f" on from there: {other.tier.folder / other.name}; nothing was changed; remove that"
                    " folder first"
                )
        note = {"name": item.name, "reason": reason, **damage, "time": time.time()}
        aside = target.tier.quarantine(item.name, note)
    return f"{QUARANTINE}/{aside}"


def release(target: Target, item: Item) -> str:
    """Let a copy be loaded again, after every byte of it was read, and return its name.

    It is moved out of the quarantine if it is there, and the run records that a person trusts it.

    Raises:
        UsageError: it is not in quarantine and no suspect, or there is a copy of its name.
        CorruptCopy: it is damaged.
        CheckpointError: it cannot be read to the end.
        CheckpointMismatch: another version or another run wrote it.
        RunFolderBusy: a run goes on.
        RunFolderUnusable: how far the run trusts its copies cannot be read.
        OSError: the file system refused.
    """
    avoid = avoided(trusted(target))
    if not item.aside and item.name not in avoid:
        raise UsageError(f"{item.name} is not in quarantine and no suspect; nothing was changed")
    with changing(target):
        pass
    entry = read_all(item)
    stays = "it stays in quarantine" if item.aside else "nothing was changed"
    if entry.copy.state in _NOT_RELEASED:
        kind, found = _NOT_RELEASED[entry.copy.state]
        raise kind(f"{item.label}{found}: {entry.copy.reason}; {stays}")
    if target.run_id and entry.copy.run_id != target.run_id:
        raise CheckpointMismatch(
            f"{item.label} was written by run {entry.copy.run_id!r}, this is run {target.run_id!r}; {stays}"
        )
    with changing(target):
        if item.aside and item.name in target.tier.names():
            raise UsageError(f"{item.name} is in {target.tier.folder}, too; {stays}")
        _tell_the_run(target, item.name)
        if item.aside:
            target.tier.take_back(item.aside, item.name)
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


def trusted(target: Target) -> dict[str, tuple[str, str]]:
    """Return how far the run trusts each copy, by place: a word, and why; empty: no launcher has kept that.

    Raises:
        RunFolderUnusable: a launcher has, and it cannot be read.
    """
    folder = target.folder
    state = None if folder is None else folder.recall()
    if folder is None or state is None:
        return {}
    try:
        return Copies.restored(state["copies"], dict(state.get("released", {}))).standing()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = "no trust in copies is kept there" if isinstance(error, KeyError) else str(error)
        raise RunFolderUnusable(
            f"{folder.job_state}: {why}; nothing was changed; {CURES[folder.job_state.name]}"
        ) from error


def look_over(target: Target, chosen: Iterable[Item]) -> list[Entry]:
    """Look at copies, without reading their tensors, and at how far the run trusts them.

    What speaks against a copy in any tier comes first. A trust that cannot be read is not known; a line on
    standard error reports that.
    """
    try:
        standing = trusted(target)
    except RunFolderUnusable as error:
        standing, why = {}, clean(str(error)).partition(";")[0]  # not what to do about it
        sys.stderr.write(f"[outlast] how far the copies are trusted is not known: {why}\n")
    against = {_name(place): one for place, one in reversed(standing.items()) if one[0] in AGAINST}
    return [
        replace(look(item), trust=against.get(item.name, standing.get(f"{LOCAL}/{item.name}")))
        for item in chosen
    ]


def avoided(standing: Mapping[str, tuple[str, str]]) -> frozenset[str]:
    """Return the copies that the run loads last or not at all, because of a fault after they were loaded."""
    return frozenset(_name(place) for place, (word, _) in standing.items() if word in AGAINST)


def _name(place: str) -> str:
    return place.rpartition("/")[2]


@dataclass(frozen=True)
class Plan:
    """What a removal of old copies would do.

    Args:
        keep_last_n: how many stay; see :func:`outlast.checkpoint.policy.resolve.removals`.
        keep_ancestors: how many older ones stay besides.
        removals: the oldest first.
        first: the copy that is loaded next when they are gone.
        left: copies that retention does not count, by name, each with the reason.
    """

    keep_last_n: int
    keep_ancestors: int
    removals: tuple[Removal, ...]
    first: Item | None
    left: dict[str, str]


def plan(target: Target, keep_last_n: int, keep_ancestors: int = 0) -> Plan:
    """Return which copies retention removes.

    Raises:
        UsageError: copies of several runs are there, and nobody says which of them counts.
        RunFolderUnusable: how far the run trusts its copies cannot be read.
    """
    avoid = avoided(standing := trusted(target))
    entries = [look(item) for item in items(target) if not item.aside]
    whole = [entry for entry in entries if entry.copy.state is CopyState.WHOLE]
    runs = {entry.copy.run_id for entry in whole}
    if not target.run_id and len(runs) > 1:
        raise UsageError(
            f"{target.tier.folder}: copies of several runs are there ({some(runs)}); nothing was removed"
        )
    run_id = target.run_id or next(iter(runs), "")
    ours = {entry.copy.name: entry for entry in whole if entry.copy.run_id == run_id}
    left = {
        entry.copy.name: entry.copy.reason or f"of run {entry.copy.run_id!r}"
        for entry in entries
        if entry.copy.name not in ours
    }
    proven = [one for one in ours if standing.get(f"{LOCAL}/{one}", ("",))[0] == Trust.PROVEN.value]
    newest = max(proven, key=place_of, default="")
    began = {name: entry.copy.began for name, entry in ours.items()}
    gone = removals(began, keep_last_n, {newest}, avoid, keep_ancestors)
    kept = ours.keys() - {removal.name for removal in gone}
    aside = left_behind({name: began[name] for name in kept if name not in avoid})
    first = max(kept, key=lambda name: (name not in avoid, name not in aside, place_of(name)), default="")
    return Plan(keep_last_n, keep_ancestors, gone, ours[first].item if first else None, left)


def prune(target: Target, planned: Plan) -> Iterator[tuple[Removal, str]]:
    """Remove old copies, after the one that would be loaded next was read and found sound.

    Yields:
        What was to be removed, and why it could not be, or an empty text.

    Raises:
        CheckpointError: the copy that would be loaded next is not sound; nothing was removed.
        RunFolderBusy: a run goes on, or has made other copies meanwhile; nothing was removed.
    """
    if planned.first is None or not planned.removals:
        return
    found = read_all(planned.first).copy
    if found.state is not CopyState.WHOLE:
        raise CheckpointError(
            f"{found.name} would be the newest that stays, and is {found.state.value}: {found.reason};"
            " nothing was removed; set it aside first (outlast ckpt verify --quarantine)"
        )
    with changing(target):
        if plan(target, planned.keep_last_n, planned.keep_ancestors) != planned:
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
