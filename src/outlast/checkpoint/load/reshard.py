"""One rank's part of a copy: its own files as they are, or put together from those of another world's ranks.

Where as many ranks load as saved, in the same layout as far as that is known, each as a rule takes its own
files. In another world (other ranks, other layout, other parts, other stages)
tensors are found by key and by their place in the whole, whatever file they are in. What all ranks saved
alike (the model of DDP, an optimizer's step) any rank of another world gets. What was of a single rank cannot
be given to another one and is refused by name; but for random states, which are derived anew.

Of JSON files that are alike a rank reads one, of the safetensors files only what it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from outlast.checkpoint.content.codecs import Piece, distributed
from outlast.checkpoint.content.format import order_of
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.content.state import LiveState, packed, packed_numpy, require_random
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Decoder, dtype_name, element_type_of
from outlast.checkpoint.load.landing import Landing
from outlast.checkpoint.load.reading import (
    Held,
    Lend,
    Move,
    Source,
    Target,
    carry_out,
    differing,
    moves_to,
    put_in_order,
    reserve,
)
from outlast.checkpoint.load.world import Leaf, Merger, World, absent, leaves_of, prune, wanted_of
from outlast.checkpoint.policy.manifest import (
    MANIFEST,
    RANDOM,
    REST,
    Identity,
    Manifest,
    first_few,
    rank_files,
    some,
)
from outlast.checkpoint.policy.names import likely_cause, name_differences
from outlast.checkpoint.policy.table import TensorEntry
from outlast.checkpoint.tiers.inventory import evidence, read_manifest, read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.errors import CheckpointMismatch
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.checkpoints import FORMATS, loadable
from outlast.parallelism.policy.degrees import NAMES
from outlast.parallelism.policy.slices import Part


@dataclass(frozen=True)
class Received:
    """What one rank gets of a copy; its tensors are empty memory until :attr:`fill` was called.

    Args:
        saved: each state object's content, by name; of distributed tensors this rank's part, plain.
        kinds: type of each optimizer and scheduler, by name.
        parameters: what each optimizer steps, in its order, where all ranks saved the same.
        random: the random states.
        cursor: the data cursor.
        nbytes: what is read.
        note: what is not as it was saved; empty: nothing.
        flags: of this rank's modules when they were saved; none in another world.
        left: keys of tensors that this rank has no use for though others may; see :func:`require_claimed`.
        fill: reads the tensors from an open copy, given the live objects, which stay untouched; returns what
            brings them to the live objects once all ranks have agreed. Raises DamagedCopy, OSError, and
            CheckpointMismatch where ranks should have saved the same and have not.
    """

    saved: dict[str, Any]
    kinds: dict[str, str]
    parameters: dict[str, list[list[Any]]]
    random: dict[str, Any]
    cursor: Any
    nbytes: int
    note: str
    left: tuple[str, ...]
    flags: dict[str, list[str]]
    fill: Callable[[CopyFolder, Mapping[str, object]], Landing]


def open_part(
    folder: CopyFolder,
    name: str,
    commit: str,
    identity: Identity,
    state: Mapping[str, object],
    threads: int = 1,
    lend: Lend = lambda *_: None,
) -> Received:
    """Read and verify all of a rank's part but the tensors, from the files of whatever ranks have it.

    Args:
        folder: the copy.
        name: its name.
        commit: the manifest digest that the ranks agreed on.
        identity: this rank.
        state: the live objects; nothing in them is changed.
        threads: that this rank may use.
        lend: see :class:`Source`.

    Raises:
        DamagedCopy: a byte is not as it was committed.
        CheckpointMismatch: another version wrote it, or it cannot be loaded into this world; names why.
        UsageError: a live tensor is distributed in a way that is not supported.
        OSError: the file system refused.
    """
    live = LiveState.of(state)
    manifest, digest = read_manifest(folder, name)
    _require_same(manifest, digest, commit)
    if _same_world(manifest, identity):
        rank_file = read_rank_file(folder, manifest, identity.rank)
        own = _as_saved(folder, manifest, rank_file, identity.rank, threads, lend)
        if not _stands_otherwise(rank_file, live):
            return own
    if manifest.part:
        raise OSError(
            f"{name} is here with the files of rank {some(manifest.part)} of {manifest.world_size} only, and"
            f" rank {identity.rank} of {identity.world_size} needs more of them"
        )
    return _Plan(World(folder, manifest), commit, identity, live, threads).received()


def require_claimed(left: Sequence[Sequence[str]]) -> None:
    """Refuse to leave behind what no rank has a use for.

    Args:
        left: what each rank's :func:`open_part` said.

    Raises:
        CheckpointMismatch: names the first few tensors.
    """
    unclaimed = set(left[0]).intersection(*left[1:]) if left else set()
    if unclaimed:
        raise CheckpointMismatch(
            f"{len(unclaimed)} tensor(s) are in the checkpoint and in no rank's live state:"
            f" {some(unclaimed)}; {likely_cause(unclaimed, ())}; nothing was loaded or changed"
        )


def _common(parameters: Sequence[dict[str, list[list[Any]]]]) -> dict[str, list[list[Any]]]:
    """Return of which optimizers all ranks step the same; those of others are compared by their pieces."""
    first, *others = parameters
    return {name: known for name, known in first.items() if all(one.get(name) == known for one in others)}


def _as_saved(
    folder: CopyFolder,
    manifest: Manifest,
    rank_file: RankFile,
    rank: int,
    threads: int,
    lend: Lend,
) -> Received:
    """Return what a rank gets of its own files."""
    files = [(shard, Source(folder, shard.file, lend)) for shard in rank_file.shards]
    memory = {
        key: file.view(entry.begin, entry.end)
        for shard, file in files
        for key, entry in shard.tensors.items()
    }
    source = rank_files(rank, manifest.world_size).document
    live = {key: _typed(memory[key], each, source) for key, each in rank_file.tensors.items()}
    decoder = Decoder(source, live)
    saved = {key: decoder.decode(value) for key, value in rank_file.values.items()}

    def fill(folder: CopyFolder, state: Mapping[str, object]) -> Landing:
        for _, file in files:
            file.fill(folder, threads)
        for key, entry in rank_file.tensors.items():
            put_in_order(memory[key], entry.shape, entry.strides)
        return Landing(state, saved, threads, views=True)

    return Received(
        saved=saved,
        kinds=rank_file.kinds,
        parameters=rank_file.parameters,
        random=require_random(decoder.decode(rank_file.random), source),
        cursor=Decoder(MANIFEST, {}).decode(manifest.cursor),
        nbytes=sum(shard.file.nbytes for shard in rank_file.shards),
        note="",
        left=(),
        flags=rank_file.flags,
        fill=fill,
    )


def _typed(octets: torch.Tensor, entry: TensorEntry, source: str) -> torch.Tensor:
    try:
        plain = octets.view(element_type_of(entry.dtype, source)).view(entry.shape)
        return plain if entry.strides is None else plain.as_strided(entry.shape, entry.strides)
    except (RuntimeError, TypeError) as error:
        raise DamagedCopy(Damage(source, f"a tensor of {entry.nbytes} bytes", str(error))) from error


def _stands_otherwise(rank_file: RankFile, state: LiveState) -> bool:
    """Say whether a rank's own file is not what it has use for, though as many ranks saved as load."""
    entries = rank_file.tensors
    shapes = {key: entry.global_shape for key, entry in entries.items()}
    for leaf in leaves_of(rank_file.values, state, shapes):
        entry, piece = entries[leaf.key], wanted_of(leaf)
        saved = Piece(entry.global_shape, Part(entry.offsets, entry.shape))
        if distributed(leaf.live):
            if piece != saved or not (leaf.of_optimizer or dtype_name(leaf.live.dtype) == entry.dtype):
                return True
        elif piece != saved and saved.part != Part.whole(saved.global_shape):
            return True
    return _lacks_entries(rank_file, state)


