"""What a copy of a checkpoint says about itself, and how far that can be believed.

The chain of evidence: COMMIT holds the digest of MANIFEST.json, the manifest those of all other
files, a rank's JSON file those of the chunks of its tensors. Here is what the texts must
contain; digests are computed by :mod:`outlast.checkpoint.content.digest`.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from outlast.fields import FORMAT_VERSION, Damage, DamagedCopy, Fields
from outlast.parallelism.policy.degrees import NAMES, Layout

MANIFEST = "MANIFEST.json"
COMMIT = "COMMIT"
# What is read whole is no larger, whatever a file system says.
COMMIT_BYTES = 4096
MANIFEST_BYTES = 256 << 20  # 150 a file, two files a rank
DOCUMENT_BYTES = 1 << 30  # a rank's JSON file; its digests take 20 a MiB of tensors
MOST_RANKS = 1 << 20
_MOST_ELEMENTS = 1 << 60  # of a whole tensor; sizes and strides of torch have 63 bits
_MOST_DIMENSIONS = 256  # more than any tensor has
_CHUNK_BYTES = 64 << 20  # the largest chunk: as much memory is taken by each thread that reads
_WIDTHS = {  # bytes of an element, of the types that most checkpoints have
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}

_COPY_NAME = re.compile(r"step-([0-9]{9,})\.g([0-9]+)")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_CHUNK_DIGEST = re.compile(r"[0-9a-f]{16}")
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
    """What a rank's JSON file says about its safetensors file.

    Args:
        file: name of the safetensors file.
        nbytes: its size.
        chunk_bytes: size of a chunk; the last one may be shorter.
        digests: one a chunk, from the first byte of the file to the last.
        tensors: what is in it, by key.
        aliases: keys of tied tensors, each with the key under which its bytes are stored.
    """

    file: str
    nbytes: int
    chunk_bytes: int
    digests: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the shard as JSON values."""
        tensors = {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "global_shape": entry.global_shape,
                "offsets": entry.offsets,
                "nbytes": entry.nbytes,
                "range": (entry.begin, entry.end),
                **({} if entry.strides is None else {"strides": entry.strides}),
            }
            for key, entry in self.tensors.items()
        }
        return {
            "file": self.file,
            "nbytes": self.nbytes,
            "chunk_bytes": self.chunk_bytes,
            "digests": self.digests,
            "tensors": tensors,
            "aliases": self.aliases,
        }

    @classmethod
    def from_json(cls, source: str, value: object, borrowed: Collection[str] = ()) -> Shard:
        """Read a shard from JSON values.

        Args:
            source: name of the file it stands in, for errors.
            value: what :meth:`to_json` returned, through JSON.
            borrowed: keys of tensors that the same rank has in other files.

        Raises:
            DamagedCopy: it is not a shard.
        """
        fields = Fields(source, value)
        nbytes, chunk_bytes = fields.count("nbytes"), fields.count("chunk_bytes", least=1)
        if chunk_bytes > _CHUNK_BYTES:
            fields.refuse("chunk_bytes", f"at most {_CHUNK_BYTES}", str(chunk_bytes))
        digests = fields.all_matching("digests", _CHUNK_DIGEST)
        if len(digests) != -(-nbytes // chunk_bytes):
            fields.refuse("digests", f"{-(-nbytes // chunk_bytes)} of them", str(len(digests)))
        tensors = {
            key: _tensor_entry(Fields(source, entry), key, nbytes)
            for key, entry in fields.mapping("tensors").items()
        }
        spans = sorted((entry.begin, entry.end) for entry in tensors.values())
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            fields.refuse("tensors", "ranges apart from each other", "two that overlap")
        aliases = fields.mapping("aliases")
        for key, target in aliases.items():
            if type(target) is not str or (target not in tensors and target not in borrowed):
                fields.refuse(f"aliases.{key}", "the key of a tensor", repr(target))
        return cls(fields.file_name("file"), nbytes, chunk_bytes, digests, tensors, aliases)


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
        files: every file but the manifest and COMMIT.
        session: of the ranks that staged it, where nodes stage each its part; empty: one hand made it all.
        part: the ranks whose files these are; empty: all.
        alike: how many files there are with tensors that all ranks hold alike, each written once for all.
        began: the copy from which the generation began; empty: from nothing; None: not known.
    """

    run_id: str
    generation: int
    step: int
    world_size: int
    parallelism: dict[str, int]
    cursor: Any
    created: float
    files: tuple[FileEntry, ...]
    session: str = ""
    part: tuple[int, ...] = ()
    alike: int = 0
    began: str | None = None

    @property
    def ranks(self) -> Collection[int]:
        """The ranks whose files it lists."""
        return self.part or range(self.world_size)

    @property
    def layout(self) -> Layout | None:
        """The layout of the ranks that wrote it; None: not known."""
        return Layout(**self.parallelism) if self.parallelism else None

    def to_json(self) -> str:
        """Return the text of MANIFEST.json."""
        return json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read the text of MANIFEST.json, strictly.

        Raises:
            DamagedCopy: it is not a manifest, or not a complete one.
            CheckpointMismatch: it was written in another format.
        """
        fields = Fields.parse(MANIFEST, text)
        created = fields.value("created", float)
        if not math.isfinite(created):
            fields.refuse("created", "seconds", str(created))
        parallelism = fields.mapping("parallelism")
        if parallelism.keys() - set(NAMES) or any(type(ranks) is not int for ranks in parallelism.values()):
            fields.refuse("parallelism", f"ranks by {', '.join(NAMES)}", repr(parallelism))
        files = tuple(
            FileEntry(entry.file_name("name"), entry.count("nbytes"), entry.matching("digest", _DIGEST))
            for entry in (Fields(MANIFEST, each) for each in fields.value("files", list))
        )
        manifest = cls(
            run_id=fields.text("run_id"),
            generation=fields.count("generation"),
            step=fields.count("step"),
            world_size=fields.count("world_size", least=1),
            parallelism=parallelism,
            cursor=fields.value("cursor", object),
            created=created,
            files=files,
            session=fields.text("session"),
            part=fields.counts("part"),
            alike=fields.count("alike"),
            began=fields.optional_text("began"),
        )
        if manifest.world_size > MOST_RANKS:
            fields.refuse("world_size", f"at most {MOST_RANKS}", str(manifest.world_size))
        layout = manifest.layout
        if layout is not None and (layout.problem() or layout.ranks != manifest.world_size):
            fields.refuse("parallelism", f"a layout of {manifest.world_size} ranks", repr(parallelism))
        if manifest.began and parse_copy_name(manifest.began) is None:
            fields.refuse("began", "the name of a copy", repr(manifest.began))
        if manifest.alike > manifest.world_size:
            fields.refuse("alike", f"at most {manifest.world_size}", str(manifest.alike))
        if manifest.part and (max(manifest.part) >= manifest.world_size or not manifest.session):
            expected = f"ranks below {manifest.world_size} of a session"
            fields.refuse("part", expected, f"{some(manifest.part)} of session {manifest.session!r}")
        problem = manifest.incomplete()
        if problem:
            raise DamagedCopy(Damage(MANIFEST, "two files of each rank", problem))
        return manifest

    def needed(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Return the files that ranks of the world that wrote it need; None: all whose files it lists."""
        chosen = self.ranks if ranks is None else [rank for rank in ranks if rank < self.world_size]
        names = [name for rank in chosen for name in rank_files(rank, self.world_size)]
        shared = range(self.alike) if chosen else ()
        return names + [name for number in shared for name in alike_files(number, self.alike)]

    def incomplete(self) -> str:
        """Return which files of which rank are missing, doubled or unknown; empty when all is there."""
        names = [entry.name for entry in self.files]
        if len(names) < len(self.ranks):  # the names of very many ranks are not made for a short list
            return f"{len(names)} files of {len(self.ranks)} ranks"
        expected = set(self.needed())
        for kind, found in (
            ("lacks", expected - set(names)),
            ("does not know", set(names) - expected),
            ("doubles", {name for name, count in Counter(names).items() if count > 1}),
        ):
            if found:
                return f"one that {kind} {some(found)}"
        return ""

    def file(self, name: str) -> FileEntry:
        """Return the entry of a file of this copy.

        Raises:
            DamagedCopy: the manifest does not list it.
        """
        entry = self._by_name.get(name)
        if entry is None:
            raise DamagedCopy(Damage(MANIFEST, f"an entry for {name}", "none"))
        return entry

    @cached_property
    def _by_name(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.files}


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


def rank_files(rank: int, world_size: int) -> tuple[str, str]:
    """Return the names of a rank's safetensors and JSON file."""
    stem = f"rank-{rank:05d}-of-{world_size:05d}"
    return f"{stem}.safetensors", f"{stem}.json"


def alike_files(number: int, count: int) -> tuple[str, str]:
    """Return the names of one of the safetensors files that all ranks share, and of its JSON file."""
    stem = f"alike-{number:05d}-of-{count:05d}"
    return f"{stem}.safetensors", f"{stem}.json"


def is_alike(name: str) -> bool:
    """Say whether a file of a copy is one that all ranks share, by its name."""
    return name.startswith("alike-")


def first_few(problems: Sequence[str], limit: int = 5) -> str:
    """Return the first few of some sentences for a message, and how many more there are."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more


def some(names: Collection[object] | Iterable[object], limit: int = 3) -> str:
    """Return the first few names for a message, sorted, and how many more there are."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
