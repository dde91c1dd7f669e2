"""The copies of a run as a person sees them: where each is, and what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast import files
from outlast.checkpoint.policy.manifest import Manifest, place_of
from outlast.checkpoint.policy.resolve import Copy
from outlast.checkpoint.policy.table import Shard
from outlast.checkpoint.tiers.inventory import inspect, manifest_of, read_rank_file
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.tiers.tier import CopyFolder, DirectoryTier
from outlast.errors import CheckpointMismatch, RunFolderUnusable, UsageError
from outlast.fields import DamagedCopy
from outlast.observe import runs
from outlast.observe.run_folder import RunFolder
from outlast.observe.text import moment, say, size, table

QUARANTINE = "quarantine"
AGAINST = ("suspect", "quarantined")  # words of the trust in a copy
_NUMBERS = ("step", "generation", "size", "ranks", "rank", "bytes")
_EXPECTED = "name the folder that outlast run was given as --run-dir, or a folder of copies"


@dataclass(frozen=True)
class Target:
    """What a command is about.

    Args:
        tier: the folder of copies.
        folder: the run that they belong to; None: nobody knows.
        run_id: of that run; empty: there is none, or it cannot be read.
    """

    tier: DirectoryTier
    folder: RunFolder | None
    run_id: str


@dataclass(frozen=True)
class Item:
    """A copy and where it lies.

    Args:
        tier: opens it under its name.
        name: of the copy.
        aside: the name of its folder in the quarantine; empty: it is not there.
        reason: why it was put there.
    """

    tier: DirectoryTier
    name: str
    aside: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        """The name by which commands take it."""
        return f"{QUARANTINE}/{self.aside}" if self.aside else self.name


@dataclass(frozen=True)
class Entry:
    """A copy that was looked at.

    Args:
        item: where it lies.
        copy: what was found.
        manifest: what it says of itself; None: that cannot be believed or read.
        trust: how far the run believes it, and why; None: nothing is known.
    """

    item: Item
    copy: Copy
    manifest: Manifest | None
    trust: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the files that the manifest lists."""
        return None if self.manifest is None else self.manifest.nbytes

    def stranger(self, run_id: str) -> str:
        """Return which run wrote it; empty: the run that is looked at, or it is not known."""
        found = self.copy.run_id
        if not run_id or not found or found == run_id:
            return ""
        return f"written by run {found!r}, this is run {run_id!r}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, alike for every state; what is not known is null."""
        of_manifest = ("created", "nbytes", "world_size", "run_id")
        return {
            "name": self.item.name,
            "step": self.copy.step,
            "generation": self.copy.generation,
            **{key: getattr(self.manifest, key, None) for key in of_manifest},
            "state": self.copy.state.value,
            "reason": self.copy.reason or None,
            "where": QUARANTINE if self.item.aside else self.item.tier.name,
            "folder": str(self.item.tier.folder / (self.item.aside or self.item.name)),
            "quarantine_reason": self.item.reason or None,
            "trust": self.trust and self.trust[0],
            "trust_reason": self.trust and self.trust[1],
        }


class _Aside(DirectoryTier):
    """The quarantine as a tier in which one copy has the name again that it had before."""

    def __init__(self, tier: DirectoryTier, name: str, aside: str) -> None:
        super().__init__(tier.folder / QUARANTINE, QUARANTINE)
        self._folders = {name: aside}

    @contextmanager
    def open(self, name: str) -> Iterator[CopyFolder]:
        """Open the copy; see :meth:`DirectoryTier.open`."""
        with super().open(self._folders.get(name, name)) as folder:
            yield folder


def find(path: str) -> Target:
    """Return what a user's path names.

    Raises:
        UsageError: it is neither a run folder nor a folder of copies.
        RunFolderUnusable: it is a symbolic link in the place of a training.
    """
    if "://" in path:
        raise UsageError(f"{path}: this version looks at folders only")
    root = Path(path).absolute()
    if not root.is_dir():
        raise UsageError(f"{path}: no such folder; {_EXPECTED}{runs.nearby(root)}")
    above = RunFolder(root.parent.parent)
    if root in above.trainings() and (above.root / "run.json").exists():
        above.training(root.name)
    real = root.resolve()
    for run in (root, real.parent, real.parent.parent):
        folder = RunFolder(run)
        copies = folder.checkpoints if run == root else root
        ours = (folder.checkpoints, *folder.trainings())
        if copies.resolve() in {path.resolve() for path in ours} and (run / "run.json").exists():
            known = folder.peek(run / "run.json") or {}
            return Target(DirectoryTier(copies), folder, str(known.get("run_id", "")))
    tier = DirectoryTier(root)
    if not tier.names() and not tier.quarantined():
        raise UsageError(
            f"{path}: neither run.json nor a copy (step-...) is in it; {_EXPECTED}{runs.nearby(root)}"
        )
    return Target(tier, None, "")


def named_trainings(target: Target) -> list[Path]:
    """Return the folders of the trainings with a name, where a command is about a run and not about one."""
    if target.folder is None or target.tier.folder != target.folder.checkpoints:
        return []
    return target.folder.trainings()


def items(target: Target) -> list[Item]:
    """Return every copy, the newest first; of equal ones the quarantined last."""
    tier = target.tier
    found = [Item(tier, name) for name in tier.names()]
    for aside, reason in tier.quarantined().items():
        name = aside.partition("~")[0]
        found.append(Item(_Aside(tier, name, aside), name, aside, reason))
    return sorted(found, key=lambda item: (place_of(item.name), not item.aside), reverse=True)