def _says_all(holder: object) -> bool:
    """Say whether what an object holds now names all that it can take: not so an optimizer before a step."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return not isinstance(holder, (*kinds, dict, list))


def _lacks_entries(rank_file: RankFile, state: LiveState) -> bool:
    left: set[str] = set()
    for name, holder in state.items():
        value = rank_file.values.get(name)
        if isinstance(holder, torch.nn.Module) and value is not None:
            content = state.content(name)
            prune(value, content, left)
            if left or absent(value, content, name):
                return True
    return False


def _require_same(manifest: Manifest, digest: str, commit: str) -> None:
    """Check that a copy is the one that the ranks agreed on.

    Raises:
        DamagedCopy: it is another one.
    """
    found = evidence(manifest, digest)
    if found != commit:
        raise DamagedCopy(Damage(MANIFEST, f"{commit}, as all ranks saw it", found))


def derived_random(seed: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states that follow from a text, of the generators in ``saved`` that this process has."""
    number = xxh3_64_intdigest(seed.encode()) >> 1
    generator = torch.Generator().manual_seed(number)
    states: dict[str, Any] = {
        "python": packed(random.Random(number).getstate()),
        "torch": bytes(generator.get_state().tolist()),
    }
    if "numpy" in saved:
        import numpy.random

        states["numpy"] = packed_numpy(numpy.random.RandomState(number % (1 << 32)).get_state(legacy=False))
    if "cuda" in saved and torch.cuda.is_available():
        state = bytes(torch.Generator("cuda").manual_seed(number).get_state().tolist())
        states["cuda"] = [state] * torch.cuda.device_count()
    return states


