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
from dataclasses import dataclass, replace
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from outlast.checkpoint.content.codecs import distributed
from outlast.checkpoint.content.digest import read_digests
from outlast.checkpoint.content.format import order_of
from outlast.checkpoint.content.memory import as_tensor
from outlast.checkpoint.content.random_states import require_random, states_of
from outlast.checkpoint.content.rank_file import RankFile
from outlast.checkpoint.content.state import LiveState
from outlast.checkpoint.content.typed_forms import Json, references
from outlast.checkpoint.content.typed_json import Decoder, element_type_of
from outlast.checkpoint.load.reading import (
    Lend,
    Move,
    Target,
    carry_out,
    memory_for,
    read_verified,
    reserve,
)
from outlast.checkpoint.load.world import Leaf, Merger, World, leaves_of
from outlast.checkpoint.policy.manifest import (
    MANIFEST,
    RANDOM,
    REST,
    STATE,
    Identity,
    Manifest,
    first_few,
    rank_files,
    some,
)
from outlast.checkpoint.policy.names import likely_cause, name_differences
from outlast.checkpoint.tiers.inventory import evidence, read_manifest, read_rank_file
from outlast.checkpoint.tiers.tier import CopyFolder
from outlast.errors import CheckpointMismatch
from outlast.fields import Damage, DamagedCopy
from outlast.parallelism.policy.checkpoints import FORMATS, loadable
from outlast.parallelism.policy.degrees import NAMES
from outlast.parallelism.policy.slices import Part

_Targets = dict[str, Target]  # memory of tensors, by key


@dataclass(frozen=True)
class Received:
    """What one rank gets of a copy; its tensors are empty memory until :meth:`fill` was called.

    Args:
        document: the rank's own, or those of all ranks as one; see :meth:`_Plan.merged`.
        saved: each state object's content, by name; of distributed tensors this rank's part, plain.
        random: the random states.
        cursor: the data cursor.
        note: what is not as it was saved; empty: nothing.
        left: keys of tensors that this rank has no use for though others may; see :func:`require_claimed`.
        views: the tensors are views of whole files; else they have memory of their own.
        targets: memory of the tensors, by key.
        read: reads the tensors from the copy, which is still open.
    """

    document: RankFile
    saved: dict[str, Any]
    random: dict[str, Any]
    cursor: Any
    note: str
    left: tuple[str, ...]
    views: bool
    targets: Mapping[str, Target]
    read: Callable[[], object]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(target.octets.numel() for target in self.targets.values())

    def fill(self) -> None:
        """Read the tensors; the live objects stay untouched.

        Raises:
            DamagedCopy: a byte is not as it was saved.
            CheckpointMismatch: ranks should have saved the same and have not.
            OSError: the file system refused.
        """
        self.read()
        for target in self.targets.values():
            target.put_in_order()


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
        lend: see :func:`outlast.checkpoint.load.reading.memory_for`.

    Raises:
        DamagedCopy: a byte is not as it was committed.
        CheckpointMismatch: another version wrote it, or it cannot be loaded into this world; names why.
        UsageError: a live tensor is distributed in a way that is not supported.
        OSError: the file system refused.
    """
    live = LiveState.of(state)
    manifest, digest = read_manifest(folder, name)
    found = evidence(manifest, digest)
    if found != commit:
        raise DamagedCopy(Damage(MANIFEST, f"{commit}, as all ranks saw it", found))
    own = read_rank_file(folder, manifest, identity.rank) if _same_world(manifest, identity) else None
    has_parts = own is not None and _has_parts(own, live)
    if own is not None and _lacks_entries(own, live):
        own = None
    left: Sequence[str] = ()
    if own is not None and has_parts:
        document = own
        targets, read = _own_files(folder, own, threads, lend)
    else:
        if manifest.part:
            raise OSError(
                f"{name} is here with the files of rank {some(manifest.part)} of {manifest.world_size} only,"
                f" and rank {identity.rank} of {identity.world_size} needs more of them"
            )
        plan = _Plan(World(folder, manifest), identity, live, own)
        document = own or plan.merged()
        targets, read = plan.parts(folder, document.values, threads)
        left = sorted(plan.left - targets.keys())
    source = rank_files(identity.rank if own else 0, manifest.world_size).document
    decoder = Decoder(source, {key: _tensor(target, source) for key, target in targets.items()})
    states = require_random(decoder.decode(document.random), source)
    states, note = (states, "") if own else _random(states, manifest, identity, commit)
    return Received(
        document=document,
        saved={key: decoder.decode(value) for key, value in document.values.items()},
        random=states,
        cursor=Decoder(MANIFEST, {}).decode(manifest.cursor),
        note=note,
        left=tuple(left),
        views=document is own and has_parts,
        targets=targets,
        read=read,
    )


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


def _own_files(
    folder: CopyFolder, own: RankFile, threads: int, lend: Lend
) -> tuple[_Targets, Callable[[], object]]:
    """Return memory for the tensors of a rank's own files, and what reads each of these as a whole."""
    loans = [(shard, memory_for(folder, shard.file, lend)) for shard in own.shards]
    targets = {
        key: Target(
            entry.part,
            as_tensor(loan.memory)[entry.begin : entry.end],
            element_type_of(entry.dtype, shard.file.name),
            entry.strides,
        )
        for shard, loan in loans
        for key, entry in shard.tensors.items()
    }

    def read() -> None:
        for shard, loan in loans:
            digests = read_digests(folder, shard.file)
            read_verified(folder, shard.file, digests, loan, threads)

    return targets, read


