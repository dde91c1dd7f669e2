"""Soft signs: what a device does that its peers do not, how much of it counts, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from outlast.health.policy.signals import Found, Peer, Trend, compare
from outlast.health.policy.telemetry import DeviceSample

PLAIN = DeviceSample(
    *(0.0, "n1", 0),
    temperature=50.0,
    sm_clock=2000.0,
    max_sm_clock=2000.0,
    utilization=1.0,
    throttle_reasons=0,
    temperature_margin=30.0,
    ecc_corrected=0,
    call_seconds=0.01,
)
USUAL = (PLAIN, PLAIN, PLAIN)


def shown(
    values: Iterable[Mapping[str, object]],
    peers: Iterable[DeviceSample] = USUAL,
    rates: Mapping[str, float] | None = None,
) -> list[list[Found]]:
    """Return the signs of each of a device's samples, one every ten seconds."""
    trend = Trend()
    others = [Peer(one, rates or {}) for one in peers]
    return [
        compare(replace(PLAIN, time=10.0 * number, **one), others, trend)  # type: ignore[arg-type]
        for number, one in enumerate(values)
    ]


def signs(found: list[list[Found]]) -> list[str]:
    """Return the signs of each sample."""
    return [" ".join(each.sign for each in one) for one in found]


def first(found: list[list[Found]], sign: str) -> int:
    """Return how many samples there were before a sign; -1: it was not seen."""
    return next((at for at, one in enumerate(found) if any(each.sign == sign for each in one)), -1)


def hot(degrees: float, count: int = 60, before: float = 0.0) -> Sequence[Mapping[str, object]]:
    return [{"temperature": 50.0 + before}] * 10 + [{"temperature": 50.0 + degrees}] * count


def test_a_device_that_becomes_hotter_than_the_others_is_a_sign() -> None:
    found = shown(hot(20.0))
    assert 10 + 6 <= first(found, "hot") <= 10 + 15
    (last,) = found[-1]
    assert (last.sign, last.event, last.weight) == ("hot", False, 1.0)
    assert shown([{}] * 60) == [[]] * 60
    assert first(shown(hot(9.9)), "hot") == -1


def test_a_short_rise_is_no_sign() -> None:
    assert first(shown([*hot(30.0, count=3), *hot(0.0)]), "hot") == -1


def test_a_place_that_is_always_hotter_is_no_sign_and_one_that_was_cooler_gains_nothing() -> None:
    assert first(shown(hot(20.0, before=20.0)), "hot") == -1
    assert first(shown(hot(40.0, before=20.0)), "hot") > 0
    assert first(shown(hot(9.0, before=-20.0)), "hot") == -1
    assert first(shown(hot(12.0, before=-20.0)), "hot") > 0


def test_a_difference_that_stays_for_hours_becomes_the_level_of_the_device() -> None:
    found = shown(hot(12.0, count=2000))
    assert first(found, "hot") > 0
    assert found[-1] == []


def test_a_sign_ends_when_a_third_of_it_is_gone() -> None:
    for left, stays in ((12.0, True), (9.0, True), (6.0, False)):
        found = shown([*hot(12.0), *[{"temperature": 50.0 + left}] * 40])
        assert bool(found[-1]) is stays


def test_peers_that_differ_among_themselves_hide_a_small_difference() -> None:
    peers = [replace(PLAIN, temperature=50.0 + above) for above in (-6.0, -3.0, 0.0, 3.0, 6.0)]
    assert first(shown(hot(16.0), peers), "hot") == -1
    assert first(shown(hot(20.0), peers), "hot") > 0


def test_the_median_of_the_peers_counts_not_one_that_is_hot_as_well() -> None:
    peers = [*USUAL, replace(PLAIN, temperature=90.0)]
    assert first(shown(hot(20.0), peers), "hot") > 0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_two_peers_are_needed(count: int) -> None:
    slow = {"sm_clock": 1500.0}
    assert (first(shown(hot(20.0), USUAL[:count]), "hot") > 0) is (count == 2)
    assert (first(shown([slow] * 40, USUAL[:count]), "slow_clock") >= 0) is (count == 2)
    unknown = [replace(PLAIN, temperature=None, utilization=None)] * (2 - count)
    assert first(shown(hot(20.0), [*USUAL[:count], *unknown]), "hot") == -1 or count == 2


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ({"sm_clock": 1880.0}, True),
        ({"sm_clock": 1880.0, "utilization": 0.5}, True),
        ({"sm_clock": 1880.0, "utilization": 0.49}, False),
        ({"sm_clock": 1880.0, "utilization": None}, False),
        ({"sm_clock": 1899.0}, True),
        ({"sm_clock": 1901.0}, False),
        ({"sm_clock": 1880.0, "max_sm_clock": 0.0}, False),
        ({"sm_clock": None}, False),
        ({"max_sm_clock": None}, False),
    ],
)
def test_a_busy_device_with_a_lower_clock_is_a_sign_after_a_minute(
    values: Mapping[str, object], slow: bool
) -> None:
    assert signs(shown([values] * 6)) == ["", "", "", "", "", "slow_clock" if slow else ""]


def test_idle_peers_say_nothing_of_a_clock() -> None:
    idle = replace(PLAIN, utilization=0.0)
    assert first(shown([{"sm_clock": 1500.0}] * 20, [PLAIN, idle, idle]), "slow_clock") == -1


def counted(*counts: int) -> list[Mapping[str, object]]:
    return [{"ecc_corrected": one} for one in counts]


