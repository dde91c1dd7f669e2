"""What a copy of a checkpoint says about itself, and how far that can be believed.

The chain of evidence: COMMIT holds the digest of MANIFEST.json, the manifest those of all other
files, the file of digests beside a safetensors file those of its chunks. Here is what the texts must
contain; digests are computed by :mod:`outlast.checkpoint.content.digest`.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

from outlast import codec
from outlast.codec import Malformed, Meta
from outlast.errors import CheckpointError
from outlast.fields import FORMAT_VERSION, Damage, DamagedCopy, Fields
from outlast.parallelism.policy.degrees import NAMES, Layout

MANIFEST = "MANIFEST.json"
COMMIT = "COMMIT"
# What is read whole is no larger, whatever a file system says.
COMMIT_BYTES = 4096
MANIFEST_BYTES = 256 << 20  # 150 a rank
DOCUMENT_BYTES = 1 << 30  # a rank's JSON file, or its file of digests
CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in the cache when it is copied and digested
DIGEST_BYTES = 8  # of the digest of a chunk
MOST_RANKS = 1 << 20
_MOST_ELEMENTS = 1 << 60  # of a whole tensor; sizes and strides of torch have 63 bits
_MOST_DIMENSIONS = 256  # more than any tensor has
_WIDTHS = {  # bytes of an element, of the types that most checkpoints have
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}

_COPY_NAME = re.compile(r"step-([0-9]{9,})\.g([0-9]+)")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # no path


@dataclass(frozen=True)
class Identity:
    """Who writes and reads: one rank of one generation of one run.

    Args:
        run_id: of the run.
        generation: of the ranks.
        rank: this one.
        world_size: how many there are.
        layout: of the ranks; None: not known.
    """

    run_id: str
    generation: int
    rank: int
    world_size: int
    layout: Layout | None = None

    @property
    def parallelism(self) -> dict[str, int]:
        """What a manifest says of the layout; empty: it is not known."""
        return {} if self.layout is None else dict(vars(self.layout))


@dataclass(frozen=True)
class FileEntry:
    """A file of a copy; the digest is that of its chunks' digests."""

    name: str
    nbytes: int
    digest: str


Count = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Row(NamedTuple):
    """What a manifest says of three files: tensors, digests of their chunks, and JSON document.

    Args:
        nbytes: of the safetensors file.
        digest: of that file.
        digests: digest of the file that holds the digests of its chunks.
        document_nbytes: of the document.
        document: digest of the document.
    """

    nbytes: Count
    digest: Digest
    digests: Digest
    document_nbytes: Count
    document: Digest

    def entries(self, names: Names) -> tuple[FileEntry, FileEntry, FileEntry]:
        """Return the entries of the three files.

        Args:
            names: of the files.
        """
        return (
            FileEntry(names.tensors, self.nbytes, self.digest),
            FileEntry(names.digests, digests_nbytes(self.nbytes), self.digests),
            FileEntry(names.document, self.document_nbytes, self.document),
        )


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a shard.

    Args:
        dtype: torch's name of it, "bfloat16".
        shape: of the part that is in this shard.
        global_shape: of the whole tensor.
        offsets: where the part begins in the whole, one number a dimension.
        begin: first byte in the shard's file.
        end: byte after the last.
        strides: memory order that the part had, in elements; None: its elements were one behind the other, as
            they are in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """A safetensors file, as the manifest and the JSON file beside it describe it.

    Args:
        file: name of the safetensors file.
        nbytes: its size.
        digest: of its chunks' digests.
        tensors: what is in it, by key.
        aliases: keys of tied tensors, each with the key under which its bytes are stored.
    """

    file: str
    nbytes: int
    digest: str
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]

    @classmethod
    def of(cls, fields: Fields, entry: FileEntry, borrowed: Collection[str] = ()) -> Shard:
        """Read what a JSON file says of the safetensors file beside it.

        Args:
            fields: of the JSON file.
            entry: of the safetensors file, in the manifest.
            borrowed: keys of tensors that the same rank has in other files.

        Raises:
            DamagedCopy: it describes no such file.
        """
        tensors = {
            key: _tensor_entry(Fields(fields.source, said), key, entry.nbytes)
            for key, said in fields.mapping("tensors").items()
        }
        spans = sorted((one.begin, one.end) for one in tensors.values())
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            fields.refuse("tensors", "ranges apart from each other", "two that overlap")
        aliases = fields.mapping("aliases")
        for key, target in aliases.items():
            if type(target) is not str or (target not in tensors and target not in borrowed):
                fields.refuse(f"aliases.{key}", "the key of a tensor", repr(target))
        return cls(entry.name, entry.nbytes, entry.digest, tensors, aliases)


