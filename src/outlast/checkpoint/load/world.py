"""What a world of ranks saved in one copy, and its values put together for a rank of another world.

Where all ranks say the same there is nothing to decide. Where mappings have other keys on other ranks, as the
stages of a pipeline do, the live object says by its own keys which entries it wants. What differs otherwise
belongs to single ranks; it is not known which rank of another world would get it, so it is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outlast.checkpoint.content.codecs import Coded, distributed, piece_of, unsupported
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.content.restore import template_of
from outlast.checkpoint.content.state import LiveState
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Decoder, dtype_name, element_type_of
from outlast.checkpoint.load.reading import Move, Stored, Target, differing
from outlast.checkpoint.policy.manifest import (
    MANIFEST,
    STATE,
    TABLE,
    FileEntry,
    Manifest,
    Row,
    rank_files,
    some,
)
from outlast.checkpoint.policy.table import Cut, Form, Shard, Table
from outlast.checkpoint.tiers.inventory import read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.slices import Part, Split, cover, divided, overlapping


class _Group:
    """The files that have the same table: of some ranks, or one that all ranks share.

    Args:
        table: theirs.
        rows: their rows in the manifest, by number of the file, in order.

    Raises:
        DamagedCopy: a row does not fit the table.
    """

    def __init__(self, table: Table, rows: Mapping[int, Row]) -> None:
        for row in rows.values():
            table.require_place(MANIFEST, row.coordinates)
        self.table = table
        self.rows = rows
        self.sources = list(rows)
        self._at: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}

    def holding(self, form: Form, wanted: Part) -> Iterator[tuple[Part, list[int]]]:
        """Yield the stored parts of a tensor that overlap a part of it, and the files that have them."""
        if form.mesh is None:
            part = form.of((), ())
            if part.overlap(wanted) is not None:
                yield part, self.sources
            return
        at, mesh = self._index(form), self.table.meshes[form.mesh]
        for place, part in _within(Part.whole(form.shape), form.cuts, mesh, wanted):
            if place in at:
                yield part, at[place]

    def is_divided(self, form: Form) -> bool:
        """Return whether no two ranks have the same part of a tensor."""
        return len(self.sources) == (1 if form.mesh is None else len(self._index(form)))

    def _index(self, form: Form) -> dict[tuple[int, ...], list[int]]:
        """Return the files by their places along the dimensions of the mesh by which a tensor is divided."""
        mesh, dimensions = form.mesh or 0, tuple(along for _, along in form.cuts)
        known = (mesh, *dimensions)
        if known not in self._at:
            found = self._at[known] = {}
            for source, row in self.rows.items():
                place = tuple(row.coordinates[mesh][along] for along in dimensions)
                found.setdefault(place, []).append(source)
        return self._at[known]


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
    """What the ranks of the saved world have. Of equal documents one is read and verified; no tensor is read.

    Which rank has which part of a tensor follows from the manifest and the few tables that differ.

    Args:
        folder: the copy.
        manifest: its manifest.

    Attributes:
        names: of the state objects.
        forms: of the tensors, by key, each as the first rank that has it saved it.

    Raises:
        DamagedCopy: a byte is not as it was committed, or the folder lacks a document.
        CheckpointMismatch: another version wrote it.
        OSError: the file system refused.
    """

    def __init__(self, folder: CopyFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self.forms: dict[str, Form] = {}
        self._folder = folder
        self._documents: dict[int, RankFile] = {}
        self._shared: dict[int, Shard] = {}
        self._shards: dict[int, Shard] = {}
        self._group_of: dict[int, _Group] = {}
        self._having: dict[str, list[_Group]] = {}
        self.names = tuple(name.removeprefix(STATE) for name in manifest.contents if name.startswith(STATE))
        for name in self.names:
            for rank, value in self.values(name):
                file = self.document(rank)
                stands = dict.fromkeys(file.tensors, torch.empty(0))  # what is put together is typed JSON
                Decoder(rank_files(rank, manifest.world_size).document, stands).decode(value)
        self._borrowed: dict[int, Mapping[str, int]] = {}
        for ranks in manifest.alike(TABLE).values():
            file = self.document(ranks[0])
            self._borrowed |= dict.fromkeys(ranks, file.borrowed)
            self._add(file.shard.table, {rank: manifest.row(rank) for rank in ranks})
        for number in sorted({number for each in self._borrowed.values() for number in each.values()}):
            source = manifest.world_size + number
            self._add(self._shared[number].table, {source: manifest.shared[number]})

    def _add(self, table: Table, rows: Mapping[int, Row]) -> None:
        group = _Group(table, rows)
        self._group_of |= dict.fromkeys(rows, group)
        for key, form in table.forms.items():
            expected = element_type_of(form.dtype, MANIFEST).itemsize
            if expected != form.width:
                what = f"{key} of {expected} bytes an element"
                raise DamagedCopy(Damage(MANIFEST, what, str(form.width)))
            self.forms.setdefault(key, form)
            self._having.setdefault(key, []).append(group)

    def document(self, rank: int) -> RankFile:
        """Return the document of a rank."""
        if rank not in self._documents:
            self._documents[rank] = read_rank_file(self._folder, self.manifest, rank, self._shared)
        return self._documents[rank]

    def differing(self, content: str) -> list[tuple[int, RankFile]]:
        """Return a document for each digest that a content has, and its rank."""
        return [(ranks[0], self.document(ranks[0])) for ranks in self.manifest.alike(content).values()]

    def values(self, name: str) -> Said:
        """Return all contents of a state object, each with the first rank that has it."""
        return [(rank, file.values[name]) for rank, file in self.differing(STATE + name)]

    def _file(self, source: int) -> FileEntry:
        first = self.manifest.world_size
        of = self.manifest.of_rank(source) if source < first else self.manifest.of_shared(source - first)
        return of[0]

    def _named(self, source: int) -> str:
        """Return whose file it is, for messages."""
        own = source < self.manifest.world_size
        return f"rank {source}" if own else f"the ranks that share {self._file(source).name}"

    def source(self, key: str, rank: int | None = None) -> int:
        """Return the number of the file in which a rank has a tensor; None: the first rank that has it."""
        if rank is None:
            return self._having[key][0].sources[0]
        shared = self._borrowed[rank].get(key)
        return rank if shared is None else self.manifest.world_size + shared

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return element_type_of(self.forms[key].dtype, key)

    def in_parts(self, key: str) -> bool:
        """Return whether any rank has less than the whole of a tensor."""
        return any(group.table.forms[key].in_parts(group.table.meshes) for group in self._having[key])

    def disagreement(self, key: str) -> str:
        """Return how ranks disagree on the form of a tensor; empty when they do not."""
        first, *others = [(group.table.forms[key].text, group.sources[0]) for group in self._having[key]]
        other = next((each for each in others if each[0] != first[0]), None)
        if other is None:
            return ""
        return f"{key} is {first[0]} on {self._named(first[1])}, {other[0]} on {self._named(other[1])}"

    def held(self, key: str, wanted: Part) -> dict[Part, list[int]]:
        """Return the stored parts of a tensor that overlap a part of it, each with the files that have it.

        Args:
            key: of the tensor.
            wanted: the part.
        """
        found: dict[Part, list[int]] = {}
        for group in self._having[key]:
            for part, sources in group.holding(group.table.forms[key], wanted):
                found[part] = sorted((*found[part], *sources)) if part in found else sources
        return found

    def stored(self, key: str, source: int) -> Stored:
        """Return where a tensor is in the file of a number."""
        if source not in self._shards:
            group, file = self._group_of[source], self._file(source)
            row = group.rows[source]
            entries = group.table.entries(MANIFEST, file, row.begin, row.coordinates)
            self._shards[source] = Shard(file, group.table, entries)
        shard = self._shards[source]
        return Stored(source, shard.file, shard.tensors[key])

    def moves(self, key: str, target: Target, reader: int, own: bool = False) -> tuple[list[Move], str]:
        """Find what to read for a target.

        Args:
            key: of the tensor.
            target: what to fill.
            reader: the rank that reads; of equal parts each reader takes another one.
            own: the reader is the saved rank of that number, and takes its own where it has it.

        Returns:
            What to read, and why it is not all; empty when it is.
        """
        wanted, mine = target.part, self.source(key, reader) if own else -1
        held = self.held(key, wanted)
        parts = list(held)
        taken, missing = cover(wanted, parts)
        commons = (each.overlap(wanted) for each in parts)
        if sum(common.numel for common in commons if common) > sum(part.numel for _, part in taken):
            return [], f"{key} is stored in parts that overlap"
        if missing:
            shape, offsets = list(missing[0].shape), list(missing[0].offsets)
            return [], f"{key} is not complete: no rank stored {shape} at {offsets}"
        moves = []
        for place, part in taken:
            sources = held[parts[place]]
            source = mine if mine in sources else sources[reader % len(sources)]
            moves.append(Move(self.stored(key, source), part, target))
        return moves, ""

    def pairs(self, keys: Collection[str], reader: int, readers: int) -> list[tuple[str, Stored, Stored]]:
        """Return which stored parts one reader is to compare; together the readers compare all.

        Args:
            keys: of tensors of which all that is stored at one place must be the same.
            reader: which reader.
            readers: how many there are.
        """
        found = []
        mine = [(one, group) for one, group in self._group_of.items() if one % readers == reader]
        for key in keys:
            first, *others = self._having[key]
            if not others and first.is_divided(first.table.forms[key]):
                continue
            for source, group in mine:
                form = group.table.forms.get(key)
                if form is None:
                    continue
                part = form.of(group.table.meshes, group.rows[source].coordinates)
                one, *_ = self.held(key, part).get(part, [source])
                if one != source and self._group_of[one].table.forms[key].text == form.text:
                    found.append((key, self.stored(key, one), self.stored(key, source)))
        return found

    def differences(self, keys: Collection[str], reader: int, readers: int) -> list[str]:
        """Compare what :meth:`pairs` returns; return which ranks have other bytes at one place.

        Raises:
            DamagedCopy: a byte that had to be read is not as it was saved.
            OSError: the file system refused.
        """
        pairs = self.pairs(keys, reader, readers)
        return [
            f"{key} is not the same on {self._named(one.source)} and on {self._named(other.source)}, which"
            " saved it"
            for key, one, other in differing(self._folder, pairs)
        ]


@dataclass(frozen=True)
class Leaf:
    """A tensor in a saved state, and which part of it a rank has use for.

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

    def wanted(self, dtype: str, shape: tuple[int, ...], in_parts: bool) -> tuple[Part, str]:
        """Return the part that this rank uses; if it is not known, the whole and the reason.

        Args:
            dtype: as it was saved, torch's name.
            shape: of the whole, as it was saved.
            in_parts: whether ranks have saved less than the whole.
        """
        whole, live = Part.whole(shape), self.live
        if live is None:
            unknown = f"{self.path} was saved in parts, and what part is live here is not known"
            return whole, unknown if in_parts else ""
        if not distributed(live):
            return whole, ""
        piece, kind = piece_of(live), dtype_name(live.dtype)
        if piece.global_shape == shape and (self.of_optimizer or kind == dtype):
            return piece.part, ""
        here = f"{kind}{list(piece.global_shape)}"
        return whole, f"{self.path} is {dtype}{list(shape)} in the checkpoint, {here} here"


