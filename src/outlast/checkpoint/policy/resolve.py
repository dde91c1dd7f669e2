"""Which copy is loaded, and which ones are kept: the inventories of all ranks in, ordered load plans out.

The newest step comes first, of equal steps the highest generation; what is not on the path that the run has
taken (:func:`left_behind`) comes after all that is. A copy that is damaged, or that not
every rank sees alike, is skipped with a reason. A suspect is tried when nothing else is left. A sound copy
that cannot serve this job (of another run or format) is never skipped: behind it there is only a refusal,
because resuming from an older step would silently undo what it holds.

The trust that the job's decider has in single copies (:mod:`outlast.checkpoint.policy.copies`) reaches the
ranks as marks: texts that fit into an environment variable. A bare name marks that copy as a suspect in
every tier.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from outlast.checkpoint.policy.manifest import parse_copy_name, place_of, some, training_of
from outlast.fields import Damage

ANYWHERE = "*"
_LATER = ">"
_REASON_LENGTH = 160


class CopyStatus(str, Enum):
    """What a mark says; of two that cover a copy the one further down counts."""

    RELEASED = "released"  # what is said of all that its generation saved does not hold for it
    PROVEN = "proven"  # retention keeps it
    DURABLE = "durable"  # the run has it on disk, unless somebody took it away
    SUSPECT = "suspect"  # loaded when nothing else is left
    QUARANTINED = "quarantined"  # never loaded; the ranks set it aside


_STRICTNESS = tuple(CopyStatus)
_AGAINST = (CopyStatus.SUSPECT, CopyStatus.QUARANTINED)


@dataclass(frozen=True)
class Mark:
    """What is said of one copy, or of all that a generation saved.

    Args:
        place: ``tier/name``; with ``*`` for the tier, in every one; ``*/>120.g7``: whatever generation 7
            saved after more than 120 steps.
        bearing: what is said.
        digest: of the manifest of what was loaded from there; a copy of that name with that digest in another
            tier holds the same bytes, so the mark covers it too. Empty: not known.
        reason: why, for people.
    """

    place: str
    bearing: CopyStatus = CopyStatus.SUSPECT
    digest: str = ""
    reason: str = ""

    @property
    def is_general(self) -> bool:
        """Whether it is about all that a generation saved after a step."""
        return self.name.startswith(_LATER)

    @property
    def name(self) -> str:
        """The copy's folder."""
        return self.place.rpartition("/")[2]

    def to_text(self) -> str:
        """Return it in ASCII and without commas."""
        reason = json.dumps(self.reason[:_REASON_LENGTH]).replace(",", "\\u002c").replace("|", "\\u007c")
        return f"{self.place}|{self.bearing.value}|{self.digest}|{reason}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Read what :meth:`to_text` wrote, or the bare name of a copy.

        Raises:
            ValueError: it is neither.
        """
        place, *rest = text.split("|")
        place = place if "/" in place else f"{ANYWHERE}/{place}"
        if not rest:
            return cls(place)
        if len(rest) != 3:
            raise ValueError(f"{text!r} is no mark; expected place|bearing|digest|reason")
        try:
            return cls(place, CopyStatus(rest[0]), rest[1], str(json.loads(rest[2])))
        except RecursionError:
            raise ValueError(f"{text[:80]!r} is no mark; its reason is nested too deeply") from None

    def covers(self, tier: str, name: str, digest: str) -> bool:
        """Return whether it is about a copy; ``digest`` of its manifest, empty when that is not known."""
        if self.is_general:
            after, _, generation = self.name.removeprefix(_LATER).partition(".g")
            found = parse_copy_name(name)
            return found is not None and found[0] > int(after) and found[1] == int(generation)
        if self.name != name:
            return False
        return self.place.rpartition("/")[0] in (ANYWHERE, tier) or (bool(digest) and digest == self.digest)


def of_later(generation: int, after: int, bearing: CopyStatus, reason: str) -> Mark:
    """Return the mark of whatever a generation saved after a step, known or not."""
    return Mark(f"{ANYWHERE}/{_LATER}{after}.g{generation}", bearing, reason=reason)


def marks_for(texts: Iterable[str], training: str) -> tuple[str, ...]:
    """Return the marks of one training, as if it were the only one; those of generations are for all.

    Args:
        texts: the marks of a job.
        training: its name; empty: it has none.
    """
    found = []
    for text in texts:
        place, bar, rest = text.partition("|")
        if training_of(place) == training or place.startswith(f"{ANYWHERE}/"):
            found.append(f"{place.removeprefix(f'{training}:')}{bar}{rest}")
    return tuple(found)


class Marks:
    """All marks that a generation was given.

    Args:
        texts: see :meth:`Mark.parse`.

    Attributes:
        proven: names of proven copies that are not to be lost.
        durable: names of the newest copies that the run has on disk, so that it does not start anew without
            one.
        released: names of copies that were released: they may be loaded whatever the run has saved since.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._marks = tuple(map(Mark.parse, texts))
        self.proven, self.durable, self.released = (
            frozenset(mark.name for mark in self._marks if mark.bearing is bearing)
            for bearing in (CopyStatus.PROVEN, CopyStatus.DURABLE, CopyStatus.RELEASED)
        )

    def of(self, tier: str, name: str, digest: str = "") -> Mark | None:
        """Return what speaks against a copy, the strictest of it; None when nothing does."""
        found = [mark for mark in self._marks if mark.covers(tier, name, digest)]
        if any(mark.bearing is CopyStatus.RELEASED for mark in found):
            found = [mark for mark in found if not mark.is_general]
        against = [mark for mark in found if mark.bearing in _AGAINST]
        return max(against, key=strictness, default=None)

    def against(self, name: str) -> Mark | None:
        """Return what speaks against a copy of this name in some tier, the strictest of it."""
        tiers = {mark.place.rpartition("/")[0] for mark in self._marks}
        found = (self.of(tier, name) for tier in sorted(tiers))
        return max(found, key=strictness, default=None)

    def doubted(self, name: str) -> bool:
        """Return whether something speaks against a copy of this name in some tier."""
        return self.against(name) is not None


def strictness(mark: Mark | None) -> int:
    """Return how much a mark takes away, -1 for none."""
    return -1 if mark is None else _STRICTNESS.index(mark.bearing)


class CopyState(str, Enum):
    """What one rank finds when it looks at a copy without reading its tensors."""

    WHOLE = "whole"  # commit and manifest are sound, this rank's files are there with the right size
    DAMAGED = "damaged"  # something differs from what was committed
    UNREADABLE = "unreadable"  # the file system refused; the copy itself may be sound
    INCOMPATIBLE = "incompatible"  # written in another format than this version reads


@dataclass(frozen=True)
class _Named:
    """Something about a copy.

    Args:
        name: the folder.
    """

    name: str

    @property
    def step(self) -> int:
        """Completed steps, from the name."""
        return place_of(self.name)[0]

    @property
    def generation(self) -> int:
        """The generation that wrote it, from the name."""
        return place_of(self.name)[1]


@dataclass(frozen=True)
class Copy(_Named):
    """One line of a rank's inventory.

    Args:
        name: the folder.
        state: what this rank found.
        reason: why it is not whole.
        damage: where it is damaged.
        run_id: the run that wrote it; like the rest known of a whole copy only.
        world_size: ranks that wrote it.
        commit: digest of its manifest, or the session in which nodes staged their parts of it.
        part: the ranks whose files are there, where that is not all of them.
        tier: where.
        began: the copy from which its generation began; empty: from nothing; None: not known.
    """

    state: CopyState
    reason: str = ""
    damage: Damage | None = None
    run_id: str = ""
    world_size: int = 0
    commit: str = ""
    part: tuple[int, ...] = ()
    tier: str = "local"
    began: str | None = None


def preferred(copies: Iterable[Copy], marks: Marks) -> Copy:
    """Return which of the copies of one name a rank would load; of equal ones the first."""
    return min(
        copies,
        key=lambda one: (
            one.state is not CopyState.WHOLE,
            strictness(marks.of(one.tier, one.name, one.commit)),
        ),
    )


@dataclass(frozen=True)
class Excluded(_Named):
    """A copy that no plan uses.

    Args:
        name: the folder.
        reason: why.
        aside: it goes into quarantine; else it stays where it is.
        rank: the first rank that found the damage; -1 when nothing is damaged.
        damage: where.
        incomplete: parts of it are in memory of some nodes only.
    """

    reason: str
    aside: bool = False
    rank: int = -1
    damage: Damage | None = None
    incomplete: bool = False


@dataclass(frozen=True)
class LoadPlan(_Named):
    """A copy that every rank sees alike and may load.

    Args:
        name: the folder.
        commit: digest of the manifest that the ranks agreed on.
        reason: why it is at this place in the order.
        suspect: it comes after all that nothing speaks against.
    """

    commit: str
    reason: str
    suspect: bool = False

    @property
    def digest(self) -> str:
        """That of the manifest; empty where ranks agreed on a session of which nodes hold each a part."""
        return self.commit if self.commit.isalnum() else ""


@dataclass(frozen=True)
class Resolution:
    """What to try, in order, and what is to be said when nothing works.

    Args:
        plans: to be tried from the first to the last.
        excluded: copies that no plan uses, newest first.
        refusal: a sound copy that cannot serve this job comes after the last plan; empty: none does.
    """

    plans: tuple[LoadPlan, ...]
    excluded: tuple[Excluded, ...]
    refusal: str = ""


