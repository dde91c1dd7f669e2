"""How long silence is allowed: fixed by the user, or learned from what the ranks measured.

A learned timeout is ``max(LEARNED_FLOOR, safety_factor * p99, 1.5 * longest)`` over the ranks.
NVRx takes ``safety_factor * longest``: one slow step then multiplies every later detection. The
99th percentile carries the factor here, and the longest span ever seen only keeps a rare long
step (an evaluation) from being taken for a hang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any

from outlast.core.config import (
    LEARNED_FLOOR,
    LEARNED_INITIAL_START,
    LEARNED_SILENCE_START,
    FaultTolerance,
)

BUCKETS = 480
_PER_OCTAVE = 16
_UNIT = 1e6  # buckets begin at a microsecond
MIN_SAMPLES = 16  # Megatron Bridge, _MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE
OUT_OF_SECTION = "out_of_section"
WARMUP = "warmup"
FINISHING = "finishing"
INITIAL_FLOOR = 30.0
LONGEST_MARGIN = 1.5
RARE_SAMPLES = 3  # sections that come seldom (a save) teach from their longest, as NVRx does
RARE_FLOOR = 5.0
EMA = 0.5  # NVRx timeouts_calc.py: weight of the new value when the current one was computed, too


def bucket_of(seconds: float) -> int:
    """Return the histogram bucket of a duration: 16 buckets an octave, linear within it."""
    mantissa, exponent = frexp(seconds * _UNIT)
    if exponent < 1:
        return 0
    bucket = (exponent - 1) * _PER_OCTAVE + int((mantissa - 0.5) * (2 * _PER_OCTAVE))
    return bucket if bucket < BUCKETS else BUCKETS - 1


def seconds_of(bucket: int) -> float:
    """Return the middle of a bucket, in seconds."""
    octave, part = divmod(bucket, _PER_OCTAVE)
    return float((1 << octave) * (1 + (part + 0.5) / _PER_OCTAVE) / _UNIT)


@dataclass(frozen=True)
class Durations:
    """What one rank measured of one section, in seconds."""

    count: int
    p99: float
    longest: float


def summarise(counts: Sequence[int], longest: float) -> Durations:
    """Return count, 99th percentile and longest of a histogram."""
    total = sum(counts)
    beyond = total // 100
    seen = 0
    for bucket in range(len(counts) - 1, -1, -1):
        seen += counts[bucket]
        if seen > beyond:
            return Durations(total, min(seconds_of(bucket), longest), longest)
    return Durations(0, 0.0, 0.0)


class Timeouts:
    """The timeouts in force.

    Args:
        config: fixed values, the safety factor, and whether to learn at all.
    """

    def __init__(self, config: FaultTolerance) -> None:
        self._config = config
        self._learned: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._initial: float | None = None

    def is_fixed(self, section: str | None) -> bool:
        """Say whether the user has set the limit of a section (None: outside of all)."""
        if section is None:
            return self._config.rank_out_of_section_timeout is not None or self._silence_fixed
        return section in self._config.rank_section_timeouts or self._silence_fixed

    @property
    def _silence_fixed(self) -> bool:
        return self._config.rank_heartbeat_timeout is not None

    def limit(self, section: str | None) -> float:
        """Return the seconds that a section may be open, or that may pass outside of all."""
        config = self._config
        fixed = (
            config.rank_out_of_section_timeout
            if section is None
            else config.rank_section_timeouts.get(section)
        )
        if fixed is None:
            fixed = config.rank_heartbeat_timeout
        if fixed is not None:
            return fixed
        return self._learned.get(section or OUT_OF_SECTION, LEARNED_SILENCE_START)

    def initial(self) -> float:
        """Return the seconds between the spawn of a rank and its first pulse."""
        if self._config.initial_rank_heartbeat_timeout is not None:
            return self._config.initial_rank_heartbeat_timeout
        return LEARNED_INITIAL_START if self._initial is None else self._initial

    def finishing(self) -> float:
        """Return the seconds that a rank may take between its last pulse and its end."""
        return self._config.rank_section_timeouts.get(FINISHING, LEARNED_INITIAL_START)

    def stopped(self, section: str | None, limit: float) -> float:
        """Return how long a process may be stopped: it cannot be busy, whatever it was doing."""
        return limit if self.is_fixed(section) else min(limit, LEARNED_FLOOR)

    def origin(self, section: str | None) -> str:
        """Return where the limit comes from, for people."""
        if self.is_fixed(section):
            return "fixed"
        name = section or OUT_OF_SECTION
        return f"learned from {self._samples[name]} samples" if name in self._learned else "default"

    def learn(self, observed: Mapping[str, Durations]) -> dict[str, float]:
        """Compute anew what is not fixed; return the limits that changed by more than a tenth."""
        changed: dict[str, float] = {}
        for name, one in observed.items():
            section = None if name == OUT_OF_SECTION else name
            if one.count < RARE_SAMPLES or name == WARMUP or self.is_fixed(section):
                continue
            if (
                one.count < 2 * self._samples.get(name, 0)
                and one.longest * LONGEST_MARGIN <= self._learned[name]
            ):
                continue
            floor = max(LEARNED_FLOOR, LONGEST_MARGIN * one.longest)
            if one.count < MIN_SAMPLES:
                floor = max(RARE_FLOOR, self._config.safety_factor * one.longest)
            new = max(floor, self._config.safety_factor * one.p99)
            current = self._learned.get(name)
            if current is not None:
                new = max(floor, EMA * new + (1 - EMA) * current)
            self._samples[name] = one.count
            self._learned[name] = new
            if current is None or abs(new - current) > 0.1 * current:
                changed[name] = new
        return changed

    def learn_initial(self, longest: float) -> float | None:
        """Learn from the slowest start of a generation; return the new limit if it changed."""
        if self._config.initial_rank_heartbeat_timeout is not None:
            return None
        new = max(INITIAL_FLOOR, self._config.safety_factor * longest)
        if self._initial is not None:
            new = max(new, EMA * new + (1 - EMA) * self._initial)
        changed = self._initial is None or abs(new - self._initial) > 0.1 * self._initial
        self._initial = new
        return new if changed else None

    def double(self, section: str | None) -> float:
        """Allow twice the time where a hang came back at the same place: it may be a false alarm."""
        name = section or OUT_OF_SECTION
        if not self.is_fixed(section):
            self._learned[name] = min(2 * self.limit(section), LEARNED_SILENCE_START)
            self._samples.setdefault(name, 0)
        return self.limit(section)

    def state(self) -> dict[str, Any]:
        """Return the limits in the shape of NVRx's ``ft_state.json``."""
        sections = {name: value for name, value in self._learned.items() if name != OUT_OF_SECTION}
        outside = self._learned.get(OUT_OF_SECTION)
        return {
            "current_timeouts": {
                "heartbeat": {
                    "initial": self._initial,
                    "subsequent": outside,
                    "were_calculated": self._initial is not None,
                },
                "section": {
                    "section": sections,
                    "out_of_section": outside,
                    "calculated_sections": sorted(sections),
                    "is_out_of_section_calculated": outside is not None,
                },
            },
            "samples": dict(self._samples),
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Take over limits that were learned before; return a line for each part that makes no sense."""
        problems: list[str] = []
        current = state.get("current_timeouts")
        if not isinstance(current, dict):
            return ["ft_state.json: no current_timeouts; learning starts anew"]
        section = current.get("section") or {}
        found = dict(section.get("section") or {})
        if section.get("out_of_section") is not None:
            found[OUT_OF_SECTION] = section["out_of_section"]
        samples = state.get("samples") or {}
        for name, value in found.items():
            if _is_positive(value):
                self._learned[name] = max(float(value), LEARNED_FLOOR)
                self._samples[name] = int(samples.get(name, MIN_SAMPLES))
            else:
                problems.append(f"ft_state.json: section {name!r} has timeout {value!r}; it is learned anew")
        initial = (current.get("heartbeat") or {}).get("initial")
        if isinstance(initial, (int, float)) and _is_positive(initial):
            self._initial = max(float(initial), INITIAL_FLOOR)
        elif initial is not None:
            problems.append(f"ft_state.json: initial timeout is {initial!r}; it is learned anew")
        return problems


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )
