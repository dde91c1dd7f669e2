"""The composite risk score of Megatron_GpuFailureRecoveryMechanism: the sum of six weighted terms.

The README of that project gives the weights, the window, the interval and the threshold; it leaves the terms
open. They are those of its code (``gpu_metric/checkpointing.py`` at 38936b7):

- temperature: (T - 70 °C) / 15 °C;
- memory: (utilisation of the memory - 85 %) / 10 %;
- errors: 1 if there is one, else 0. Its code always has 0; here an uncorrected ECC error or an XID within the
  window counts;
- power: the change since the sample before, relative to that, over 15 %;
- utilization_drop: the mean of the window without its last five samples, less the present utilisation, over
  30 points; 0 with fewer than ten samples, or where the mean is at most 50 %;
- temp_rise: the rise over the last six samples, in °C a minute, over 5; 0 with fewer than six.

Each term is cut to 0..1. Memory utilisation is used over total memory, as no sample has NVML's rate of memory
accesses. What is not known counts as 0: the score has no other way. Known defects are listed in
``docs/explanation/health-risk.md``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from outlast.health.policy.telemetry import DeviceSample, Sample, XidEvent

WINDOW = 60  # samples
INTERVAL = 10.0  # seconds between two samples, there
THRESHOLD = 0.95
WEIGHTS = {
    "temperature": 0.25,
    "memory": 0.15,
    "errors": 0.25,
    "power": 0.10,
    "utilization_drop": 0.15,
    "temp_rise": 0.10,
}
_RECENT = 5  # samples that are no part of the baseline of the utilisation
_ENOUGH = 10
_RISE = 6  # samples
MIB = 1 << 20
METRICS = (
    *("timestamp", "gpu_id", "gpu_name", "driver_version", "temperature", "power_draw", "gpu_utilization"),
    *("memory_utilization", "memory_used", "memory_total", "errors", "failure_risk"),
)  # the columns of gpu_metrics.csv
DETAILED = (
    *("timestamp", "gpu_name", "driver_version", "temperature", "power_draw", "gpu_utilization"),
    *("memory_utilization", "memory_used", "memory_total"),
)  # the columns of gpu_detailed_metrics.csv


@dataclass(frozen=True)
class Terms:
    """The terms of the score, each from 0 to 1."""

    temperature: float = 0.0
    memory: float = 0.0
    errors: float = 0.0
    power: float = 0.0
    utilization_drop: float = 0.0
    temp_rise: float = 0.0

    @property
    def score(self) -> float:
        """The weighted sum."""
        return math.fsum(WEIGHTS[one.name] * getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class Scored:
    """One device after a sample.

    Args:
        sample: the latest.
        terms: of the score.
        errors: uncorrected ECC errors and XIDs within the window.
        alert: the score has reached the threshold.
    """

    sample: DeviceSample
    terms: Terms
    errors: int
    alert: bool

    @property
    def reason(self) -> str:
        """The score and its terms in words."""
        named = ", ".join(
            f"{one.name} {getattr(self.terms, one.name):.2f}"
            for one in fields(self.terms)
            if getattr(self.terms, one.name) > 0
        )
        return f"weighted score {self.terms.score:.2f} ({named or 'all terms 0'})"


class Weighted:
    """Computes the score of each device of a node.

    Args:
        threshold: from which score on there is an alert.
        interval: seconds between two samples of a device; the window and the terms count samples.
    """

    def __init__(self, threshold: float = THRESHOLD, interval: float = INTERVAL) -> None:
        self._threshold = threshold
        self._interval = interval
        self._windows: dict[str, deque[tuple[DeviceSample, int]]] = {}
        self._pending: dict[int, int] = {}

    def observe(self, samples: Iterable[Sample]) -> list[Scored]:
        """Take what a collector said, in the order of time; return one result for each sample of a device."""
        found = []
        for one in samples:
            if isinstance(one, XidEvent):
                self._pending[one.index] = self._pending.get(one.index, 0) + 1
            elif isinstance(one, DeviceSample) and self._due(one):
                found.append(self._scored(one))
        return found

    def _due(self, sample: DeviceSample) -> bool:
        """Say whether the interval since the device's last sample is over: terms count samples."""
        window = self._windows.get(_key(sample))
        return not window or not 0 <= sample.time - window[-1][0].time < 0.95 * self._interval

    def _scored(self, sample: DeviceSample) -> Scored:
        window = self._windows.setdefault(_key(sample), deque(maxlen=WINDOW))
        known = (one.ecc_uncorrected for one, _ in reversed(window))
        before = next((value for value in known if value is not None), None)
        fresh = self._pending.pop(sample.index, 0)
        if before is not None and sample.ecc_uncorrected is not None:
            fresh += max(0, sample.ecc_uncorrected - before)
        window.append((sample, fresh))
        errors = sum(count for _, count in window)
        terms = terms_of([one for one, _ in window], errors, self._interval)
        return Scored(sample, terms, errors, terms.score >= self._threshold)