def resolve(inventories: Sequence[Sequence[Copy]], avoid: Collection[str], run_id: str) -> Resolution:
    """Order the copies of all ranks.

    Args:
        inventories: one a rank, in the order of ranks.
        avoid: marks, see :mod:`outlast.checkpoint.policy.resolve`.
        run_id: this run.
    """
    marks, ranks = Marks(avoid), len(inventories)
    seen: dict[str, dict[int, Copy]] = {}
    for rank, inventory in enumerate(inventories):
        for copy in inventory:
            seen.setdefault(copy.name, {})[rank] = copy
    ordered = sorted(seen, key=place_of, reverse=True)
    for foreign in (copy for name in ordered for copy in seen[name].values()):
        if foreign.state is CopyState.WHOLE and foreign.run_id != run_id:
            refusal = (
                f"{foreign.name}: written by run {foreign.run_id!r}, this is run {run_id!r};"
                " nothing was loaded or changed; give each run a folder of its own"
            )
            return Resolution((), (), refusal)
    usable: dict[str, str | None] = {}
    suspects: list[LoadPlan] = []
    excluded: list[Excluded] = []
    refusal = ""
    for name in ordered:
        found = seen[name]
        against = (marks.of(copy.tier, name, copy.commit) for copy in found.values())
        mark = max(against, key=strictness, default=None)
        out = _exclusion(name, found, ranks, mark)
        if out is not None:
            if not (usable and _is_left_over(found, ranks)):
                excluded.append(out)
        elif found[0].state is CopyState.INCOMPATIBLE:
            refusal = f"{name}: {found[0].reason}"
            break
        elif mark is not None:
            why = f"nothing that is no suspect is left to load, and it is one: {mark.reason}"
            suspects.append(LoadPlan(name, found[0].commit, why, suspect=True))
        else:
            usable[name] = found[0].began
    left = left_behind(usable) - marks.released
    plans: list[LoadPlan] = []
    for name in sorted(usable, key=lambda one: one in left):
        why = "the newest" if not plans else f"the newest before {plans[-1].name}"
        if name in left:
            why = "nothing of the path that the run has taken is left, and it is the newest beside that"
        reason = f"{why} of {len(ordered)} copies"
        beside = [] if name in left else sorted(left)
        for names, which in (
            ([one.name for one in suspects], "suspects"),
            (beside, "copies that are not on the path of the run"),
        ):
            newer = [one for one in names if place_of(one) > place_of(name)]
            reason += f", {which} aside ({some(newer)})" if newer else ""
        plans.append(LoadPlan(name, seen[name][0].commit, reason))
    return Resolution((*plans, *suspects), tuple(excluded), refusal)


def _is_left_over(found: dict[int, Copy], ranks: int) -> bool:
    """Return whether a copy is in the memory of some nodes only: others have dropped it for a newer one."""
    return len(found) < ranks and all(copy.state is CopyState.WHOLE and copy.part for copy in found.values())


def _exclusion(name: str, found: dict[int, Copy], ranks: int, mark: Mark | None) -> Excluded | None:
    """Return why a copy cannot be loaded though its format may be known."""
    if mark is not None and mark.bearing is CopyStatus.QUARANTINED:
        reason = f"{mark.reason}; `outlast ckpt release` lets it be loaded again"
        return Excluded(name, reason, aside=True)
    first = {copy.state: rank for rank, copy in reversed(found.items())}
    if (rank := first.get(CopyState.DAMAGED)) is not None:
        return Excluded(name, f"rank {rank}: {found[rank].reason}", True, rank, found[rank].damage)
    blind = [rank for rank in range(ranks) if rank not in found]
    if blind:
        incomplete = all(copy.part for copy in found.values())
        return Excluded(name, f"not seen by rank {some(blind)}", incomplete=incomplete)
    if (rank := first.get(CopyState.UNREADABLE)) is not None:
        return Excluded(name, f"rank {rank}: {found[rank].reason}")
    ours = found[0]
    for rank, copy in found.items():
        if (copy.state, copy.commit) != (ours.state, ours.commit):
            reason = f"ranks see different copies: rank 0 manifest {ours.commit}, rank {rank} {copy.commit}"
            return Excluded(name, reason)
    return None


