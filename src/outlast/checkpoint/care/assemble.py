"""State objects put together from the files of all ranks, with whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outlast.checkpoint.content.typed_json import Json
from outlast.checkpoint.loading.merge import EVERYTHING, Merger
from outlast.checkpoint.loading.pieces import Target, carry_out, differing, moves_to
from outlast.checkpoint.loading.world import World
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.core.errors import CheckpointMismatch, UsageError
from outlast.core.manifest import some

_SHOWN = 5


def united(world: World, holders: Sequence[str]) -> dict[str, Json]:
    """Return the typed JSON of state objects, with the entries of all ranks.

    Args:
        world: what was saved.
        holders: names of the objects.

    Raises:
        UsageError: no rank saved such an object.
        CheckpointMismatch: values belong to single ranks; names them.
    """
    found: dict[str, Json] = {}
    problems: list[str] = []
    for name in holders:
        said = [(rank, file.values[name]) for rank, file in world.files.items() if name in file.values]
        if not said:
            known = {each for file in world.files.values() for each in file.values}
            raise UsageError(f"no state object is called {name!r}; there are {some(known, 10)}")
        found[name] = Merger(problems).merge(said, lambda: EVERYTHING, name)
    if problems:
        raise CheckpointMismatch(f"the ranks' parts cannot be put together: {'; '.join(problems[:_SHOWN])}")
    return found


def require_alike(folder: CopyFolder, world: World, keys: Iterable[str]) -> None:
    """Refuse tensors that ranks saved in other forms, or with other bytes at one place.

    Raises:
        CheckpointMismatch: names the first few.
        DamagedCopy: a byte that had to be read is not as it was saved.
        OSError: the file system refused.
    """
    wanted = sorted(set(keys))
    problems = list(filter(None, map(world.disagreement, wanted)))
    if not problems:
        found = differing(folder, world.shards, world.pairs(wanted, 0, 1))
        problems = [
            f"{key} is not the same on {world.named(one)} and on {world.named(other)}"
            for key, one, other in found
        ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointMismatch(f"{'; '.join(problems[:_SHOWN])}{more}; nothing was written")


def read_whole(folder: CopyFolder, world: World, targets: Mapping[str, Target]) -> None:
    """Read tensors to memory, by key.

    Raises:
        CheckpointMismatch: parts of one are missing.
        DamagedCopy: a byte is not as it was saved.
        OSError: the file system refused.
    """
    moves = []
    for key, target in targets.items():
        found, why = moves_to(target, world.stored[key], 0)
        if why:
            raise CheckpointMismatch(f"{key} {why}; nothing was written")
        moves += found
    carry_out(folder, world.shards, moves)
