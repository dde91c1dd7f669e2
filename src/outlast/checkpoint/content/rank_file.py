"""What a rank's JSON file says, read without torch: by the loader, the saver and ``outlast ckpt`` alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outlast.core.fields import Damage, DamagedCopy, Fields
from outlast.core.manifest import Identity, Shard, rank_files


@dataclass(frozen=True)
class RankFile:
    """What a rank's JSON file holds.

    Args:
        shard: the safetensors file beside it.
        values: typed JSON of each state object, by name.
        kinds: type of each optimizer and scheduler, by name.
        parameters: what each optimizer steps, in its order.
        random: typed JSON of the random states.
    """

    shard: Shard
    values: dict[str, Any]
    kinds: dict[str, str]
    parameters: dict[str, list[list[str]]]
    random: Any


def parse_rank_file(content: bytes, step: int, identity: Identity) -> RankFile:
    """Read a rank's JSON file.

    Args:
        content: its bytes, verified.
        step: of the manifest that lists it.
        identity: run, generation and world of that manifest, and the rank.

    Raises:
        DamagedCopy: it is not that rank's file.
        CheckpointMismatch: it was written in a newer format.
    """
    source = rank_files(identity.rank, identity.world_size)[1]
    fields = Fields.parse(source, content)
    whose = fields.mapping("identity")
    if whose != whose_file(step, identity):
        raise DamagedCopy(Damage(source, f"the file of {whose_file(step, identity)}", str(whose)))
    shard = Shard.from_json(source, fields.mapping("shard"))
    values, kinds = fields.mapping("state"), fields.mapping("kinds")
    parameters = fields.mapping("parameters")
    for known in parameters.values():
        if type(known) is not list or any(type(one) is not list or len(one) != 2 for one in known):
            fields.refuse("parameters", "name and form of each parameter of an optimizer", repr(known))
    return RankFile(shard, values, kinds, parameters, fields.value("random", object))


def whose_file(step: int, identity: Identity) -> dict[str, Any]:
    """Return what both files of a rank say of whose they are."""
    return {
        "run_id": identity.run_id,
        "generation": identity.generation,
        "step": step,
        "rank": identity.rank,
        "world_size": identity.world_size,
    }
