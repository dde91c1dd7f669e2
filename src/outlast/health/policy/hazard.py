"""The hazard of a node: failures an hour from its history, and from signs that decay.

Hazards add up, so the probability that nothing fails is a product (a noisy-OR): ``P(fail within H) = 1 -
exp(-integral of the hazards over H)``. Two kinds of hazards:

- the node's history: a base rate times one factor each for the time since its last repair, the class of its
  last fault, and its faults within 30 days. Constant within a class of each factor;
- signs of devices: ``s * ln2/h * 2^(-age/h)`` for a sign with half-life h, where s is the integral over all
  time. A sign is given as the chance that it leads to a failure at all, ``1 - exp(-s)``.

The numbers of :data:`DEFAULT` for the history are what ``outlast health fit`` finds in the whole
InfiniteHBD-Trace (400 servers, 349 days; SIGCOMM 2025). Those of the signs are starting values. Uncorrected
ECC errors: 23 % of the GPUs of Titan that stayed in service failed again within 7 days, 46 % within 30
(Ostrouchov et al., SC 2020), hence 51 % with a half-life of 10.8 days. Links recover, so their signs last for
hours. The others are guesses of ours, low on purpose, until a site has fitted its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOUR, DAY = 3600.0, 86400.0
RECENT = 30 * DAY  # for which faults are counted
NEVER, OTHER = "never", "other"  # no fault yet; a class that the logs did not have
SINCE_REPAIR = {
    "1h": HOUR,
    "1d": DAY,
    "3d": 3 * DAY,
    "7d": 7 * DAY,
    "30d": RECENT,
    "later": math.inf,
}  # upper ends
FACTORS = ("since_repair", "last_fault", "faults_30d")
MOST_FAULTS = 3  # within 30 days; more count as this many
_LEAST, _MOST = 1e-12, 1e3  # failures an hour that a file may name
_MOST_NAMES = 256


class BadModel(ValueError):
    """A parameters file says something that is no hazard."""


@dataclass(frozen=True)
class Sign:
    """How much one sign adds.

    Args:
        chance: that it leads to a failure at all, above 0 and below 1.
        half_life: seconds after which half of that is over.
    """

    chance: float
    half_life: float

    @property
    def weight(self) -> float:
        """The integral of its hazard over all time."""
        return -math.log1p(-self.chance)

    def within(self, horizon: float) -> float:
        """Return the integral of its hazard over the next seconds, for a sign of this moment."""
        return self.weight * -math.expm1(-math.log(2) * horizon / self.half_life)


SIGNS: Mapping[str, Sign] = {
    "uncorrected_ecc": Sign(0.51, 10.8 * DAY),
    "remapped_rows": Sign(0.30, 30 * DAY),
    "remap_pending": Sign(0.10, DAY),
    "xid_failing": Sign(0.20, DAY),
    "xid_link": Sign(0.10, HOUR),
    "corrected_ecc": Sign(0.05, DAY),
    "pcie_replays": Sign(0.05, HOUR),
    "nvlink_errors": Sign(0.05, HOUR),
    "network": Sign(0.05, HOUR),
    "slow_calls": Sign(0.10, HOUR),
    "missing": Sign(0.05, HOUR),
    "hot": Sign(0.005, HOUR),  # 2 of the 158 GPU faults of InfiniteHBD-Trace were temperatures
    "slowdown": Sign(0.02, HOUR),
    "slow_clock": Sign(0.02, HOUR),
}


@dataclass(frozen=True)
class NodeHistory:
    """What a node has been through, at some time.

    Args:
        since_repair: seconds since it came back from its last fault; None: it never failed.
        last_fault: class of that fault, as the log or the ledger calls it; empty: none.
        faults: that began within the last 30 days.
    """

    since_repair: float | None = None
    last_fault: str = ""
    faults: int = 0


@dataclass(frozen=True)
class HazardModel:
    """The parameters.

    Args:
        base: failures of a node an hour.
        factors: for each of :data:`FACTORS` the factor of each class; one that is missing counts as "other",
            else as 1.
        signs: by name.
        source: from what they were fitted, in words.
    """

    base: float
    factors: Mapping[str, Mapping[str, float]]
    signs: Mapping[str, Sign] = field(default_factory=lambda: dict(SIGNS))
    source: str = ""

    def history_within(self, history: NodeHistory, horizon: float) -> float:
        """Return the integral of the history's hazard over the next seconds."""
        rest = self._factor("last_fault", history.last_fault or NEVER)
        rest *= self._factor("faults_30d", str(min(history.faults, MOST_FAULTS)))
        hourly = self.base * rest / HOUR
        age = history.since_repair
        if age is None:
            return hourly * self._factor("since_repair", NEVER) * horizon
        total, end = 0.0, age + horizon
        begin = max(0.0, age)
        for name, upper in SINCE_REPAIR.items():
            until = max(begin, min(upper, end))
            total += hourly * self._factor("since_repair", name) * (until - begin)
            begin = until
        return total

    def _factor(self, name: str, kind: str) -> float:
        kinds = self.factors.get(name, {})
        return kinds.get(kind, kinds.get(OTHER, 1.0))

    def to_json(self) -> dict[str, Any]:
        """Return the content of a parameters file."""
        return {
            "format": 1,
            "source": self.source,
            "base_per_hour": self.base,
            "factors": {name: dict(kinds) for name, kinds in self.factors.items()},
            "signs": {
                name: {"chance": one.chance, "half_life": one.half_life} for name, one in self.signs.items()
            },
        }