def leaves_of(
    values: Mapping[str, Json], state: LiveState, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Leaf]:
    """Yield the tensors of a state in typed JSON, each with its live counterpart.

    Args:
        values: by name.
        state: the live objects.
        shapes: of the whole tensors, by key.

    Raises:
        UsageError: a live tensor is distributed in a way that is not supported.
    """
    stands = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    keys = {id(tensor): key for key, tensor in stands.items()}
    decoder = Decoder("state", stands)
    for name, value in values.items():
        if name in state:
            saved = decoder.decode(value)
            template = template_of(state, name, saved, lambda one: one.shape)
            for path, tensor, live in _pairs(saved, template, name):
                why = unsupported(live) if distributed(live) else ""
                if why:
                    raise UsageError(f"{path} {why}; nothing was loaded or changed")
                yield Leaf(path, keys[id(tensor)], live, isinstance(state[name], torch.optim.Optimizer))


def _pairs(saved: Any, live: Any, path: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    if isinstance(saved, torch.Tensor):
        yield path, saved, live if isinstance(live, torch.Tensor) else None
        return
    if isinstance(saved, Coded):
        saved, live = saved.parts, None
    known = isinstance(saved, (list, tuple))
    for key, value in enumerate(saved) if known else saved.items() if isinstance(saved, Mapping) else ():
        yield from _pairs(value, _inner(live, key), f"{path}.{key}")


_PAIRS = ("map", "OrderedDict")
_SHOWN = 80  # characters of a value in a message
Said = list[tuple[int, Json]]  # what ranks say, each with the rank
EVERYTHING: Any = object()  # a live object that has a use for whatever was saved


def _inner(live: Any, key: Any) -> Any:
    """Return the live counterpart of an entry of a mapping, or of a value of a sequence; None: not known."""
    if live is EVERYTHING:
        return live
    if isinstance(live, Mapping):
        return live.get(key)
    known = isinstance(live, (list, tuple)) and type(key) is int and key < len(live)
    return live[key] if known else None


@dataclass
class Merger:
    """Puts trees of typed JSON together.

    Args:
        complete: live mappings that are not empty have all that they can take: entries with tensors that
            they lack are left out, and tensors that they alone have are noted. That holds neither for what is
            in tuples nor for what is in lists that have another length by now; and a tensor that a mapping
            in a list lacks is not noted.
        problems: what could not be put together; filled.
        left: keys of tensors that the live objects did not ask for; filled.
        absent: paths of live tensors that no rank has; filled.
    """

    complete: bool = False
    problems: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    absent: list[str] = field(default_factory=list)

    def merge(self, said: Said, live: Any, path: str) -> Json:
        """Return one tree.

        Args:
            said: the trees of the ranks that have one.
            live: the live counterpart; None: not known.
            path: of the tree, for messages.
        """
        rank, first = said[0]
        differing = [each for each in said if each[1] != first]
        if not differing:
            if not self.complete:
                return first
            said = said[:1]
        form = _form(first)
        if all(_form(tree) == form for _, tree in differing):
            if form in ("list", "tuple"):
                return self._sequence(form, said, live, path)
            if form:
                return self._mapping(form, said, live, path)
        if differing:
            other, second = differing[0]
            self.problems.append(
                f"{path} is of single ranks: {_shown(first)} on rank {rank}, {_shown(second)} on rank {other}"
            )
        return first

    def _mapping(self, form: str, said: Said, live: Any, path: str) -> Json:
        """Put mappings together; of keys that not all ranks have, take those that are wanted."""
        known = [(rank, _entries(form, tree)) for rank, tree in said]
        keys = dict.fromkeys(key for _, entries in known for key in entries)
        wanted: dict[str, Any] = keys if live is EVERYTHING else _live_entries(live)
        unwanted = keys.keys() - wanted.keys()

        def tensors(key: str) -> set[str]:
            return set().union(*(references(entries[key]) for _, entries in known if key in entries))

        dropped = set()
        if self.complete and wanted:
            dropped = {key for key in unwanted if type(json.loads(key)) in (str, int) and tensors(key)}
            unwanted -= dropped
        keys = {key: None for key in keys if key not in dropped}
        absent = [key for key in wanted if key not in keys]
        if any(len(entries.keys() - dropped) < len(keys) for _, entries in known):
            if absent or len(unwanted) == len(keys):
                where = f"{path} has other entries on other ranks ({some(map(_text, keys))})"
                lacking = f"no rank has {some(map(_text, absent))}" if absent else "none of them is live here"
                self.problems.append(f"{where}, and {lacking}")
            dropped |= unwanted
        if self.complete:
            missing = [key for key in absent if isinstance(wanted[key], torch.Tensor)]
            self.absent += [f"{path}.{_text(key)}" for key in missing]
        self.left.update(*map(tensors, dropped))
        merged = {
            key: self.merge(
                [(rank, entries[key]) for rank, entries in known if key in entries],
                live if live is EVERYTHING else wanted.get(key),
                f"{path}.{_text(key)}",
            )
            for key in keys
            if key not in dropped
        }
        tree = _tree(form, merged)
        notes = [each["metadata"] for _, each in said if "metadata" in each]
        if notes:  # on layers; one that several ranks have is the same in each
            kind = _form(notes[0])
            every = [_entries(kind, each) for each in reversed(notes) if kind in each]
            tree["metadata"] = _tree(kind, {key: one for each in every for key, one in each.items()})
        return tree

    def _sequence(self, form: str, said: Said, live: Any, path: str) -> Json:
        lists = [(rank, tree if form == "list" else tree[form]) for rank, tree in said]
        if len(lists) > 1 and all(_names(each) for _, each in lists):
            known = list(dict.fromkeys(name for _, each in lists for name in each))
            inner = known if live is EVERYTHING else live if isinstance(live, (list, tuple)) else ()
            if _names(inner) and set(known).issuperset(inner):
                return list(inner) if form == "list" else {form: list(inner)}
        if len({len(each) for _, each in lists}) > 1:
            sizes = ", ".join(f"{len(each)} on rank {rank}" for rank, each in lists[:3])
            self.problems.append(f"{path} has other lengths on other ranks: {sizes}")
            return said[0][1]
        alike = form == "list" and isinstance(live, list) and len(live) == len(lists[0][1])
        inside = replace(self, complete=self.complete and alike, absent=[])  # see the docstring
        merged = [
            inside.merge([(rank, each[at]) for rank, each in lists], _inner(live, at), f"{path}.{at}")
            for at in range(len(lists[0][1]))
        ]
        return merged if form == "list" else {form: merged}


def _form(tree: Json) -> str:
    """Return the tag of a tree that has parts; empty for any other."""
    if type(tree) is list:
        return "list"
    return next((tag for tag in ("dict", "tuple", *_PAIRS) if type(tree) is dict and tag in tree), "")


def _entries(form: str, tree: Json) -> dict[str, Json]:
    """Return the entries of a mapping in typed JSON, by their keys as JSON."""
    pairs = tree[form].items() if form == "dict" else tree[form]
    return {json.dumps(key): each for key, each in pairs}


def _tree(form: str, entries: Mapping[str, Json]) -> dict[str, Json]:
    """Return a mapping of a form; see :func:`_entries`."""
    pairs = [[json.loads(key), each] for key, each in entries.items()]
    return {form: dict(pairs) if form == "dict" else pairs}


def _live_entries(live: Any) -> dict[str, Any]:
    """Return the entries of a live mapping whose keys are texts or numbers, by their keys as JSON."""
    pairs = live.items() if isinstance(live, Mapping) else ()
    return {json.dumps(key): each for key, each in pairs if type(key) in (str, int)}


def _names(values: Sequence[Any]) -> bool:
    return bool(values) and all(type(each) is str for each in values)


def _text(key: str) -> str:
    """Return how a key reads in a path."""
    found = json.loads(key)
    return found if type(found) is str else key


def _shown(tree: Json) -> str:
    text = json.dumps(tree)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