def _same_world(manifest: Manifest, identity: Identity) -> bool:
    """Say whether the ranks are those that saved: as many, and in the same layout where both are known.

    In another layout the same rank may have another part of the model under the same names and shapes.
    """
    saved, here = manifest.layout, identity.layout
    return manifest.world_size == identity.world_size and (saved is None or here is None or saved == here)


def _ranks(world: Manifest | Identity) -> str:
    """Return the number of ranks, and their layout if it is known."""
    layout = "" if world.layout is None else f" ({world.layout})"
    return f"{world.world_size} rank{'s' if world.world_size > 1 else ''}{layout}"


def _condition(manifest: Manifest, identity: Identity) -> str:
    """Return what would have allowed the load."""
    saved, here = manifest.layout, identity.layout
    if saved is None or here is None or saved == here:
        return f"other ranks can load a checkpoint if {FORMATS['outlast'].condition}"
    names = ", ".join(one for one in NAMES if getattr(saved, one) != getattr(here, one))
    return f"{names} may change if {loadable('outlast', saved, here).why}"


class _Plan:
    """One rank's way from the files of all ranks to what it has use for.

    Args:
        world: what was saved.
        commit: digest of its manifest.
        identity: this rank.
        state: the live objects.
        threads: that it may use.
    """

    def __init__(self, world: World, commit: str, identity: Identity, state: LiveState, threads: int) -> None:
        self._world = world
        self._threads = threads
        self._commit = commit
        self._identity = identity
        self._state = state
        # As many ranks as saved, and each has its entries: only the parts of distributed tensors are others.
        self._same_ranks = _same_world(world.manifest, identity) and not _lacks_entries(
            world.document(identity.rank), state
        )
        self._problems: list[str] = []
        self._absent: list[str] = []  # what no rank has saved
        self._left: set[str] = set()
        self._orders: dict[str, tuple[int, ...] | None] = {}  # strides of what this rank gets, by key

    def received(self) -> Received:
        """Return what this rank gets.

        Raises:
            CheckpointMismatch: it cannot get it; names the first few reasons.
        """
        world, rank = self._world, self._identity.rank
        values = world.document(rank).values if self._same_ranks else self._merged()
        self._refuse()
        targets = self._targets(values)
        moves: list[Move] = []
        for key, target in targets.items():
            entry_in = partial(world.entry, key)
            found, why = moves_to(target, self._held(key, target.part), rank, entry_in)
            moves += found
            if why:
                self._problems.append(f"{key} {why}")
        self._refuse()
        live = {key: target.typed(world.dtype(key), self._orders[key]) for key, target in targets.items()}
        decoder = Decoder(MANIFEST, live)
        random_states, note = self._random()
        rest = [file for _, file in world.differing(REST)]
        kinds = {name: kind for file in rest for name, kind in file.kinds.items()}
        saved = {name: decoder.decode(value) for name, value in values.items()}

        def fill(folder: CopyFolder, state: Mapping[str, object]) -> Landing:
            self._fill(folder, moves, targets)
            return Landing(state, saved, self._threads, views=False)

        return Received(
            saved=saved,
            kinds={name: kind for name, kind in kinds.items() if name in values},
            parameters=_common([file.parameters for file in rest]),
            random=random_states,
            cursor=Decoder(MANIFEST, {}).decode(world.manifest.cursor),
            nbytes=sum(target.octets.numel() for target in targets.values()),
            note=note,
            left=tuple(sorted(self._left - targets.keys())),
            flags=world.document(rank).flags if self._same_ranks else {},
            fill=fill,
        )

    def _refuse(self) -> None:
        """Raise what stands against loading, if anything does."""
        problems = [name_differences(self._left, self._absent)] if self._absent else []
        problems += self._problems
        if not problems:
            return
        manifest, here = self._world.manifest, self._identity
        what = first_few(problems)
        if _same_world(manifest, here) and not self._problems:
            raise CheckpointMismatch(what)
        now = f"{'this' if here.world_size == 1 else 'these'} {_ranks(here)}"
        condition = f"; {_condition(manifest, here)}" if self._problems else ""
        raise CheckpointMismatch(
            f"saved by {_ranks(manifest)}, it cannot be loaded by {now}: {what}{condition}"
        )

    def _merged(self) -> dict[str, Json]:
        """Put the values of all ranks together as this rank has use for them."""
        merger = Merger(self._problems, self._left)
        world, values = self._world, dict[str, Json]()
        for name in world.names:
            said = world.values(name)
            tensors = set().union(*(references(value) for _, value in said))
            if name not in self._state:
                self._left |= tensors
                if world.is_everywhere(name) and not tensors:
                    values[name] = said[0][1]
                continue
            content = self._state.content(name) if tensors and _says_all(self._state[name]) else None
            said = [(rank, prune(value, content, self._left)) for rank, value in said]
            values[name] = merger.merge(said, lambda name=name: self._state.content(name), name)  # type: ignore[misc]
            self._absent += absent(values[name], content, name)
        return values

    def _held(self, key: str, part: Part) -> list[Held]:
        """Return what is stored of a part of a tensor and is this rank's to take."""
        if self._same_ranks and not self._world.in_parts(key):
            return [Held(part, (self._world.source(self._identity.rank, key),))]
        return self._world.held(key, part)

    def _targets(self, values: Mapping[str, Json]) -> dict[str, Target]:
        """Return memory for each tensor that this rank has use for, by key."""
        world = self._world
        wanted: dict[str, Part] = {}
        named = [references(value) for value in values.values()]
        shapes = {key: world.shape(key) for keys in named for key in keys}
        for leaf in leaves_of(values, self._state, shapes):
            part = self._part(leaf)
            self._orders.setdefault(leaf.key, self._order(leaf, part))
            if wanted.setdefault(leaf.key, part) != part:
                self._problems.append(f"{leaf.path} is tied to {leaf.key}, but has another part of it here")
        self._problems += filter(None, (world.disagreement(key) for key in wanted))
        self._refuse()
        targets: dict[str, Target] = {}
        for each in named:
            keys = [key for key in wanted if key in each and key not in targets]
            targets.update(reserve({key: (wanted[key], world.dtype(key).itemsize) for key in keys}))
        return targets

    def _part(self, leaf: Leaf) -> Part:
        """Return which part of a tensor this rank has use for; where that cannot be told, all of it."""
        form, piece = self._world.form(leaf.key), wanted_of(leaf)
        if piece is None and self._world.in_parts(leaf.key):
            self._problems.append(f"{leaf.path} was saved in parts, and what part is live here is not known")
        elif leaf.live is not None and piece is not None and distributed(leaf.live):
            here = f"{dtype_name(leaf.live.dtype)}{list(piece.global_shape)}"
            if here == form.text or (leaf.of_optimizer and piece.global_shape == form.shape):
                return piece.part
            self._problems.append(f"{leaf.path} is {form.text} in the checkpoint, {here} here")
        return Part.whole(form.shape)

    def _order(self, leaf: Leaf, part: Part) -> tuple[int, ...] | None:
        """Return the strides of what this rank gets: as saved, or the live tensor's where that is a part.

        Of distributed tensors the live one's memory takes what is read, in its own order.
        """
        world, live = self._world, leaf.live
        own = self._same_ranks and not world.in_parts(leaf.key)
        source = world.source(self._identity.rank, leaf.key) if own else world.first(leaf.key)
        entry = world.entry(leaf.key, source)
        if entry.shape == part.shape:
            return entry.strides
        if live is None or distributed(live) or tuple(live.shape) != part.shape:
            return None
        return order_of(live)

    def _random(self) -> tuple[dict[str, Any], str]:
        world, rank, manifest = self._world, self._identity.rank, self._world.manifest
        chosen = rank if self._same_ranks else 0
        source = rank_files(chosen, manifest.world_size).document
        found = require_random(Decoder(source, {}).decode(world.document(chosen).random), source)
        alike = len(manifest.alike(RANDOM)) == 1
        if self._same_ranks or (alike and _same_world(manifest, self._identity)):
            return found, ""
        states = found if alike else derived_random(f"{self._commit}:{rank}", found)
        drawn = "" if alike else "random states follow from the checkpoint and the rank; "
        return states, (
            f"saved by {_ranks(manifest)} and loaded by {_ranks(self._identity)}: {drawn}the run is"
            " repeatable, and no longer bit for bit the one that it would have been"
        )

    def _fill(self, folder: CopyFolder, moves: Sequence[Move], targets: Mapping[str, Target]) -> None:
        world, identity = self._world, self._identity
        keys = [key for key in world.keys if not self._same_ranks or world.in_parts(key)]
        pairs = world.pairs(keys, identity.rank, identity.world_size)
        for key, one, other in differing(folder, world.file, pairs):
            whose = f"{world.named(one)} and on {world.named(other)}"
            self._problems.append(f"{key} is not the same on {whose}, which saved it")
        self._refuse()
        carry_out(folder, world.file, moves, self._threads)
        for key, target in targets.items():
            put_in_order(target.octets, target.part.shape, self._orders[key])