def table_of(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return what a JSON file says of tensors, for :meth:`Shard.of`."""
    return {
        key: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "global_shape": entry.global_shape,
            "offsets": entry.offsets,
            "nbytes": entry.nbytes,
            "range": (entry.begin, entry.end),
            **({} if entry.strides is None else {"strides": entry.strides}),
        }
        for key, entry in tensors.items()
    }


def _tensor_entry(fields: Fields, key: str, size: int) -> TensorEntry:
    shape, whole = fields.counts("shape"), fields.counts("global_shape")
    offsets, span = fields.counts("offsets"), fields.counts("range")
    if not len(shape) == len(whole) == len(offsets):
        fields.refuse(key, "shape, global_shape and offsets of one length", f"{shape}, {whole}, {offsets}")
    if len(whole) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in whole) > _MOST_ELEMENTS:
        fields.refuse(key, "the shape of a tensor", repr(whole))
    if any(start + length > full for start, length, full in zip(offsets, shape, whole, strict=True)):
        fields.refuse(key, f"a part of {whole}", f"{shape} at {offsets}")
    if len(span) != 2 or span[1] > size or span[1] - span[0] != fields.count("nbytes"):
        fields.refuse(key, f"a range of its nbytes within {size} bytes", str(span))
    nbytes, count, width = span[1] - span[0], math.prod(shape), _WIDTHS.get(fields.text("dtype"))
    if (nbytes % count if count else nbytes) or (width is not None and nbytes != count * width):
        fields.refuse(key, f"the bytes of {fields.text('dtype')}{list(shape)}", f"{nbytes} bytes")
    strides = fields.counts("strides") if fields.has("strides") else None
    if strides is not None and (max(strides, default=0) > _MOST_ELEMENTS or not is_dense(shape, strides)):
        fields.refuse(key, f"strides of {shape} that leave no gap", str(strides))
    return TensorEntry(fields.text("dtype"), shape, whole, offsets, span[0], span[1], strides)


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements are one behind the other, as torch counts them."""
    steps = itertools.accumulate((max(size, 1) for size in reversed(shape)), operator.mul, initial=1)
    return tuple(steps)[-2::-1] if shape else ()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether the elements of a tensor fill a block of memory, in whatever order."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1):
        if size and step != expected:
            return 0 in shape
        expected *= size
    return True


@dataclass(frozen=True)
class Manifest:
    """The list of a copy's files, and what the copy is.

    Args:
        run_id: the run that wrote it.
        generation: the generation that wrote it.
        step: completed steps.
        world_size: ranks that wrote it.
        parallelism: ranks along each dimension of the layout in force, ``{"tp": 2, "dp": 4}``; empty: the
            launcher knew none.
        cursor: where in the data the next step reads, as typed JSON; None: the state knows.
        created: wall time of the commit, seconds since the epoch.
        own: the files of each rank of :attr:`ranks`.
        session: of the ranks that staged it, where nodes stage each its part; empty: one hand made it all.
        part: the ranks whose files these are, in order; empty: all.
        shared: the files with tensors that all ranks hold alike, each written once for all.
        began: the copy from which the generation began; empty: from nothing; None: not known.
    """

    run_id: str
    generation: Count
    step: Count
    world_size: Annotated[int, Meta(ge=1)]
    parallelism: dict[str, int]
    cursor: Any
    created: float
    own: tuple[Row, ...]
    session: str = ""
    part: tuple[Count, ...] = ()
    shared: tuple[Row, ...] = ()
    began: str | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose files it lists."""
        return self.part or range(self.world_size)

    @property
    def layout(self) -> Layout | None:
        """The layout of the ranks that wrote it; None: not known."""
        return Layout(**self.parallelism) if self.parallelism else None

    @property
    def nbytes(self) -> int:
        """Bytes of the files that it lists."""
        return nbytes_of((*self.own, *self.shared))

    def to_json(self) -> str:
        """Return the text of MANIFEST.json."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        text = json.dumps({"format": FORMAT_VERSION, **values}, separators=(",", ":"), allow_nan=False)
        return text + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read the text of MANIFEST.json, strictly: no other text stands for the same manifest.

        Raises:
            DamagedCopy: it is not a manifest, or not a complete one.
            CheckpointMismatch: it was written in another format.
        """
        parsed = Fields.parse(MANIFEST, text)
        try:
            manifest = codec.convert(parsed.values, cls)
            problem = next(manifest._problems(), None)
            if problem is not None:
                parsed.refuse(*problem)
            written = manifest.to_json()
        except (Malformed, ValueError, RecursionError) as error:
            raise DamagedCopy(Damage(MANIFEST, "a manifest", str(error)[:200])) from error
        if text not in (written, written.encode()):
            found = "unknown, doubled or missing fields, or spaces"
            raise DamagedCopy(Damage(MANIFEST, "the text of a manifest", found))
        return manifest

    def _problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield fields that contradict others: name, what is expected, what was found."""
        if self.world_size > MOST_RANKS:
            yield "world_size", f"at most {MOST_RANKS}", str(self.world_size)
        if not math.isfinite(self.created):
            yield "created", "seconds", str(self.created)
        if self.parallelism.keys() - set(NAMES):
            yield "parallelism", f"ranks by {', '.join(NAMES)}", repr(self.parallelism)
        layout = self.layout
        if layout is not None and (layout.problem() or layout.ranks != self.world_size):
            yield "parallelism", f"a layout of {self.world_size} ranks", repr(self.parallelism)
        if self.began and parse_copy_name(self.began) is None:
            yield "began", "the name of a copy", repr(self.began)
        if len(self.shared) > self.world_size:
            yield "shared", f"files at most of {self.world_size} ranks", str(len(self.shared))
        in_turn = all(map(operator.lt, self.part, self.part[1:]))
        if self.part and (not in_turn or self.part[-1] >= self.world_size or not self.session):
            expected = f"ranks below {self.world_size} in order, of a session"
            yield "part", expected, f"{some(self.part)} of session {self.session!r}"
        if len(self.own) != len(self.ranks):
            yield "own", f"files of {len(self.ranks)} ranks", f"of {len(self.own)}"

    def of_rank(self, rank: int) -> tuple[FileEntry, FileEntry, FileEntry]:
        """Return the entries of a rank's files: tensors, digests, document.

        Raises:
            DamagedCopy: the manifest does not list them.
        """
        ranks = self.ranks
        at = bisect_left(ranks, rank)
        if at == len(ranks) or ranks[at] != rank:
            raise DamagedCopy(Damage(MANIFEST, f"files of rank {rank}", "none"))
        return self.own[at].entries(rank_files(rank, self.world_size))

    def of_shared(self, number: int) -> tuple[FileEntry, FileEntry, FileEntry]:
        """Return the entries of files that all ranks share: tensors, digests, document.

        Raises:
            DamagedCopy: the manifest does not list them.
        """
        count = len(self.shared)
        if number >= count:
            raise DamagedCopy(Damage(MANIFEST, f"shared files of number {number}", f"{count} of them"))
        return self.shared[number].entries(alike_files(number, count))

    def needed(self, ranks: Iterable[int] | None = None) -> Iterator[FileEntry]:
        """Yield the files that ranks of the world that wrote it need; None: all that it lists."""
        chosen = self.ranks if ranks is None else [rank for rank in ranks if rank < self.world_size]
        for rank in chosen:
            yield from self.of_rank(rank)
        for number in range(len(self.shared) if chosen else 0):
            yield from self.of_shared(number)

    def joined(self, own: Mapping[int, Row], shared: tuple[Row, ...]) -> Manifest:
        """Return the manifest of the copy of which this one is a part.

        Args:
            own: the rows of all ranks.
            shared: the rows of the files that all ranks share.

        Raises:
            CheckpointError: ranks are missing.
        """
        lacking = set(range(self.world_size)) - own.keys()
        if lacking:
            name = copy_name(self.step, self.generation)
            raise CheckpointError(f"{name}: files of rank {some(lacking)} of {self.world_size} are missing")
        rows = tuple(own[rank] for rank in range(self.world_size))
        return replace(self, own=rows, part=(), shared=shared)


def nbytes_of(rows: Iterable[Row]) -> int:
    """Return the bytes of all files of rows."""
    return sum(one.nbytes + digests_nbytes(one.nbytes) + one.document_nbytes for one in rows)


def digests_nbytes(nbytes: int) -> int:
    """Return the size of the file with the digests of the chunks of a file of some bytes."""
    return -(-nbytes // CHUNK_BYTES) * DIGEST_BYTES


def copy_name(step: int, generation: int) -> str:
    """Return the folder name of a copy."""
    return f"step-{step:09d}.g{generation}"


def is_label(name: str) -> bool:
    """Say whether a text can be the name of a folder of copies, or of a node."""
    return _LABEL.fullmatch(name) is not None


_TAKEN = ("quarantine",)  # folders beside the copies


def is_training(name: str) -> bool:
    """Say whether a text can be the name of a training, whose copies are in a folder of that name."""
    return is_label(name) and name not in _TAKEN and parse_copy_name(name) is None


def place_in(training: str, checkpoint: str) -> str:
    """Return the place of a copy for the job: tier and name, and before the tier the training, if named."""
    if not training:
        return checkpoint
    return f"{training}:{checkpoint if '/' in checkpoint else f'local/{checkpoint}'}"


def in_training(training: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record with the copies of a training as the job knows them."""
    found = dict(fields)
    if "checkpoint" in found:
        found["checkpoint"] = place_in(training, found["checkpoint"])
    if "places" in found:
        found["places"] = tuple(place_in(training, one) for one in found["places"])
    return found


def training_of(place: str) -> str:
    """Return the training in the place of a copy; empty: it has no name."""
    return place.rpartition("/")[0].rpartition(":")[0]


def tier_of(place: str) -> str:
    """Return the tier in the place of a copy."""
    return place.rpartition("/")[0].rpartition(":")[2]


def parse_copy_name(name: str) -> tuple[int, int] | None:
    """Return step and generation of a copy's folder name; None when it is no such name."""
    match = _COPY_NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match[1]), int(match[2])
    return (step, generation) if copy_name(step, generation) == name else None


def place_of(name: str) -> tuple[int, int]:
    """Return step and generation of a copy's folder name; (-1, -1) when it is no such name."""
    return parse_copy_name(name) or (-1, -1)


class Names(NamedTuple):
    """Names of three files that belong together."""

    tensors: str
    digests: str
    document: str


def rank_files(rank: int, world_size: int) -> Names:
    """Return the names of a rank's files."""
    return _names(f"rank-{rank:05d}-of-{world_size:05d}")


def alike_files(number: int, count: int) -> Names:
    """Return the names of files with tensors that all ranks hold alike."""
    return _names(f"alike-{number:05d}-of-{count:05d}")


def _names(stem: str) -> Names:
    return Names(f"{stem}.safetensors", digests_file(f"{stem}.safetensors"), f"{stem}.json")


def digests_file(tensors: str) -> str:
    """Return the name of the file with the digests of the chunks of a safetensors file."""
    return tensors.removesuffix(".safetensors") + ".digests"


def first_few(problems: Sequence[str], limit: int = 5) -> str:
    """Return the first few of some sentences for a message, and how many more there are."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more


def some(names: Collection[object] | Iterable[object], limit: int = 3) -> str:
    """Return the first few names for a message, sorted, and how many more there are."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