def _tensor(target: Target, source: str) -> torch.Tensor:
    try:
        return target.tensor
    except (RuntimeError, TypeError) as error:
        expected = f"a tensor of {target.octets.numel()} bytes"
        raise DamagedCopy(Damage(source, expected, str(error))) from error


def _has_parts(own: RankFile, state: LiveState) -> bool:
    """Return whether a rank's own files have the parts of tensors for which it has use."""
    entries = own.tensors
    for leaf in leaves_of(own.values, state, {key: entry.global_shape for key, entry in entries.items()}):
        entry = entries[leaf.key]
        in_parts = entry.part != Part.whole(entry.global_shape)
        if leaf.wanted(entry.dtype, entry.global_shape, in_parts) != (entry.part, ""):
            return False
    return True


def _names_all(holder: object) -> bool:
    """Return whether an object holds all entries that it can take; an optimizer before a step does not."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return not isinstance(holder, (*kinds, dict, list))


def _lacks_entries(own: RankFile, state: LiveState) -> bool:
    """Return whether modules have other tensors than a rank's own files."""
    for name, holder in state.items():
        value = own.values.get(name)
        if isinstance(holder, torch.nn.Module) and value is not None:
            merger = Merger(complete=True)
            merger.merge([(0, value)], state.content(name), name)
            if merger.left or merger.absent:
                return True
    return False


