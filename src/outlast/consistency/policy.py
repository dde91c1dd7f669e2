"""The comparison of replicas: the messages of the ranks and the verdict.

A rank's tensors are in bundles: all tensors of a bundle are held by the same peers. A comparison goes in
rounds. In the first each rank sends one digest a bundle; if all agree, it is over. Otherwise the bundle is
split into spans, and those that differ again, down to single tensors, so that messages are short for any
number of tensors.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

SPANS = 64  # digests that a rank hands in a round at most, for each bundle
MOST_ROLLBACKS = 3  # without an agreement after the last difference: as max_restarts
_SHOWN = 8  # tensors that are named
_NEVER = "they never agreed; if they need not be equal, set tripwire_replicas"

Span = tuple[int, int]
Digests = Callable[[str, Span], str]


class Act(str, Enum):
    """The actions on a difference."""

    WARN = "warn"  # it is told and written down
    RAISE = "raise"  # the rank raises ReplicasDiffer, as all of them do
    ROLLBACK = "rollback"  # a session loads what was saved when the ranks last agreed, or before


@dataclass(frozen=True)
class TripwireOptions:
    """Whether and how replicas are compared.

    Args:
        tripwire_interval: steps between two comparisons; None: none are made.
        tripwire_action: "warn", "raise" or "rollback".
        tripwire_optimizer: also the optimizers' states.
        tripwire_replicas: groups of ranks that hold the same bytes, ``[[0, 1], [2, 3]]``; empty: as the
            placements of distributed tensors say, and every rank for a tensor that is not distributed.
    """

    tripwire_interval: int | None = None
    tripwire_action: str = Act.WARN.value
    tripwire_optimizer: bool = False
    tripwire_replicas: list[list[int]] = field(default_factory=list)

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        if self.tripwire_interval is not None and self.tripwire_interval < 1:
            found.append(f"tripwire_interval: {self.tripwire_interval} is not a positive number of steps")
        actions = [one.value for one in Act]
        if self.tripwire_action not in actions:
            found.append(f"tripwire_action: found {self.tripwire_action!r}, expected {', '.join(actions)}")
        named = Counter(rank for group in self.tripwire_replicas for rank in group)
        twice = [rank for rank, times in named.items() if times > 1]
        if twice:
            found.append(f"tripwire_replicas: rank {twice[0]} is named twice; a rank is in one group at most")
        found += [
            f"tripwire_replicas: the group {list(group)} has one rank; nothing could be compared"
            for group in self.tripwire_replicas
            if len(group) < 2
        ]
        if self.tripwire_interval is None:
            found += [
                f"{spec.name}: has no effect without tripwire_interval"
                for spec in fields(self)
                if spec.name != "tripwire_interval" and getattr(self, spec.name) != getattr(_OFF, spec.name)
            ]
        return tuple(found)


_OFF = TripwireOptions()


@dataclass(frozen=True)
class Bundle:
    """Tensors of one rank which the same peers hold.

    Args:
        key: equal on peers and on no other rank.
        names: of the tensors, in an order that is equal on peers.
    """

    key: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """A difference between replicas.

    Args:
        step: completed steps at the comparison.
        agreed: completed steps at the last one in which these ranks agreed; -1: there was none.
        tensors: names of those that differ; the first ones where they are many.
        more: whether others differ besides.
        holders: ranks that should hold the same.
        ranks: those that differ from the majority; empty: not known.
        undecided: whether a tensor differs of which no majority holds the same.
        digests: of the first of the tensors, by rank.
    """

    step: int
    agreed: int
    tensors: tuple[str, ...]
    more: bool
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    undecided: bool
    digests: Mapping[int, str]

    @property
    def reason(self) -> str:
        """One sentence, or two."""
        more = " and more" if self.more else ""
        since = f"they agreed after step {self.agreed}" if self.agreed >= 0 else _NEVER
        said = ", ".join(f"rank {rank}: {digest}" for rank, digest in sorted(self.digests.items())[:_SHOWN])
        who = f"rank {_list(self.ranks)} differs from the majority" if self.ranks else ""
        if self.undecided:
            nobody = "there is no majority, so the wrong rank is not known"
            who = f"{who}; for the rest {nobody}" if who else nobody
        return (
            f"ranks {_list(self.holders)} should hold the same and do not after step {self.step} ({since}):"
            f" {', '.join(self.tensors)}{more}; {who}; {self.tensors[0]}: {said}"
        )


@dataclass(frozen=True)
class Agreement:
    """All peers are equal.

    Args:
        step: completed steps at the comparison.
        digests: of each bundle, by key.
        peers: how many ranks hold it, by key.
    """

    step: int
    digests: Mapping[str, str]
    peers: Mapping[str, int]


class Comparison:
    """One comparison on a rank: ``text`` goes to all ranks, all texts into ``hear``.

    Args:
        step: completed steps.
        agreed: completed steps at the last comparison in which all agreed; -1: none.
        bundles: of this rank.
        digests: gives the digest of a span of a bundle's tensors.
    """

    def __init__(self, step: int, agreed: int, bundles: Iterable[Bundle], digests: Digests) -> None:
        self._step, self._agreed = step, agreed
        self._bundles = {bundle.key: bundle for bundle in bundles}
        self._digests = digests
        self._spans: dict[str, list[Span]] = {
            key: [(0, len(one.names))] for key, one in self._bundles.items()
        }
        self._more = False
        self._first = True

    def text(self) -> str:
        """Return the message of this rank."""
        said = {}
        for key, spans in self._spans.items():
            if key not in self._bundles:
                continue
            names = self._bundles[key].names
            single = all(end - begin == 1 for begin, end in spans)
            said[key] = {
                "step": self._step,
                "tensors": len(names),
                "digests": [self._digests(key, span) for span in spans],
                "names": [names[begin] for begin, _ in spans] if single else [],
            }
        return json.dumps(said)

    def hear(self, answers: Sequence[str]) -> Agreement | Difference | None:
        """Take every rank's text, by rank; return the outcome, None where another round is needed.

        Raises:
            ValueError: ranks compare the states after different steps.
        """
        held: dict[str, dict[int, Any]] = {}
        for rank, answer in enumerate(answers):
            for key, told in json.loads(answer).items():
                held.setdefault(key, {})[rank] = told
        steps = sorted({told["step"] for by_rank in held.values() for told in by_rank.values()})
        if steps != [self._step]:
            raise ValueError(f"ranks compare the states after steps {', '.join(map(str, steps))}")
        one_of = {key: next(iter(by_rank.values())) for key, by_rank in held.items()}
        if self._first:
            self._first = False
            self._spans = {key: [(0, told["tensors"])] for key, told in one_of.items()}
        wrong = {key: spans for key in held if (spans := _unequal(self._spans[key], held[key]))}
        if not wrong:
            digests = {key: told["digests"][0] for key, told in one_of.items()}
            return Agreement(self._step, digests, {key: len(by_rank) for key, by_rank in held.items()})
        if all(one_of[key]["names"] for key in wrong):
            return self._verdict(wrong, held)
        self._spans = {key: self._cut(spans) for key, spans in wrong.items()}
        return None

    def _cut(self, spans: list[Span]) -> list[Span]:
        """Split spans into smaller ones; of too many only the first are kept."""
        self._more = self._more or len(spans) > _SHOWN
        followed = spans[:_SHOWN]
        each = SPANS // len(followed)
        found = []
        for begin, end in followed:
            parts = min(each, end - begin)
            marks = [begin + (end - begin) * place // parts for place in range(parts + 1)]
            found += list(itertools.pairwise(marks))
        return found

    def _verdict(self, wrong: Mapping[str, list[Span]], held: Mapping[str, Mapping[int, Any]]) -> Difference:
        tensors: list[str] = []
        blamed: set[int] = set()
        holders: set[int] = set()
        undecided = False
        first: dict[int, str] = {}
        for key, spans in sorted(wrong.items()):
            by_rank = held[key]
            holders |= by_rank.keys()
            for span in spans:
                at = self._spans[key].index(span)
                said = {rank: told["digests"][at] for rank, told in by_rank.items()}
                tensors.append(next(iter(by_rank.values()))["names"][at])
                first = first or said
                digest, times = Counter(said.values()).most_common(1)[0]
                if 2 * times > len(said):
                    blamed |= {rank for rank, one in said.items() if one != digest}
                else:
                    undecided = True
        named = tuple(dict.fromkeys(tensors))
        more = self._more or len(named) > _SHOWN
        ranks = tuple(sorted(blamed))
        return Difference(
            self._step, self._agreed, named[:_SHOWN], more, tuple(sorted(holders)), ranks, undecided, first
        )


def _unequal(spans: Sequence[Span], by_rank: Mapping[int, Any]) -> list[Span]:
    """Return the spans with different digests."""
    columns = zip(*(told["digests"] for told in by_rank.values()), strict=True)
    return [span for span, said in zip(spans, columns, strict=True) if len(set(said)) > 1]


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
