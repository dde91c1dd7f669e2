"""Calibration of the hazard from a site's own logs of faults, by Gamma-Poisson shrinkage.

The number of faults in a class is Poisson with mean ``factor * expected``, where ``expected`` is what the
model without this factor says for the hours in service of that class. With a Gamma prior of mean 1 and the
weight of ``PRIOR`` faults, the factor is ``(faults + PRIOR) / (expected + PRIOR)``: classes with few faults
stay close to 1. Factors are updated in turn until they settle, as in iterative proportional fitting.

A sign is fitted in the same way: failures within three half-lives of it, over what its present chance and the
history let expect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outlast.health.policy.hazard import (
    FACTORS,
    HOUR,
    MOST_FAULTS,
    NEVER,
    OTHER,
    RECENT,
    SIGNS,
    SINCE_REPAIR,
    HazardModel,
    NodeHistory,
    Sign,
)

PRIOR = 2.0  # faults
_SWEEPS = 50
_FOLLOWED = 3.0  # half-lives for which a failure may be laid to a sign
_MOST_CHANCE = 0.99


@dataclass(frozen=True)
class Outage:
    """A node was out of service because of a fault.

    Args:
        start, end: seconds; ``end`` is infinite while it lasts.
        kind: class of the fault.
    """

    node: str
    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class SignSeen:
    """A sign was seen on a node."""

    node: str
    time: float
    sign: str


@dataclass(frozen=True)
class Observed:
    """What the logs of a site say.

    Args:
        outages: any order; those of one node may overlap.
        begin, end: seconds between which the nodes were observed.
        nodes: how many there were, with those that never failed.
        signs: that were seen.
    """

    outages: Sequence[Outage]
    begin: float
    end: float
    nodes: int
    signs: Sequence[SignSeen] = ()


Kinds = tuple[str, str, str]


def merged(outages: Iterable[Outage]) -> dict[str, list[Outage]]:
    """Return the outages of each node by time; those that overlap are one, of the first class."""
    found: dict[str, list[Outage]] = {}
    for one in sorted(outages, key=lambda outage: (outage.start, outage.end)):
        mine = found.setdefault(one.node, [])
        if mine and one.start <= mine[-1].end:
            mine[-1] = replace(mine[-1], end=max(one.end, mine[-1].end))
        else:
            mine.append(one)
    return found


def history_at(outages: Sequence[Outage], now: float) -> NodeHistory | None:
    """Return the history of a node at a time; None: it is out of service.

    Args:
        outages: of this node, merged.
        now: in seconds.
    """
    before = [one for one in outages if one.start <= now]
    if not before:
        return NodeHistory()
    last = before[-1]
    if now < last.end:
        return None
    faults = sum(now - one.start < RECENT for one in before)
    return NodeHistory(now - last.end, last.kind, faults)


def kinds_of(history: NodeHistory) -> Kinds:
    """Return the class of a history in each factor."""
    age = history.since_repair
    since = NEVER if age is None else next(name for name, upper in SINCE_REPAIR.items() if age < upper)
    return since, history.last_fault or NEVER, str(min(history.faults, MOST_FAULTS))


def _exposure(
    outages: Sequence[Outage], begin: float, end: float
) -> tuple[dict[Kinds, float], dict[Kinds, int]]:
    """Return a node's hours in service, and its faults, by the classes that it was in."""
    changes = {begin, end}
    for one in outages:
        changes |= {one.start, one.end, one.start + RECENT}
        changes |= {one.end + upper for upper in SINCE_REPAIR.values()}
    times = sorted(time for time in changes if begin <= time <= end)
    hours: dict[Kinds, float] = {}
    for since, until in itertools.pairwise(times):
        history = history_at(outages, (since + until) / 2)
        if history is not None:
            kinds = kinds_of(history)
            hours[kinds] = hours.get(kinds, 0.0) + (until - since) / HOUR
    faults: dict[Kinds, int] = {}
    for place, one in enumerate(outages):
        history = history_at(outages[:place], one.start)
        if history is not None and begin <= one.start < end:
            kinds = kinds_of(history)
            faults[kinds] = faults.get(kinds, 0) + 1
    return hours, faults


