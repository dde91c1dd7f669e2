"""Soft signs of a device: how it differs from its peers, smoothed, and beyond a least effect.

Peers are the devices of the same model on the node: they do the same work in the same room, so what load and
weather change, changes for all. A value of a gauge is compared with the median of the peers' latest values;
the difference is smoothed (EWMA) and counts where it is large both in robust standard deviations (1.4826 MAD)
and in its unit, for several samples in a row. Counters are compared as rates, by a one-sided CUSUM for
Poisson counts (J. M. Lucas, 1985): the sum of counts less a reference between the usual rate and the one
that is to be found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.health.policy.telemetry import DeviceSample

_PEERS = 2  # at least
_ALPHA = 1 - 0.5 ** (1 / 6)  # half of a change after six samples
_LEVEL_ALPHA = 1 - 0.5 ** (1 / 360)  # after 360: an hour at the interval of 10 s
_ROBUST = 4.0  # standard deviations
_IN_A_ROW = 6  # samples: a minute at the interval of 10 s
_BUSY = 0.5  # share of the time in which a kernel ran
_HW_SLOWDOWN = 0x08 | 0x40 | 0x80  # NVML: hardware slowdown, hardware thermal slowdown, power brake
_SLOWEST = 10.0  # times the peers' time for a reading
_CUSUM_SECONDS = 300.0  # at the rate that is to be found, until it counts


@dataclass(frozen=True)
class Found:
    """A soft sign.

    Args:
        sign: one of :data:`outlast.health.policy.hazard.SIGNS`.
        reason: what was found and what the peers have.
        event: it counts each time; else it is a condition that lasts.
        weight: in occurrences of the sign.
    """

    sign: str
    reason: str
    event: bool = False
    weight: float = 1.0


def _hotter(mine: DeviceSample, peers: Sequence[DeviceSample]) -> tuple[float, list[float]] | None:
    others = [one.temperature for one in peers if one.temperature is not None]
    return None if mine.temperature is None or len(others) < _PEERS else (mine.temperature, others)


def _slower(mine: DeviceSample, peers: Sequence[DeviceSample]) -> tuple[float, list[float]] | None:
    """Return clocks in percent below the highest one, of devices that are busy."""
    found = [_lack(one) for one in peers]
    others = [lack for lack in found if lack is not None]
    lack = _lack(mine)
    return None if lack is None or len(others) < _PEERS else (lack, others)


def _lack(one: DeviceSample) -> float | None:
    if one.sm_clock is None or not one.max_sm_clock or (one.utilization or 0.0) < _BUSY:
        return None
    return 100 * (1 - one.sm_clock / one.max_sm_clock)


@dataclass(frozen=True)
class _Gauge:
    """What is compared with the peers' median; ``floor`` is the least difference that counts, in ``unit``."""

    sign: str
    read: Callable[[DeviceSample, Sequence[DeviceSample]], tuple[float, list[float]] | None]
    floor: float
    unit: str
    own: bool = False  # it counts from the device's own level: some places in a chassis are always hotter


_GAUGES = (
    _Gauge("hot", _hotter, 10.0, "°C above the other devices", own=True),
    _Gauge("slow_clock", _slower, 5.0, "% of the clock below the other devices"),
)


@dataclass(frozen=True)
class _Counter:
    """A counter: the usual rate is the peers' and at least ``usual``; ``found`` times that is to be found."""

    sign: str
    field: str
    words: str
    usual: float
    found: float = 100.0


_COUNTERS = (
    _Counter("corrected_ecc", "ecc_corrected", "corrected ECC errors", 0.01),
    _Counter("pcie_replays", "pcie_replays", "PCIe replays", 0.01),
    _Counter("nvlink_errors", "nvlink_errors", "NVLink errors", 0.01),
)


@dataclass
class _Gauged:
    """The smoothed difference of one gauge, and for how many samples it has been beyond the floor."""

    smooth: float | None = None
    level: float = 0.0  # of the difference, over hours
    row: int = 0
    on: bool = False


@dataclass
class _Summed:
    """The latest value of a counter, its rate, and the sum of the CUSUM."""

    value: int | None = None
    at: float = 0.0
    rate: float | None = None
    total: float = 0.0