def pick(target: Target, labels: Sequence[str]) -> list[Item]:
    """Return the copies with these names; ``quarantine/`` before one tells it from another in the tier.

    Raises:
        UsageError: there is no such copy; lists those that there are.
    """
    there = items(target)
    known = {item.aside: item for item in there if item.aside}
    known |= {item.name: item for item in there if not item.aside}
    known |= {item.label: item for item in there}
    missing = [label for label in labels if label not in known]
    if missing:
        names = ", ".join(item.label for item in there) or "none at all"
        raise UsageError(f"{missing[0]!r} is no copy in {target.tier.folder}; there are: {names}")
    return [known[label] for label in dict.fromkeys(labels)]


def look(item: Item) -> Entry:
    """Look at a copy without reading its tensors."""
    copy = inspect(item.tier, item.name, None)
    manifest: Manifest | None = None
    with suppress(DamagedCopy, CheckpointMismatch, OSError):
        manifest, _ = manifest_of(item.tier, item.name)
    return Entry(item, copy, manifest)


def memory_of(target: Target) -> MemoryFolder | None:
    """Return the memory folder of a run on this node; None: there is none."""
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


def staged(target: Target) -> list[Item]:
    """Return the copies of a run in the memory of this node.

    Raises:
        OSError: the file system refused.
    """
    memory = memory_of(target)
    if memory is None:
        return []
    members = memory.members()
    tier = (Stage(memory.root) if members is None else Stage(members.stage, members.private)).tier
    return [Item(tier, name) for name in tier.names()]


def tensors(item: Item, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield what is in the shards of a copy, rank by rank, as JSON values.

    Raises:
        DamagedCopy: a rank's JSON file is not as it was committed.
        CheckpointMismatch: another version wrote it.
        OSError: the file system refused.
    """
    with item.tier.open(item.name) as folder:
        shared: dict[int, Shard] = {}
        for rank in manifest.ranks:
            file = read_rank_file(folder, manifest, rank, shared)
            of = {key: key for key in file.tensors} | file.shard.table.aliases
            for key, stored in sorted(of.items()):
                entry = file.tensors[stored]
                yield {
                    "tensor": key,
                    "rank": rank,
                    "dtype": entry.dtype,
                    "shape": entry.shape,
                    "global_shape": entry.global_shape,
                    "offsets": entry.offsets,
                    "nbytes": entry.nbytes,
                    "tied_to": None if stored == key else stored,
                }


def details(entry: Entry, found: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return all that is known of a copy as JSON values.

    Args:
        entry: the copy.
        found: its tensors; None: nobody asked.
    """
    manifest = entry.manifest
    said = {key: getattr(manifest, key, None) for key in ("parallelism", "cursor")}
    listed = None if manifest is None else [vars(file) for file in manifest.needed()]
    return {**entry.to_json(), **said, "files": listed, "tensors": found}


def print_copies(entries: Sequence[Entry], run_id: str) -> None:
    """Print a table of copies, and a line for each of which more is to be said.

    Args:
        entries: the copies.
        run_id: of the run; what another one wrote is pointed out.
    """
    rows: list[tuple[object, ...]] = [
        ("name", "step", "generation", "when", "size", "ranks", "state", "where")
    ]
    for entry in entries:
        one = entry.to_json()
        when, ranks = moment(one["created"]), one["world_size"] or "-"
        cells = (one["step"], one["generation"], when, size(one["nbytes"]), ranks, one["state"], one["where"])
        rows.append((entry.item.aside or entry.item.name, *cells))
    say(*table(rows, _NUMBERS), *(line for entry in entries for line in _remarks(entry, run_id)))


def _remarks(entry: Entry, run_id: str) -> Iterator[str]:
    copy, item = entry.copy, entry.item
    if copy.reason and copy.reason != item.reason:
        yield f"{item.label} is {copy.state.value}: {copy.reason}"
    if item.aside:
        yield f"{item.label} was set aside: {item.reason}"
    if entry.trust is not None and entry.trust[0] in AGAINST and not item.aside:
        yield f"{item.label} is {entry.trust[0]} to the run: {entry.trust[1]}"
    if stranger := entry.stranger(run_id):
        yield f"{item.label} was {stranger}"


def print_details(entry: Entry, found: Sequence[Mapping[str, Any]] | None, run_id: str) -> None:
    """Print what a copy says of itself, its files, and its tensors where they are given."""
    manifest = entry.manifest
    heading = f"{entry.item.label}: {entry.copy.state.value}"
    if manifest is None:
        say(heading, *_remarks(entry, run_id))
        return
    files = [("file", "bytes", "digest"), *(tuple(vars(file).values()) for file in manifest.needed())]
    say(
        f"{heading}, {size(entry.nbytes)}",
        f"run {manifest.run_id}, step {manifest.step}, written by generation {manifest.generation}"
        f" at {moment(manifest.created)}",
        f"{manifest.world_size} rank(s): {manifest.layout or 'layout not known'}",
        f"data cursor: {'kept in the state' if manifest.cursor is None else json.dumps(manifest.cursor)}",
        *_remarks(entry, run_id),
        "",
        *table(files, _NUMBERS),
    )
    if found is None:
        return
    rows: list[tuple[object, ...]] = [("tensor", "rank", "dtype", "shape", "of the whole", "size")]
    for one in found:
        tied = f"{one['tensor']} (tied to {one['tied_to']})" if one["tied_to"] else one["tensor"]
        shape, whole, offsets = (list(one[key]) for key in ("shape", "global_shape", "offsets"))
        part = whole if shape == whole else f"{whole} from {offsets}"
        rows.append((tied, one["rank"], one["dtype"], shape, part, size(one["nbytes"])))
    say("", *table(rows, _NUMBERS))