def _key(sample: DeviceSample) -> str:
    return sample.uuid or f"#{sample.index}"


def terms_of(window: Sequence[DeviceSample], errors: int, interval: float) -> Terms:
    """Return the terms for a window of samples so many seconds apart, the latest last."""
    now = window[-1]
    return Terms(
        temperature=_cut(None if now.temperature is None else (now.temperature - 70.0) / 15.0),
        memory=_cut(_over(memory_percent(now), 85.0, 10.0)),
        errors=float(errors > 0),
        power=_cut(_power(window)),
        utilization_drop=_cut(_drop(window)),
        temp_rise=_cut(_rise(window, interval)),
    )


def memory_percent(sample: DeviceSample) -> float | None:
    """Return the used share of the memory in percent; None: not known."""
    if sample.memory_used is None or not sample.memory_total:
        return None
    return 100.0 * sample.memory_used / sample.memory_total


def _cut(value: float | None) -> float:
    return 0.0 if value is None else min(1.0, max(0.0, value))


def _over(value: float | None, start: float, width: float) -> float | None:
    return None if value is None else (value - start) / width


def _power(window: Sequence[DeviceSample]) -> float | None:
    if len(window) < 2:
        return None
    before, now = window[-2].power, window[-1].power
    return None if not before or now is None else abs(now - before) / before / 0.15


def _drop(window: Sequence[DeviceSample]) -> float | None:
    now = window[-1].utilization
    known = [one.utilization for one in list(window)[:-_RECENT] if one.utilization is not None]
    if len(window) < _ENOUGH or now is None or not known:
        return None
    baseline = sum(known) / len(known)
    return (baseline - now) / 0.30 if baseline > 0.50 else None


def _rise(window: Sequence[DeviceSample], interval: float) -> float | None:
    if len(window) < _RISE:
        return None
    first, last = window[-_RISE].temperature, window[-1].temperature
    minutes = _RISE * interval / 60
    return None if first is None or last is None else (last - first) / minutes / 5.0


def metrics_row(scored: Scored, timestamp: str) -> list[str]:
    """Return the line of gpu_metrics.csv; ``timestamp`` is wall time in words, what is not known is empty."""
    risk = f"{scored.terms.score:.4f}"
    return [timestamp, str(scored.sample.index), *_values(scored.sample), str(scored.errors), risk]


def detailed_row(sample: DeviceSample, timestamp: str) -> list[str]:
    """Return the line of gpu_detailed_metrics.csv."""
    return [timestamp, *_values(sample)]


def _values(sample: DeviceSample) -> list[str]:
    """Return name, driver (not known), °C, W, %, %, MiB and MiB."""
    used, total = sample.memory_used, sample.memory_total
    busy = None if sample.utilization is None else 100 * sample.utilization
    numbers = (
        *(sample.temperature, sample.power, busy, memory_percent(sample)),
        None if used is None else used / MIB,
        None if total is None else total / MIB,
    )
    return [sample.model, "", *("" if one is None else f"{one:.10g}" for one in numbers)]