@dataclass
class Trend:
    """What is remembered of one device."""

    gauges: dict[str, _Gauged] = field(default_factory=dict)
    counters: dict[str, _Summed] = field(default_factory=dict)
    slowed: int = 0
    slow_calls: int = 0

    def rates(self) -> dict[str, float]:
        """Return the counts a second of each counter that was read twice."""
        return {name: one.rate for name, one in self.counters.items() if one.rate is not None}


@dataclass(frozen=True)
class Peer:
    """Another device of the same model: its latest sample, of about the same time.

    Args:
        rates: of its counters a second, by sign.
    """

    sample: DeviceSample
    rates: Mapping[str, float]


def compare(mine: DeviceSample, peers: Sequence[Peer], trend: Trend) -> list[Found]:
    """Return the soft signs of a sample, and remember it.

    Args:
        mine: the sample.
        peers: to compare it with, in any order.
        trend: of this device; changed.
    """
    samples = [one.sample for one in peers]
    found = [_gauge(one, mine, samples, trend.gauges.setdefault(one.sign, _Gauged())) for one in _GAUGES]
    for one in _COUNTERS:
        rates = [peer.rates[one.sign] for peer in peers if one.sign in peer.rates]
        found.append(_count(one, mine, rates, trend.counters.setdefault(one.sign, _Summed())))
    return [one for one in (*found, _slowdown(mine, trend), _calls(mine, samples, trend)) if one is not None]


def _gauge(gauge: _Gauge, mine: DeviceSample, peers: Sequence[DeviceSample], known: _Gauged) -> Found | None:
    values = gauge.read(mine, peers)
    if values is None:
        return None
    value, others = values
    middle = statistics.median(others)
    spread = 1.4826 * statistics.median(abs(one - middle) for one in others)
    difference = value - middle
    if known.smooth is None:
        known.smooth = difference
        known.level = difference if gauge.own else 0.0
    known.smooth += _ALPHA * (difference - known.smooth)
    if gauge.own:
        known.level += _LEVEL_ALPHA * (difference - known.level)
    above = known.smooth - max(0.0, known.level)
    least = max(gauge.floor, _ROBUST * spread)
    known.row = known.row + 1 if above >= least else 0
    known.on = known.row >= _IN_A_ROW or (known.on and above >= 0.7 * least)
    return Found(gauge.sign, f"{above:.1f} {gauge.unit}") if known.on else None


def _count(counter: _Counter, mine: DeviceSample, rates: Sequence[float], known: _Summed) -> Found | None:
    value: int | None = getattr(mine, counter.field)
    before, since = known.value, mine.time - known.at
    if value is None:
        return None
    known.value, known.at = value, mine.time
    if before is None or since <= 0 or value < before:  # a reset of the driver begins the count anew
        return None
    known.rate = (value - before) / since
    usual = max(counter.usual, statistics.median(rates) if rates else 0.0)
    unusual = usual * counter.found
    reference = (unusual - usual) / math.log(unusual / usual)
    limit = (unusual - reference) * _CUSUM_SECONDS
    step = min(value - before - reference * since, limit / 3)  # no single burst is enough
    known.total = min(max(0.0, known.total + step), 2 * limit)
    if known.total < limit:
        return None
    return Found(counter.sign, f"{known.rate:.3g} {counter.words} a second, others up to {usual:.3g}")


def _slowdown(mine: DeviceSample, trend: Trend) -> Found | None:
    """Return whether the hardware has slowed the device down, or it is at its limit of temperature."""
    if mine.throttle_reasons is None and mine.temperature_margin is None:
        return None
    limit = mine.temperature_margin is not None and mine.temperature_margin <= 0
    slowed = limit or bool((mine.throttle_reasons or 0) & _HW_SLOWDOWN)
    trend.slowed = trend.slowed + 1 if slowed else 0
    if trend.slowed < _IN_A_ROW:
        return None
    why = "the temperature at which clocks are lowered is reached" if limit else "hardware slowdown"
    return Found("slowdown", f"{why}, for {trend.slowed} samples")


def _calls(mine: DeviceSample, peers: Sequence[DeviceSample], trend: Trend) -> Found | None:
    others = [one.call_seconds for one in peers]
    usual = statistics.median(others) if len(others) >= _PEERS else 0.0
    slow = mine.call_seconds >= max(0.5, _SLOWEST * usual)
    trend.slow_calls = trend.slow_calls + 1 if slow else 0
    if trend.slow_calls < 3:
        return None
    return Found("slow_calls", f"a reading takes {mine.call_seconds:.1f} s, the other devices' {usual:.2f} s")