def test_many_errors_a_second_are_a_sign_after_minutes() -> None:
    found = shown(counted(*range(0, 2000, 20)))
    assert first(found, "corrected_ecc") == 14
    assert first(shown(counted(*range(0, 200, 2))), "corrected_ecc") == -1


def test_what_the_peers_have_as_well_is_usual() -> None:
    assert first(shown(counted(*range(0, 2000, 20)), rates={"corrected_ecc": 1.0}), "corrected_ecc") == -1
    found = shown(counted(*range(0, 400_000, 2000)), rates={"corrected_ecc": 1.0, "pcie_replays": 9.0})
    assert signs(found)[20] == "corrected_ecc"


def test_no_single_burst_is_enough_and_three_are() -> None:
    million = 1_000_000
    assert first(shown(counted(0, *[million] * 50)), "corrected_ecc") == -1
    assert first(shown(counted(0, million, 2 * million, *[2 * million] * 50)), "corrected_ecc") == -1
    assert first(shown(counted(0, million, 2 * million, 3 * million)), "corrected_ecc") == 3


def test_a_storm_is_forgotten_after_18_minutes_however_long_it_was() -> None:
    storm = [number * 1_000_000 for number in range(100)]
    found = shown(counted(*storm, *[storm[-1]] * 120))
    signs = [bool(one) for one in found[100:]]
    assert signs.index(False) == pytest.approx(109, abs=1)
    assert not any(signs[signs.index(False) :])


def test_a_counter_that_fell_or_was_not_read_is_compared_with_what_comes_next() -> None:
    values = [*counted(*range(0, 400, 40)), {"ecc_corrected": None}, *counted(0, 40, 80, 120)]
    trend = Trend()
    rates = []
    for number, one in enumerate(values):
        compare(replace(PLAIN, time=10.0 * number, **one), (), trend)  # type: ignore[arg-type]
        rates.append(trend.rates())
    assert rates[0] == {}
    assert rates[1:12] == [{"corrected_ecc": 4.0}] * 11
    assert rates[12] == {"corrected_ecc": 4.0}
    late, again = Trend(), Trend()
    for time, value in ((0.0, 5), (0.0, 9), (10.0, 19)):
        compare(replace(PLAIN, time=time, ecc_corrected=value), (), late)
    assert late.rates() == {"corrected_ecc": 1.0}
    compare(replace(PLAIN, time=10.5, ecc_corrected=20), (), late)
    assert late.rates() == {"corrected_ecc": 2.0}
    for time, value in ((0.0, 0), (20.0, 9)):
        compare(replace(PLAIN, time=time, ecc_corrected=value), (), again)
    assert again.rates() == {"corrected_ecc": 0.45}


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("corrected_ecc", "ecc_corrected"),
        ("pcie_replays", "pcie_replays"),
        ("nvlink_errors", "nvlink_errors"),
    ],
)
def test_each_counter_has_its_sign_with_the_rate(sign: str, name: str) -> None:
    (last,) = shown([{name: 1000 * number} for number in range(5)])[-1]
    assert (last.sign, "100" in last.reason) == (sign, True)


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ({"throttle_reasons": 0x08}, True),
        ({"throttle_reasons": 0x40}, True),
        ({"throttle_reasons": 0x80, "temperature_margin": None}, True),
        ({"throttle_reasons": 0x01 | 0x04 | 0x20}, False),  # idle, the power cap, software thermal slowdown
        ({"throttle_reasons": None, "temperature_margin": 0.0}, True),
        ({"throttle_reasons": 0x40, "temperature_margin": -1.0}, True),
        ({"temperature_margin": 1.0}, False),
    ],
)
def test_a_slowdown_by_the_hardware_is_a_sign_after_a_minute(
    values: Mapping[str, object], slow: bool
) -> None:
    found = signs(shown([values] * 7))
    assert (found[:5], found[5:]) == ([""] * 5, ["slowdown" if slow else ""] * 2)


def test_a_slowdown_that_ends_begins_anew_and_one_that_is_not_read_goes_on() -> None:
    slowed: Mapping[str, object] = {"throttle_reasons": 0x08}
    assert first(shown([slowed] * 5 + [{}] + [slowed] * 5), "slowdown") == -1
    unknown: Mapping[str, object] = {"throttle_reasons": None, "temperature_margin": None}
    assert first(shown([slowed] * 5 + [unknown] * 3 + [slowed]), "slowdown") == 8


@pytest.mark.parametrize(
    ("seconds", "peers", "slow"),
    [
        (0.5, USUAL, True),
        (0.49, USUAL, False),
        (0.5, (), True),
        (0.5, USUAL[:1], True),
        (0.5, USUAL[:2], True),
    ],
)
def test_readings_that_take_long_are_a_sign_at_the_third(
    seconds: float, peers: tuple[DeviceSample, ...], slow: bool
) -> None:
    assert signs(shown([{"call_seconds": seconds}] * 3, peers)) == ["", "", "slow_calls" if slow else ""]


def test_readings_that_take_long_on_all_devices_are_no_sign() -> None:
    peers = [replace(PLAIN, call_seconds=0.2)] * 2
    assert first(shown([{"call_seconds": 1.9}] * 9, peers), "slow_calls") == -1
    assert first(shown([{"call_seconds": 2.0}] * 9, peers), "slow_calls") == 2
    assert first(shown([{"call_seconds": 2.0}, {"call_seconds": 2.0}, {}] * 9, peers), "slow_calls") == -1
