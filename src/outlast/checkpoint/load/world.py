"""What a world of ranks saved in one copy, and its values put together for a rank of another world.

Where all ranks say the same there is nothing to decide. Where mappings have other keys on other ranks, as the
stages of a pipeline do, the live object says by its own keys which entries it wants. What differs otherwise
belongs to single ranks; it is not known which rank of another world would get it, so it is refused by name.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outlast.checkpoint.content.codecs import Coded, Piece, distributed, piece_of, unsupported
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.content.state import LiveState, template_of
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Decoder, element_type_of
from outlast.checkpoint.load.reading import Held, Stored
from outlast.checkpoint.policy.manifest import (
    MANIFEST,
    STATE,
    TABLE,
    FileEntry,
    Manifest,
    rank_files,
    some,
)
from outlast.checkpoint.policy.table import Cut, Form, Shard, Table, TensorEntry
from outlast.checkpoint.tiers.inventory import read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.slices import Part, Split, divided, overlapping


class _Group:
    """Ranks that have the same table, or one file that all ranks share.

    Args:
        table: theirs.
        borrowed: numbers of the files that have other tensors of them, by key.
        sources: numbers of the files, as in :attr:`World.files`, in order.
        coordinates: place of each rank in the meshes of the table.
    """

    def __init__(
        self,
        table: Table,
        borrowed: Mapping[str, int],
        sources: Sequence[int],
        coordinates: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        self.table = table
        self.borrowed = borrowed
        self.sources = sources
        self._coordinates = coordinates
        self._at: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}

    def part(self, key: str, source: int) -> Part:
        """Return which part of a tensor a rank has."""
        coordinates = self._coordinates[bisect_left(self.sources, source)]
        return self.table.forms[key].of(self.table.meshes, coordinates)

    def holding(self, form: Form, wanted: Part) -> Iterator[Held]:
        """Yield what is stored of a tensor and overlaps a part of it."""
        if form.mesh is None:
            part = form.of((), ())
            if part.overlap(wanted) is not None:
                yield Held(part, self.sources)
            return
        at, mesh = self._index(form), self.table.meshes[form.mesh]
        for place, part in _within(Part.whole(form.shape), form.cuts, mesh, wanted):
            if place in at:
                yield Held(part, at[place])

    def is_divided(self, form: Form) -> bool:
        """Say whether no two ranks have the same part of a tensor."""
        different = 1 if form.mesh is None else len(self._index(form))
        return different == len(self.sources)

    def _index(self, form: Form) -> dict[tuple[int, ...], list[int]]:
        """Return the ranks by their places along the dimensions of the mesh by which a tensor is divided."""
        mesh, dimensions = form.mesh or 0, tuple(along for _, along in form.cuts)
        known = (mesh, *dimensions)
        found = self._at.get(known)
        if found is None:
            found = self._at[known] = {}
            for source, coordinates in zip(self.sources, self._coordinates, strict=True):
                place = tuple(coordinates[mesh][along] for along in dimensions)
                found.setdefault(place, []).append(source)
        return found


def _within(
    part: Part, cuts: Sequence[Cut], mesh: Sequence[int], wanted: Part
) -> Iterator[tuple[tuple[int, ...], Part]]:
    """Yield the places along a mesh, and their parts, that overlap a wanted part after all cuts."""
    if not cuts:
        yield (), part
        return
    (axis, along), *rest = cuts
    for index in overlapping(part, axis, mesh[along], wanted):
        for place, each in _within(divided(part, Split(axis, mesh[along], index)), rest, mesh, wanted):
            yield (index, *place), each


class World:
    """The saved world. Of documents that are alike one is read and verified; of tensors nothing is.

    Which rank has which part of a tensor follows from the manifest and the few tables that differ.

    Args:
        folder: the copy.
        manifest: its manifest.

    Raises:
        DamagedCopy: a byte is not as it was committed, or the folder lacks a document.
        CheckpointMismatch: another version wrote it.
        OSError: the file system refused.
    """

    def __init__(self, folder: CopyFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._read: dict[int, RankFile] = {}
        self._shared: dict[int, Shard] = {}
        self._entries: dict[int, dict[str, TensorEntry]] = {}
        self.names = tuple(name.removeprefix(STATE) for name in manifest.contents if name.startswith(STATE))
        for name in self.names:
            for rank, value in self.values(name):
                file = self.document(rank)
                stands = dict.fromkeys(file.tensors, torch.empty(0))  # what is put together is typed JSON
                Decoder(rank_files(rank, manifest.world_size).document, stands).decode(value)
        self._groups = [
            self._group(self.document(ranks[0]), ranks) for ranks in manifest.alike(TABLE).values()
        ]
        self._group_of = {source: group for group in self._groups for source in group.sources}
        borrowed = sorted({number for group in self._groups for number in group.borrowed.values()})
        for number in borrowed:
            source = manifest.world_size + number
            group = self._group_of[source] = _Group(self._shared[number].table, {}, (source,), ((),))
            self._groups.append(group)
        self._having: dict[str, list[_Group]] = {}
        for group in self._groups:
            for key, form in group.table.forms.items():
                _require_width(MANIFEST, key, form)
                self._having.setdefault(key, []).append(group)

    def _group(self, file: RankFile, ranks: Sequence[int]) -> _Group:
        coordinates = [self.manifest.own[rank].coordinates for rank in ranks]
        for one in coordinates:
            file.shard.table.require_place(MANIFEST, one)
        return _Group(file.shard.table, file.borrowed, ranks, coordinates)

    def document(self, rank: int) -> RankFile:
        """Return the document of a rank."""
        if rank not in self._read:
            self._read[rank] = read_rank_file(self._folder, self.manifest, rank, self._shared)
        return self._read[rank]

    def differing(self, content: str) -> list[tuple[int, RankFile]]:
        """Return a document for each digest that a content has, and its rank."""
        return [(ranks[0], self.document(ranks[0])) for ranks in self.manifest.alike(content).values()]

    def values(self, name: str) -> Said:
        """Return all contents of a state object, each with the first rank that has it."""
        return [(rank, file.values[name]) for rank, file in self.differing(STATE + name)]

    def is_everywhere(self, name: str) -> bool:
        """Say whether all ranks have a state object."""
        return all(run.digest for run in self.manifest.contents[STATE + name])

    @property
    def keys(self) -> Collection[str]:
        """The keys of all tensors."""
        return self._having.keys()

    def file(self, source: int) -> FileEntry:
        """Return a safetensors file: of a rank, or behind the ranks one that all share."""
        first = self.manifest.world_size
        of = self.manifest.of_rank(source) if source < first else self.manifest.of_shared(source - first)
        return of[0]

    def named(self, source: int) -> str:
        """Return whose file it is, for messages; see :meth:`file`."""
        own = source < self.manifest.world_size
        return f"rank {source}" if own else f"the ranks that share {self.file(source).name}"

    def source(self, rank: int, key: str) -> int:
        """Return the number of the file in which a rank has a tensor."""
        shared = self._group_of[rank].borrowed.get(key)
        return rank if shared is None else self.manifest.world_size + shared

    def first(self, key: str) -> int:
        """Return the number of the first file that has a tensor."""
        return self._having[key][0].sources[0]

    def form(self, key: str) -> Form:
        """Return the form of a tensor as the first ranks have it that have it."""
        return self._having[key][0].table.forms[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self.form(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return element_type_of(self.form(key).dtype, key)

    def nbytes(self, key: str) -> int:
        """Return the bytes of a whole tensor."""
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def in_parts(self, key: str) -> bool:
        """Say whether any rank has less than the whole of a tensor."""
        return any(group.table.forms[key].in_parts(group.table.meshes) for group in self._having[key])

    def disagreement(self, key: str) -> str:
        """Return how ranks disagree on the form of a tensor; empty when they do not."""
        first, *others = self._having[key]
        for other in others:
            texts = [one.table.forms[key].text for one in (first, other)]
            if texts[0] != texts[1]:
                on = [self.named(one.sources[0]) for one in (first, other)]
                return f"{key} is {texts[0]} on {on[0]}, {texts[1]} on {on[1]}"
        return ""

    def held(self, key: str, wanted: Part) -> list[Held]:
        """Return what is stored of a tensor and overlaps a part of it: each part once, with all that have it.

        Args:
            key: of the tensor.
            wanted: the part.
        """
        found: dict[Part, Sequence[int]] = {}
        for group in self._having[key]:
            for part, sources in group.holding(group.table.forms[key], wanted):
                found[part] = sorted((*found[part], *sources)) if part in found else sources
        return [Held(part, sources) for part, sources in found.items()]

    def entry(self, key: str, source: int) -> TensorEntry:
        """Return where a tensor is in a file."""
        if source not in self._entries:
            own = source < self.manifest.world_size
            row = (
                self.manifest.row(source) if own else self.manifest.shared[source - self.manifest.world_size]
            )
            table = self._group_of[source].table
            self._entries[source] = table.entries(MANIFEST, self.file(source), row.begin, row.coordinates)
        return self._entries[source][key]

    def pairs(self, keys: Collection[str], reader: int, readers: int) -> list[tuple[str, Stored, Stored]]:
        """Return which stored parts one reader is to compare; together the readers compare all.

        Args:
            keys: of tensors of which all that is stored at one place must be the same.
            reader: which reader.
            readers: how many there are.
        """
        found = []
        mine = [source for source in self._group_of if source % readers == reader]
        for key in keys:
            having = self._having[key]
            if len(having) == 1 and having[0].is_divided(having[0].table.forms[key]):
                continue
            for source in mine:
                group = self._group_of[source]
                if key not in group.table.forms:
                    continue
                part = group.part(key, source)
                for same, (first, *_) in self.held(key, part):
                    its = self._group_of[first].table.forms[key]
                    if same == part and first != source and its.text == group.table.forms[key].text:
                        one, other = (Stored(each, self.entry(key, each)) for each in (first, source))
                        found.append((key, one, other))
        return found


def _require_width(source: str, key: str, form: Form) -> None:
    expected = element_type_of(form.dtype, source).itemsize
    if expected != form.width:
        raise DamagedCopy(Damage(source, f"{key} of {expected} bytes an element", str(form.width)))


@dataclass(frozen=True)
class Leaf:
    """A tensor in a saved state.

    Args:
        path: where, for messages.
        key: under which its bytes are stored.
        live: the live tensor of the same place; None when none is known.
        of_optimizer: an optimizer's, which may keep another type than the parameter that stands for it.
    """

    path: str
    key: str
    live: torch.Tensor | None
    of_optimizer: bool


def leaves_of(
    values: Mapping[str, Json], state: LiveState, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Leaf]:
    """Yield the tensors of a state in typed JSON, each with its live counterpart.

    Args:
        values: by name.
        state: the live objects.
        shapes: of the whole tensors, by key.
    """
    stands = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    keys = {id(tensor): key for key, tensor in stands.items()}
    decoder = Decoder("state", stands)
    for name, value in values.items():
        if name in state:
            saved = decoder.decode(value)
            template = template_of(state, name, saved, lambda one: one.shape)
            for path, tensor, live in _pairs(saved, template, name):
                yield Leaf(path, keys[id(tensor)], live, isinstance(state[name], torch.optim.Optimizer))


def _pairs(saved: Any, template: Any, path: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    if isinstance(saved, Coded):
        yield from _pairs(saved.parts, None, path)
    elif isinstance(saved, torch.Tensor):
        yield path, saved, template if isinstance(template, torch.Tensor) else None
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            live = template.get(key) if isinstance(template, Mapping) else None
            yield from _pairs(value, live, f"{path}.{key}")
    elif isinstance(saved, (list, tuple)):
        for place, value in enumerate(saved):
            known = isinstance(template, (list, tuple)) and place < len(template)
            yield from _pairs(value, template[place] if known else None, f"{path}.{place}")


def wanted_of(leaf: Leaf) -> Piece | None:
    """Return which part of a tensor this rank has use for; None when the live object does not say.

    Raises:
        UsageError: the live tensor is distributed in a way that is not supported.
    """
    if leaf.live is None:
        return None
    if distributed(leaf.live):
        why = unsupported(leaf.live)
        if why:
            raise UsageError(f"{leaf.path} {why}; nothing was loaded or changed")
    return piece_of(leaf.live)


_PAIRS = ("map", "OrderedDict")
_SHOWN = 80  # characters of a value in a message
Said = list[tuple[int, Json]]  # what ranks say, each with the rank


class _Everything(Mapping[str, Any]):
    """A live object that has a use for whatever was saved."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> _Everything:
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