def fit(observed: Observed, prior: float = PRIOR, source: str = "") -> HazardModel:
    """Return the model for a site.

    Args:
        observed: its logs.
        prior: weight of the prior, in faults.
        source: from what, in words, for the parameters file.
    """
    by_node = merged(observed.outages)
    hours: dict[Kinds, float] = {}
    faults: dict[Kinds, int] = {}
    for outages in by_node.values():
        mine, fell = _exposure(outages, observed.begin, observed.end)
        for kinds, amount in mine.items():
            hours[kinds] = hours.get(kinds, 0.0) + amount
        for kinds, count in fell.items():
            faults[kinds] = faults.get(kinds, 0) + count
    calm = max(0, observed.nodes - len(by_node)) * (observed.end - observed.begin) / HOUR
    never = kinds_of(NodeHistory())
    hours[never] = hours.get(never, 0.0) + calm
    total = sum(hours.values())
    base = (sum(faults.values()) + 0.5) / (total + 1800)  # hours; not 0 where nothing has failed
    found = HazardModel(base, _factors(base, hours, faults, prior), source=source)
    return replace(found, signs=_signs(found, by_node, observed, prior))


def _factors(
    base: float, hours: Mapping[Kinds, float], faults: Mapping[Kinds, int], prior: float
) -> dict[str, dict[str, float]]:
    factors: list[dict[str, float]] = [{} for _ in FACTORS]
    for _ in range(_SWEEPS):
        for place, mine in enumerate(factors):
            expected: dict[str, float] = {}
            fell: dict[str, int] = {}
            for kinds, amount in hours.items():
                others = math.prod(
                    factors[other].get(kind, 1.0) for other, kind in enumerate(kinds) if other != place
                )
                expected[kinds[place]] = expected.get(kinds[place], 0.0) + base * amount * others
                fell[kinds[place]] = fell.get(kinds[place], 0) + faults.get(kinds, 0)
            for kind, amount in expected.items():
                mine[kind] = (fell[kind] + prior) / (amount + prior)
    found = {name: dict(sorted(mine.items())) for name, mine in zip(FACTORS, factors, strict=True)}
    found["last_fault"][OTHER] = _other(base, found, hours, faults, prior)
    return found


def _other(
    base: float,
    factors: Mapping[str, Mapping[str, float]],
    hours: Mapping[Kinds, float],
    faults: Mapping[Kinds, int],
    prior: float,
) -> float:
    """Return the factor of all last faults together, for a class that the logs did not have."""
    expected, fell = 0.0, 0
    for kinds, amount in hours.items():
        since, last, recent = kinds
        if last != NEVER:
            others = factors["since_repair"][since] * factors["faults_30d"][recent]
            expected += base * amount * others
            fell += faults.get(kinds, 0)
    return (fell + prior) / (expected + prior)


def _signs(
    model: HazardModel, by_node: Mapping[str, Sequence[Outage]], observed: Observed, prior: float
) -> dict[str, Sign]:
    """Return the signs with chances that fit what followed them."""
    failed: dict[str, int] = {}
    expected: dict[str, float] = {}
    for seen in observed.signs:
        sign = SIGNS.get(seen.sign)
        if sign is None or not observed.begin <= seen.time < observed.end:
            continue
        window = min(_FOLLOWED * sign.half_life, observed.end - seen.time)
        outages = by_node.get(seen.node, [])
        history = history_at(outages, seen.time)
        if history is None:
            continue
        after = [one.start - seen.time for one in outages if 0 <= one.start - seen.time <= window]
        lived = min(after, default=window)
        failed[seen.sign] = failed.get(seen.sign, 0) + bool(after)
        likely = sign.within(lived) + model.history_within(history, lived)
        expected[seen.sign] = expected.get(seen.sign, 0.0) + likely
    found = dict(SIGNS)
    for name, amount in expected.items():
        ratio = (failed[name] + prior) / (amount + prior)
        chance = -math.expm1(-SIGNS[name].weight * ratio)
        found[name] = replace(SIGNS[name], chance=min(_MOST_CHANCE, chance))
    return found
