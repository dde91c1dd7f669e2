"""What a world of ranks saved in one copy, and its values put together for a rank of another world.

Where all ranks say the same there is nothing to decide. Where mappings have other keys on other ranks, as the
stages of a pipeline do, the live object says by its own keys which entries it wants. What differs otherwise
belongs to single ranks; it is not known which rank of another world would get it, so it is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outlast.checkpoint.content.codecs import Coded, Piece, distributed, piece_of, unsupported
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.content.state import LiveState, template_of
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Decoder, element_type_of
from outlast.checkpoint.load.reading import Stored, replicas
from outlast.checkpoint.policy.manifest import Manifest, Shard, TensorEntry, rank_files, some
from outlast.checkpoint.tiers.inventory import read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy


class World:
    """The saved world; its JSON files are read and verified, none of its tensors is.

    Args:
        folder: the copy.
        manifest: its manifest.

    Raises:
        DamagedCopy: a byte is not as it was committed, or the folder lacks a rank's file.
        CheckpointMismatch: another version wrote it.
        OSError: the file system refused.
    """

    def __init__(self, folder: CopyFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self.shared: dict[int, Shard] = {}
        ranks = range(manifest.world_size)
        self.files = {rank: read_rank_file(folder, manifest, rank, self.shared) for rank in ranks}
        for rank, file in self.files.items():
            _require_typed(file, rank_files(rank, manifest.world_size)[1])
        self.stored: dict[str, list[Stored]] = {}
        taken: set[tuple[str, int]] = set()
        for rank, file in self.files.items():
            for key, entry in file.tensors.items():
                _require_size(file.shard.file, key, entry)
                source = self.source(rank, key)
                if (key, source) not in taken:
                    taken.add((key, source))
                    self.stored.setdefault(key, []).append(Stored(source, entry))

    def source(self, rank: int, key: str) -> int:
        """Return the number, as in :attr:`shards`, of the file in which a rank has a tensor."""
        shared = self.files[rank].borrowed.get(key) if rank in self.files else None
        return rank if shared is None else self.manifest.world_size + shared

    @property
    def shards(self) -> dict[int, Shard]:
        """What each rank says of its safetensors file; behind them the files that all ranks share."""
        first = self.manifest.world_size
        shared = {first + number: shard for number, shard in self.shared.items()}
        return {rank: file.shard for rank, file in self.files.items()} | shared

    def named(self, source: int) -> str:
        """Return whose file of :attr:`shards` it is, for messages."""
        first = self.manifest.world_size
        return (
            f"rank {source}" if source < first else f"the ranks that share {self.shared[source - first].file}"
        )

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self.stored[key][0].entry.global_shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return element_type_of(self.stored[key][0].entry.dtype, key)

    def nbytes(self, key: str) -> int:
        """Return the bytes of a whole tensor."""
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def in_parts(self, key: str) -> bool:
        """Say whether any rank has less than the whole of a tensor."""
        return any(each.entry.shape != each.entry.global_shape for each in self.stored[key])

    def disagreement(self, key: str) -> str:
        """Return how ranks disagree on the form of a tensor; empty when they do not."""
        first, *others = self.stored[key]
        for other in others:
            if form_of(other.entry) != form_of(first.entry):
                return (
                    f"{key} is {form_of(first.entry)} on {self.named(first.source)},"
                    f" {form_of(other.entry)} on {self.named(other.source)}"
                )
        return ""

    def pairs(self, keys: Collection[str], reader: int, readers: int) -> list[tuple[str, Stored, Stored]]:
        """Return which stored parts one reader is to compare; together the readers compare all.

        Args:
            keys: of tensors of which all that is stored at one place must be the same.
            reader: which reader.
            readers: how many there are.
        """
        found = []
        for key in keys:
            for first, *others in replicas(self.stored[key]).values():
                alike = [one for one in others if form_of(one.entry) == form_of(first.entry)]
                found += [(key, first, other) for other in alike if other.source % readers == reader]
        return found


def _require_typed(file: RankFile, source: str) -> None:
    """Decode what a rank says and drop it: what is put together later, undecoded, is typed JSON.

    Raises:
        DamagedCopy: it is not.
    """
    decoder = Decoder(source, dict.fromkeys(file.tensors, torch.empty(0)))
    for value in file.values.values():
        decoder.decode(value)


def form_of(entry: TensorEntry) -> str:
    """Return type and shape of a whole tensor, for messages and for comparing."""
    return f"{entry.dtype}{list(entry.global_shape)}"


def _require_size(source: str, key: str, entry: TensorEntry) -> None:
    expected = math.prod(entry.shape) * element_type_of(entry.dtype, source).itemsize
    if expected != entry.nbytes:
        raise DamagedCopy(Damage(source, f"{key} of {expected} bytes", f"{entry.nbytes} bytes"))


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