EVERYTHING = _Everything()


@dataclass
class Merger:
    """Puts trees together.

    Args:
        problems: what could not be; filled.
        left: keys of tensors that the live objects did not ask for; filled.
    """

    problems: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)

    def merge(self, said: Said, live: Callable[[], Any], path: str) -> Json:
        """Return one tree.

        Args:
            said: the trees of the ranks that have one.
            live: gives the live counterpart; called where ranks differ.
            path: of the tree, for messages.
        """
        rank, first = said[0]
        if all(tree == first for _, tree in said):
            return first
        form = _form(first)
        if form and all(_form(tree) == form for _, tree in said):
            if form in ("list", "tuple"):
                return self._sequence(form, said, live, path)
            return self._mapping(form, said, live, path)
        other, second = next(pair for pair in said if pair[1] != first)
        self.problems.append(
            f"{path} is of single ranks: {_shown(first)} on rank {rank}, {_shown(second)} on rank {other}"
        )
        return first

    def _choose(
        self, said: Sequence[tuple[int, Mapping[str, Json]]], wanted: Mapping[str, Any], path: str
    ) -> dict[str, Json]:
        """Put mappings together; of keys that not all ranks have, take those that are wanted.

        Args:
            said: mappings from texts that stand for keys.
            wanted: the live object's, from the same texts.
            path: of the mapping, for messages.
        """
        keys = list(dict.fromkeys(key for _, entries in said for key in entries))
        if any(len(entries) < len(keys) for _, entries in said):
            absent = [key for key in wanted if key not in keys]
            unwanted = {key for key in keys if key not in wanted}
            if absent or len(unwanted) == len(keys):
                where = f"{path} has other entries on other ranks ({some(keys)})"
                missing = f", and no rank has {some(absent)}" if absent else ", and none of them is live here"
                self.problems.append(where + missing)
            for _, entries in said:
                self.left.update(*(references(entries[key]) for key in unwanted & entries.keys()))
            keys = [key for key in keys if key not in unwanted]
        return {
            key: self.merge(
                [(rank, entries[key]) for rank, entries in said if key in entries],
                lambda key=key: wanted.get(key),  # type: ignore[misc]
                f"{path}.{_text(key)}",
            )
            for key in keys
        }

    def _mapping(self, form: str, said: Said, live: Callable[[], Any], path: str) -> Json:
        content = live()
        if form == "dict":
            wanted = content if isinstance(content, Mapping) else {}
            return {form: self._choose([(rank, tree[form]) for rank, tree in said], wanted, path)}
        known = [(rank, {json.dumps(key): each for key, each in tree[form]}) for rank, tree in said]
        wanted = EVERYTHING if content is EVERYTHING else {}
        if isinstance(content, Mapping) and content:
            wanted = {json.dumps(key): each for key, each in content.items() if type(key) in (str, int)}
        merged = self._choose(known, wanted, path)
        tree: dict[str, Json] = {form: [[json.loads(key), each] for key, each in merged.items()]}
        notes = [each["metadata"] for _, each in said if "metadata" in each]
        if notes:
            tree["metadata"] = _together(notes)
        return tree

    def _sequence(self, form: str, said: Said, live: Callable[[], Any], path: str) -> Json:
        lists = [(rank, tree if form == "list" else tree[form]) for rank, tree in said]
        content = live()
        inner = content if isinstance(content, (list, tuple)) else ()
        if all(_names(each) for _, each in lists):
            known = list(dict.fromkeys(name for _, each in lists for name in each))
            inner = known if content is EVERYTHING else inner
            if _names(inner) and set(known).issuperset(inner):
                return list(inner) if form == "list" else {form: list(inner)}
        if len({len(each) for _, each in lists}) > 1:
            sizes = ", ".join(f"{len(each)} on rank {rank}" for rank, each in lists[:3])
            self.problems.append(f"{path} has other lengths on other ranks: {sizes}")
            return said[0][1]
        merged = [
            self.merge(
                [(rank, each[place]) for rank, each in lists],
                lambda place=place: content if content is EVERYTHING else _at(inner, place),  # type: ignore[misc]
                f"{path}.{place}",
            )
            for place in range(len(lists[0][1]))
        ]
        return merged if form == "list" else {form: merged}


