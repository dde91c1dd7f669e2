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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
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
TABLE, REST, RANDOM, STATE = "table", "rest", "random", "state."  # contents of documents
REQUIRED = frozenset((TABLE, REST, RANDOM))
MOST_RANKS = 1 << 20

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


class Run(NamedTuple):
    """How many ranks in a row have a part of a document with the same digest; "": they have none."""

    ranks: Annotated[int, Meta(ge=1)]
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]


Contents = dict[str, tuple[Run, ...]]  # of documents, by name


def runs_of(each: Sequence[Mapping[str, str]]) -> Contents:
    """Return digests of the contents of documents, given for each document by name, as runs."""
    return {
        name: tuple(
            Run(len(list(same)), digest)
            for digest, same in itertools.groupby(one.get(name, "") for one in each)
        )
        for name in sorted(set().union(*each))
    }


def are_runs(contents: Contents, count: int) -> bool:
    """Return whether :func:`runs_of` can have returned contents for so many documents."""
    return contents.keys() >= (REQUIRED if count else set()) and all(
        sum(run.ranks for run in runs) == count
        and any(run.digest for run in runs)
        and all(one.digest != after.digest for one, after in itertools.pairwise(runs))
        for runs in contents.values()
    )


def columns_of(contents: Contents) -> dict[str, list[str]]:
    """Return the digest that each document has of a content, by name; "": none."""
    return {name: [run.digest for run in runs for _ in range(run.ranks)] for name, runs in contents.items()}


def expanded(contents: Contents) -> list[dict[str, str]]:
    """Return what :func:`runs_of` was given."""
    columns = columns_of(contents)
    return [
        {name: digest for name, digest in zip(columns, row, strict=True) if digest}
        for row in zip(*columns.values(), strict=True)
    ]


class Row(NamedTuple):
    """Three files in a manifest: tensors, digests of their chunks, and JSON document.

    Args:
        nbytes: of the safetensors file.
        digest: of that file.
        digests: digest of the file that holds the digests of its chunks.
        document_nbytes: of the document.
        document: digest of the document.
        begin: first byte of the tensors in the safetensors file.
        coordinates: the rank's place in each mesh of its table; see :mod:`outlast.checkpoint.policy.table`.
    """

    nbytes: Count
    digest: Digest
    digests: Digest
    document_nbytes: Count
    document: Digest
    begin: Count = 0
    coordinates: tuple[tuple[Count, ...], ...] = ()

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
        contents: digests of the contents of these ranks' documents, which show what is alike.
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
    contents: Contents
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
        try:
            manifest = codec.decode(text, cls)
            written = manifest.to_json()
        except (Malformed, ValueError, RecursionError) as error:
            Fields.parse(MANIFEST, text)
            raise DamagedCopy(Damage(MANIFEST, "a manifest", str(error)[:200])) from error
        same = text in (written, written.encode())
        fields = Fields(MANIFEST, {}) if same else Fields.parse(MANIFEST, text)
        for problem in manifest._problems():
            fields.refuse(*problem)
        if not same:
            fields.refuse("text", "that of a manifest", "unknown, doubled or missing fields, or spaces")
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
        if not are_runs(self.contents, len(self.own)):
            yield "contents", f"runs of {len(self.own)} ranks, of {some(REQUIRED)} too", str(self.contents)

    def row(self, rank: int) -> Row:
        """Return the row of a rank.

        Raises:
            DamagedCopy: the manifest does not list its files.
        """
        if rank not in self.ranks:
            raise DamagedCopy(Damage(MANIFEST, f"files of rank {rank}", "none"))
        return self.own[self.ranks.index(rank)]

    def of_rank(self, rank: int) -> tuple[FileEntry, FileEntry, FileEntry]:
        """Return the entries of a rank's files: tensors, digests, document; see :meth:`row`."""
        return self.row(rank).entries(rank_files(rank, self.world_size))

    def of_shared(self, number: int) -> tuple[FileEntry, FileEntry, FileEntry]:
        """Return the entries of files that all ranks share: tensors, digests, document.

        Raises:
            DamagedCopy: the manifest does not list them.
        """
        count = len(self.shared)
        if number >= count:
            raise DamagedCopy(Damage(MANIFEST, f"shared files of number {number}", f"{count} of them"))
        return self.shared[number].entries(alike_files(number, count))

    @cached_property
    def _columns(self) -> dict[str, list[str]]:
        return columns_of(self.contents)

    def contents_of(self, rank: int) -> dict[str, str]:
        """Return the digests of the contents of the document of one of the ranks, by name."""
        at = self.ranks.index(rank)
        return {name: column[at] for name, column in self._columns.items() if column[at]}

    def alike(self, content: str) -> dict[str, list[int]]:
        """Return the ranks that have a content, by its digest in their documents."""
        found: dict[str, list[int]] = {}
        for rank, digest in zip(self.ranks, self._columns.get(content, ()), strict=False):
            if digest:
                found.setdefault(digest, []).append(rank)
        return found

    def parts(self) -> dict[int, tuple[Row, dict[str, str]]]:
        """Return row and digests of contents of each rank."""
        return dict(zip(self.ranks, zip(self.own, expanded(self.contents), strict=True), strict=True))

    def needed(self, ranks: Iterable[int] | None = None) -> Iterator[FileEntry]:
        """Yield the files that ranks of the world that wrote it need; None: all that it lists."""
        chosen = self.ranks if ranks is None else [rank for rank in ranks if rank < self.world_size]
        for rank in chosen:
            yield from self.of_rank(rank)
        for number in range(len(self.shared) if chosen else 0):
            yield from self.of_shared(number)

    def joined(self, parts: Mapping[int, tuple[Row, dict[str, str]]], shared: tuple[Row, ...]) -> Manifest:
        """Return the manifest of the whole copy to which this part belongs.

        Args:
            parts: of all ranks; see :meth:`parts`.
            shared: the rows of the files that all ranks share.

        Raises:
            CheckpointError: ranks are missing.
        """
        lacking = set(range(self.world_size)) - parts.keys()
        if lacking:
            name = copy_name(self.step, self.generation)
            raise CheckpointError(f"{name}: files of rank {some(lacking)} of {self.world_size} are missing")
        own, contents = zip(*(parts[rank] for rank in range(self.world_size)), strict=True)
        return replace(self, own=own, contents=runs_of(contents), part=(), shared=shared)


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
    """Return whether a text can be the name of a folder of copies, or of a node."""
    return _LABEL.fullmatch(name) is not None


_TAKEN = ("quarantine",)  # folders beside the copies


def is_training(name: str) -> bool:
    """Return whether a text can be the name of a training, whose copies are in a folder of that name."""
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


def is_shared(file: str) -> bool:
    """Return whether a file of a copy belongs to tensors that all ranks hold alike."""
    return file.startswith("alike-")


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
