"""A rank's JSON file, written and read without torch: all of its state but the bytes of the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

from xxhash import xxh3_64_hexdigest

from outlast.checkpoint.policy.manifest import (
    RANDOM,
    REST,
    STATE,
    TABLE,
    Identity,
    Row,
    alike_files,
    rank_files,
    some,
)
from outlast.checkpoint.policy.table import Shard, TensorEntry
from outlast.codec import Malformed, Meta, convert
from outlast.fields import FORMAT_VERSION, Damage, DamagedCopy, Fields

T = TypeVar("T")
_Count = Annotated[int, Meta(ge=0)]
_Bits = Annotated[str, Meta(pattern=r"^(1|[1-9a-f][0-9a-f]*)\Z")]
Parameter = tuple[str, str, list[_Count] | None]  # name, form and strides


@dataclass(frozen=True)
class RankFile:
    """What a rank's JSON file holds.

    Args:
        shard: the safetensors file beside it.
        values: typed JSON of each state object, by name.
        kinds: type of each optimizer and scheduler, by name.
        parameters: what each optimizer steps, in its order.
        random: typed JSON of the random states.
        borrowed: the tensors that are in files which all ranks share: number of the file, by key.
        shared: what these files say of themselves, with the borrowed tensors only.
        flags: of each module, by name.
    """

    shard: Shard
    values: dict[str, Any]
    kinds: dict[str, str]
    parameters: dict[str, list[Parameter]]
    random: Any
    borrowed: dict[str, int] = field(default_factory=dict)
    shared: tuple[Shard, ...] = ()
    flags: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All safetensors files in which the rank has tensors."""
        return (self.shard, *self.shared)

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """All tensors of the rank, whatever file they are in."""
        return {key: entry for shard in self.shards for key, entry in shard.tensors.items()}

    def lending(self, files: Mapping[int, Shard]) -> RankFile:
        """Return the same with what the shared files say of the borrowed tensors.

        Args:
            files: by number.

        Raises:
            DamagedCopy: a tensor is not where it is said to be.
        """
        shared = []
        for number in sorted(set(self.borrowed.values())):
            keys = {key for key, at in self.borrowed.items() if at == number}
            found = {key: entry for key, entry in files[number].tensors.items() if key in keys}
            if len(found) < len(keys):
                lacking = some(keys - found.keys())
                raise DamagedCopy(
                    Damage(files[number].file.name, f"tensors that a rank borrows ({lacking})", "none")
                )
            shared.append(replace(files[number], tensors=found))
        return replace(self, shared=tuple(shared))


def contents_of(source: str, document: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the parts of a rank's JSON file that other ranks may have alike, by name.

    Args:
        source: name of the file, for errors.
        document: its content.

    Raises:
        DamagedCopy: it lacks one of them, or no :func:`document_of` has written it.
    """
    try:
        values = {
            TABLE: [document[name] for name in ("meshes", "tensors", "aliases", "borrowed")],
            REST: [document["kinds"], document["parameters"], document["flags"]],
            RANDOM: document["random"],
            **{f"{STATE}{name}": value for name, value in document["state"].items()},
        }
        return {name: xxh3_64_hexdigest(text_of(value).encode()) for name, value in values.items()}
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise DamagedCopy(Damage(source, "contents", f"{type(error).__name__}: {error}"[:200])) from error


def parse_rank_file(
    content: bytes, step: int, identity: Identity, row: Row, contents: Mapping[str, str]
) -> RankFile:
    """Read a rank's JSON file.

    Args:
        content: its bytes, verified.
        step: of the manifest that lists it.
        identity: run, generation and world of that manifest, and the rank.
        row: of the rank, in the manifest.
        contents: digests of its contents, by name, in the manifest.

    Raises:
        DamagedCopy: it is not that rank's file.
        CheckpointMismatch: it was written in another format.
    """
    names = rank_files(identity.rank, identity.world_size)
    source = names.document
    fields = _parsed(content, source, whose_file(step, identity))
    borrowed = _typed(fields, "borrowed", dict[str, _Count])
    shard = Shard.of(fields, row.entries(names)[0], row, borrowed)
    kinds = _typed(fields, "kinds", dict[str, str])
    parameters = _typed(fields, "parameters", dict[str, list[Parameter]])
    flags = _typed(fields, "flags", dict[str, tuple[_Bits, _Bits]])
    values = fields.mapping("state")
    random = fields.value("random", object)
    found = contents_of(source, fields.values)
    if found != contents:
        unlike = some(name for name, _ in found.items() ^ contents.items())
        raise DamagedCopy(Damage(source, "contents as the manifest has them", f"others ({unlike})"))
    return RankFile(shard, values, kinds, parameters, random, borrowed, flags=flags)


def _parsed(content: bytes, source: str, whose: Mapping[str, Any]) -> Fields:
    fields = Fields.parse(source, content)
    found = fields.mapping("identity")
    if found != whose:
        raise DamagedCopy(Damage(source, f"the file of {whose}", str(found)))
    return fields


def _typed(fields: Fields, name: str, kind: type[T]) -> T:
    try:
        return convert(fields.value(name, dict), kind)
    except Malformed as error:
        raise DamagedCopy(Damage(fields.source, name, str(error))) from error


def parse_alike_file(
    content: bytes, step: int, identity: Identity, row: Row, place: tuple[int, int]
) -> Shard:
    """Read the JSON file of a safetensors file that all ranks share.

    Args:
        content: its bytes, verified.
        step: of the manifest that lists it.
        identity: run, generation and world of that manifest, and any rank.
        row: of the file, in the manifest.
        place: its number, and how many there are.

    Raises:
        DamagedCopy: it is not that file.
        CheckpointMismatch: it was written in another format.
    """
    names = alike_files(*place)
    fields = _parsed(content, names.document, whose_alike(step, identity))
    return Shard.of(fields, row.entries(names)[0], row)


def whose_alike(step: int, identity: Identity) -> dict[str, Any]:
    """Return what files that all ranks share say of whose they are: nothing of a rank or a node."""
    return {name: value for name, value in whose_file(step, identity).items() if name != "rank"}


def whose_file(step: int, identity: Identity) -> dict[str, Any]:
    """Return what both files of a rank say of whose they are."""
    return {
        "run_id": identity.run_id,
        "generation": identity.generation,
        "step": step,
        "rank": identity.rank,
        "world_size": identity.world_size,
    }


def text_of(value: object) -> str:
    """Return JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def document_of(values: Mapping[str, object], listing: str) -> bytes:
    """Return the text of a JSON file.

    Args:
        values: all but the tensors, by name.
        listing: JSON of the tensors, which is as it was one step ago.
    """
    return f'{text_of({"format": FORMAT_VERSION, **values})[:-1]},"tensors":{listing}}}'.encode()