def prune(tree: Json, live: Any, left: set[str]) -> Json:
    """Return a tree without the entries with tensors that a live object does not have.

    Args:
        tree: typed JSON.
        live: the live content; what is no mapping there, or an empty one, says nothing of what is wanted.
        left: takes the keys of the tensors that were left out.
    """
    form = _form(tree)
    if form == "list":
        known = live if isinstance(live, (list, tuple)) and len(live) == len(tree) else [None] * len(tree)
        return [prune(each, one, left) for each, one in zip(tree, known, strict=True)]
    if form not in ("dict", *_PAIRS) or not isinstance(live, Mapping) or not live:
        return tree
    entries = tree[form].items() if form == "dict" else tree[form]
    kept = []
    for key, each in entries:
        wanted = type(key) not in (str, int) or key in live
        tensors = set() if wanted else references(each)
        left |= tensors
        if wanted or not tensors:
            kept.append([key, prune(each, live.get(key) if type(key) in (str, int) else None, left)])
    return {**tree, form: dict(kept) if form == "dict" else kept}


def absent(tree: Json, live: Any, path: str) -> list[str]:
    """Return the paths of the live tensors that a tree does not have."""
    form = _form(tree)
    if form not in ("dict", *_PAIRS) or not isinstance(live, Mapping):
        return []
    pairs = tree[form].items() if form == "dict" else tree[form]
    entries = {key: each for key, each in pairs if type(key) in (str, int)}
    found = [
        f"{path}.{key}" for key, one in live.items() if isinstance(one, torch.Tensor) and key not in entries
    ]
    for key, each in entries.items():
        found += absent(each, live.get(key), f"{path}.{key}")
    return found


def _form(tree: Json) -> str:
    """Return the tag of a tree that has parts; empty for any other."""
    if type(tree) is list:
        return "list"
    return next((tag for tag in ("dict", "tuple", *_PAIRS) if type(tree) is dict and tag in tree), "")


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _names(values: Sequence[Any]) -> bool:
    return bool(values) and all(type(each) is str for each in values)


def _together(notes: list[Json]) -> Json:
    """Return the notes on layers of all ranks; a layer that several ranks have is the same in each."""
    form = _form(notes[0])
    if form == "dict":
        return {form: {key: each for tree in reversed(notes) for key, each in tree.get(form, {}).items()}}
    pairs = {json.dumps(key): each for tree in reversed(notes) for key, each in tree.get(form, [])}
    return {form: [[json.loads(key), each] for key, each in pairs.items()]}


def _text(key: str) -> str:
    """Return how a key reads in a path; that of a mapping with other keys than texts is JSON."""
    return key.strip('"')


def _shown(tree: Json) -> str:
    text = json.dumps(tree)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