def probability(integral: float) -> float:
    """Return the probability of a failure for an integral of hazards."""
    return -math.expm1(-integral)


def model_of(document: object) -> HazardModel:
    """Return the model that a parameters file describes.

    Raises:
        BadModel: it describes none; says which key has what.
    """
    if not isinstance(document, dict) or document.get("format") != 1:
        raise BadModel('an object with "format": 1 expected')
    base = _number("base_per_hour", document.get("base_per_hour"), _LEAST, _MOST)
    factors = _object("factors", document.get("factors", {}))
    unknown = [name for name in factors if name not in FACTORS]
    if unknown:
        raise BadModel(f"factors: one of {', '.join(FACTORS)} expected, {unknown[0]!r:.60} found")
    found = {
        name: {
            str(kind): _number(f"factors.{name}.{kind}", value, _LEAST, 1e6)
            for kind, value in _object(f"factors.{name}", kinds).items()
        }
        for name, kinds in factors.items()
    }
    signs = dict(SIGNS)
    for name, one in _object("signs", document.get("signs", {})).items():
        if name not in SIGNS:
            raise BadModel(f"signs: one of {', '.join(SIGNS)} expected, {name!r:.60} found")
        values = _object(f"signs.{name}", one)
        chance = _number(f"signs.{name}.chance", values.get("chance"), 0.0, 1 - 1e-9)
        signs[name] = Sign(chance, _number(f"signs.{name}.half_life", values.get("half_life"), 1.0, 1e10))
    return HazardModel(base, found, signs, str(document.get("source", ""))[:1000])


def _object(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MOST_NAMES:
        raise BadModel(f"{name}: an object with at most {_MOST_NAMES} keys expected, {value!r:.60} found")
    return value


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise BadModel(f"{name}: a number from {least:g} to {most:g} expected, {value!r:.60} found")
    return float(value)


@dataclass(frozen=True)
class Mark:
    """A sign that was seen: its weight at a time, in occurrences of this moment."""

    weight: float
    at: float

    def left(self, now: float, half_life: float) -> float:
        """Return its weight at a later time; an earlier one changes nothing."""
        return self.weight * math.pow(0.5, max(0.0, now - self.at) / half_life)


MOST_WEIGHT = 10.0  # occurrences of one sign that count


class Marks:
    """The signs of one device, and what they add up to.

    Time is that in which the device was observed, so a device of which nothing is known does not recover.

    Args:
        signs: their weights and half-lives.
    """

    def __init__(self, signs: Mapping[str, Sign]) -> None:
        self._signs = signs
        self._marks: dict[str, Mark] = {}

    def add(self, sign: str, now: float, weight: float = 1.0) -> None:
        """Take an event: it adds to earlier ones."""
        before = self._at(sign, now)
        self._marks[sign] = Mark(min(MOST_WEIGHT, before + weight), now)

    def hold(self, sign: str, now: float, weight: float = 1.0) -> None:
        """Take a condition that lasts: it counts once, and fades when it is over."""
        self._marks[sign] = Mark(max(self._at(sign, now), min(MOST_WEIGHT, weight)), now)

    def _at(self, sign: str, now: float) -> float:
        mark = self._marks.get(sign)
        return 0.0 if mark is None else mark.left(now, self._signs[sign].half_life)

    def within(self, now: float, horizon: float) -> float:
        """Return the integral of the hazards over the next seconds."""
        return sum(self._at(name, now) * self._signs[name].within(horizon) for name in self._marks)

    def shares(self, now: float, horizon: float) -> dict[str, float]:
        """Return the same for each sign, the largest first."""
        found = {name: self._at(name, now) * self._signs[name].within(horizon) for name in self._marks}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


DEFAULT = HazardModel(
    base=1.78e-4,
    factors={
        "since_repair": {
            **{"never": 0.78, "1h": 16.8, "1d": 3.29, "3d": 0.557, "7d": 0.374, "30d": 0.210, "later": 0.401}
        },
        "last_fault": {
            **{"never": 0.938, "GPU": 2.39, "NIC": 2.85, "Parameter Plane Cable": 3.14, "Fan": 2.39},
            **{"Stress Test Failure": 1.99, "Unknown Error": 2.41, "Power Supply": 1.81, "other": 2.48},
        },
        "faults_30d": {"0": 0.804, "1": 4.70, "2": 6.18, "3": 7.35},
    },
    source="InfiniteHBD-Trace, all of it",
)