def derived_random(seed: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states that follow from a text, of the generators in ``saved`` that this process has."""
    number = xxh3_64_intdigest(seed.encode()) >> 1
    of_numpy = None
    if "numpy" in saved:
        import numpy.random

        of_numpy = numpy.random.RandomState(number % (1 << 32))
    states = states_of(random.Random(number), torch.Generator().manual_seed(number), of_numpy)
    if "cuda" in saved and torch.cuda.is_available():
        state = bytes(torch.Generator("cuda").manual_seed(number).get_state().tolist())
        states["cuda"] = [state] * torch.cuda.device_count()
    return states


def _same_world(manifest: Manifest, identity: Identity) -> bool:
    """Return whether the ranks are those that saved: as many, and in the same layout where both are known.

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


def _random(
    states: dict[str, Any], manifest: Manifest, identity: Identity, commit: str
) -> tuple[dict[str, Any], str]:
    """Return the random states of a rank of another world, given those of a saved one, and what to note."""
    alike = len(manifest.alike(RANDOM)) == 1
    if alike and _same_world(manifest, identity):
        return states, ""
    drawn = "" if alike else "random states follow from the checkpoint and the rank; "
    return states if alike else derived_random(f"{commit}:{identity.rank}", states), (
        f"saved by {_ranks(manifest)} and loaded by {_ranks(identity)}: {drawn}the run is"
        " repeatable, and no longer bit for bit the one that it would have been"
    )


class _Plan:
    """One rank's way from the files of all ranks to what it has use for.

    Args:
        world: what was saved.
        identity: this rank.
        state: the live objects.
        own: the rank's document if as many ranks saved and each has its entries, so that only the parts of
            distributed tensors differ; else None.

    Attributes:
        left: keys of tensors for which the live objects have no use.
    """

    def __init__(self, world: World, identity: Identity, state: LiveState, own: RankFile | None) -> None:
        self._world = world
        self._identity = identity
        self._state = state
        self._own = own
        self._problems: list[str] = []
        self._absent: list[str] = []  # what no rank has saved
        self.left: set[str] = set()

    def merged(self) -> RankFile:
        """Return the documents of all ranks as one, with what this rank has use for.

        It has the parameters of an optimizer if all ranks step the same ones, and no flags.

        Raises:
            CheckpointMismatch: they cannot be put together; names the first few reasons.
        """
        world, values = self._world, dict[str, Json]()
        for name in world.names:
            said = world.values(name)
            tensors = set().union(*(references(value) for _, value in said))
            if name not in self._state:
                self.left |= tensors
                if not tensors and all(run.digest for run in world.manifest.contents[STATE + name]):
                    values[name] = said[0][1]
                continue
            complete = bool(tensors) and _names_all(self._state[name])
            content = self._state.content(name) if complete or len(said) > 1 else None
            merger = Merger(complete, self._problems, self.left, self._absent)
            values[name] = merger.merge(said, content, name)
        self._refuse()
        rest = [file for _, file in world.differing(REST)]
        kinds = {name: kind for file in rest for name, kind in file.kinds.items() if name in values}
        first, *others = (file.parameters for file in rest)  # where ranks differ, pieces are compared
        common = {name: one for name, one in first.items() if all(each.get(name) == one for each in others)}
        return replace(world.document(0), values=values, kinds=kinds, parameters=common, flags={})

    def parts(
        self, folder: CopyFolder, values: Mapping[str, Json], threads: int
    ) -> tuple[_Targets, Callable[[], object]]:
        """Return memory for the tensors for which this rank has use, and what reads them.

        Raises:
            CheckpointMismatch: it cannot get them; names the first few reasons.
        """
        world, rank = self._world, self._identity.rank
        targets = self._targets(values)
        moves: list[Move] = []
        for key, target in targets.items():
            found, why = world.moves(key, target, rank, self._own is not None)
            moves += found
            self._problems += [why] if why else []
        self._refuse()

        def read() -> None:
            keys = [key for key in world.forms if self._own is None or world.in_parts(key)]
            self._problems += world.differences(keys, rank, self._identity.world_size)
            self._refuse()
            carry_out(folder, moves, threads)

        return targets, read

    def _refuse(self) -> None:
        """Raise what stands against loading, if anything does."""
        problems = [name_differences(self.left, self._absent)] if self._absent else []
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

    def _targets(self, values: Mapping[str, Json]) -> _Targets:
        """Return memory for each tensor that this rank has use for; of each object it is one block."""
        world = self._world
        wanted: dict[str, tuple[Part, torch.dtype, tuple[int, ...] | None]] = {}
        named = [references(value) for value in values.values()]
        shapes = {key: world.forms[key].shape for keys in named for key in keys}
        for leaf in leaves_of(values, self._state, shapes):
            form = world.forms[leaf.key]
            part, why = leaf.wanted(form.dtype, form.shape, world.in_parts(leaf.key))
            self._problems += [why] if why else []
            order = self._order(leaf, part)
            if wanted.setdefault(leaf.key, (part, world.dtype(leaf.key), order))[0] != part:
                self._problems.append(f"{leaf.path} is tied to {leaf.key}, but has another part of it here")
        self._problems += filter(None, map(world.disagreement, wanted))
        self._refuse()
        targets: _Targets = {}
        for each in named:
            keys = each - targets.keys()
            targets |= reserve({key: one for key, one in wanted.items() if key in keys})
        return targets

    def _order(self, leaf: Leaf, part: Part) -> tuple[int, ...] | None:
        """Return the strides of what this rank gets: as saved, or the live tensor's where that is a part.

        Of distributed tensors the live one's memory takes what is read, in its own order.
        """
        world, live = self._world, leaf.live
        source = world.source(leaf.key, None if self._own is None else self._identity.rank)
        entry = world.stored(leaf.key, source).entry
        if entry.shape == part.shape:
            return entry.strides
        if live is None or distributed(live) or tuple(live.shape) != part.shape:
            return None
        return order_of(live)