def left_behind(began: Mapping[str, str | None]) -> frozenset[str]:
    """Return the copies that are not on the path of the newest generation that nothing else began from.

    A generation begins from a copy, or from nothing. What was saved after that copy by the generation that
    wrote it was not used, and what the new generation saves takes its place: from its first copy on, the path
    of the run leads through the new generation. A copy that an earlier one left somewhere, as in the memory
    of a node that was away, does not come back before those of the path, whatever its step is.

    Args:
        began: by the name of each copy that can be loaded, the copy that the generation which wrote it began
            from; "": it began from nothing; None: not known, then what older generations saved is taken to be
            on its path.
    """
    places = {name: place for name in began if (place := parse_copy_name(name)) is not None}
    origins: dict[int, str | None] = {}
    for name in sorted(places, key=places.__getitem__):
        origins[places[name][1]] = began[name]
    paths = {generation: _path(generation, origins) for generation in origins}
    older = {one for generation, path in paths.items() for one in path if one != generation}
    head = max(origins.keys() - older or origins.keys(), default=None)
    if head is None:
        return frozenset()
    path = paths[head]
    oldest = list(path)[-1]
    unknown = origins.get(oldest) is None  # also where none of its copies is there any more
    limit = path[oldest]
    return frozenset(
        name
        for name, (step, generation) in places.items()
        if step > path.get(generation, limit if unknown and generation < oldest else -1)
    )


def _path(generation: int, origins: Mapping[int, str | None]) -> dict[int, float]:
    """Return by generation, the newest first, the last step of it that a generation builds on."""
    path: dict[int, float] = {generation: math.inf}
    while (place := parse_copy_name(origins.get(generation) or "")) is not None and place[1] not in path:
        step, generation = place
        path[generation] = step
    return path


@dataclass(frozen=True)
class Removal:
    """A copy that retention removes."""

    name: str
    reason: str


def removals(
    began: Mapping[str, str | None],
    keep_last_n: int,
    protected: Collection[str],
    avoid: Collection[str] = (),
    keep_ancestors: int = 0,
) -> tuple[Removal, ...]:
    """Return the copies to remove of one tier, oldest first, each with a reason.

    The ``keep_last_n`` newest stay. Copies that must not be loaded, or that are on a path which the run has
    left, do not count among them as long as there are others: a few new checkpoints on the path that it took
    must not be crowded out by them.

    Beside the newest ones, older ancestors may be kept at distances that double. Corruption that is noticed
    late has its beginning behind every one of the newest copies, and how far behind nobody knows: with the
    distance doubling, a few copies reach far back, and what is lost by going to the next older one is in
    proportion to how late it was noticed.

    Args:
        began: by the folder of each committed copy of this run, the copy that its generation began from
            (:func:`left_behind`); other names are left alone.
        keep_last_n: how many stay; at least one.
        protected: copies that stay in any case: the one that this generation loaded, one that is being
            copied to another tier, the newest one that was verified or proven.
        avoid: marks: suspects do not count, proven copies stay.
        keep_ancestors: how many older ones stay at most, besides.
    """
    names = [name for name in began if parse_copy_name(name) is not None]
    marks = Marks(avoid)
    doubted = set(filter(marks.doubted, names))
    left = left_behind({name: began[name] for name in names if name not in doubted}) - marks.released
    good = sorted(set(names) - doubted - left, key=place_of, reverse=True)
    others = sorted(doubted | left, key=place_of, reverse=True)
    kept, rest = (good + others)[:keep_last_n], (good + others)[keep_last_n:]
    ancestors = _ancestors(good, keep_last_n, keep_ancestors)
    older = f", and {len(ancestors)} older ones" if ancestors else ""
    newer = f"{len(kept)} newer ones are kept, from {min(kept, key=place_of, default='')} on{older}"
    instead = f"and {len(kept) + len(ancestors)} others are kept"
    return tuple(
        Removal(name, newer)
        if name in good
        else Removal(
            name,
            f"{'is on a path that the run has left' if name in left else 'must not be loaded'}, {instead}",
        )
        for name in sorted(rest, key=place_of)
        if name not in {*protected, *marks.proven, *ancestors}
    )


def _ancestors(good: Sequence[str], keep_last_n: int, count: int) -> set[str]:
    """Return for each distance the oldest copy of the window of steps before the newest copy's own window.

    Windows are powers of two wide and lie at their multiples, so the first copy of a window is the first of a
    window half as wide, too: what a distance needs tomorrow is what a shorter one keeps today. The narrowest
    is no wider than the newest copies reach. A copy is thus one to two windows back (unless none was made
    in that time, then it is the next older one), and neighbours are at most about four times apart.

    Args:
        good: copies that may be loaded, the newest first.
        keep_last_n: how many of them stay without this.
        count: how many distances there are.
    """
    if not good:
        return set()
    steps = {name: place_of(name)[0] for name in good}
    newest = steps[good[0]]
    reach = newest - steps[good[:keep_last_n][-1]]
    width = 1 << max(0, reach.bit_length() - 1)
    found = set()
    for _ in range(count):
        window = max((step // width for step in steps.values() if step < newest // width * width), default=-1)
        if window < 0:
            break
        inside = [name for name in good if steps[name] // width == window]
        found.add(min(inside, key=lambda name: (steps[name], -place_of(name)[1])))
        width *= 2
    return found - set(good[:keep_last_n])
