"""Sections on the device, with events that a test lets pass: nothing waits, and inner sections count once."""

from __future__ import annotations

import pytest

from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage, Section
from outlast.stragglers.worker.sections import MOST_PENDING, DeviceSection, DeviceTimes, Event


class Device:
    """A device whose time the test sets; it passes events only as far as the test lets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = -1.0
        self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Moment(self)


class Moment:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = -1.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.at <= self.device.passed

    def elapsed_time(self, end: Event) -> float:
        assert isinstance(end, Moment)
        return 1e3 * (end.at - self.at)


class Here:
    def __init__(self) -> None:
        self.device = Device()
        self.taken: dict[str, list[float]] = {}
        self.page = HeartbeatPage(bytearray(PAGE_BYTES))
        self.times = DeviceTimes(self.device.event, self._measured)

    def _measured(self, section: Section, taken: list[float]) -> None:
        self.taken.setdefault(section.name, []).extend(taken)

    def section(self, name: str) -> DeviceSection:
        return DeviceSection(self.page.section(name), self.times)


def test_a_section_is_read_once_the_device_has_passed_it() -> None:
    here = Here()
    with here.section("forward"):
        here.device.now = 2.0
    here.device.passed = 1.0
    here.times.collect()
    assert here.taken == {}
    here.device.passed = 2.0
    here.times.collect()
    assert here.taken == {"forward": [2.0]}


def test_time_of_inner_sections_is_not_counted_twice() -> None:
    here = Here()
    with here.section("outer"):
        here.device.now = 1.0
        with here.section("inner"):
            here.device.now = 4.0
        here.device.now = 5.0
    here.device.passed = 5.0
    here.times.collect()
    assert here.taken == {"inner": [3.0], "outer": [2.0]}


def test_events_are_used_again() -> None:
    here = Here()
    section = here.section("forward")
    for _ in range(100):
        with section:
            here.device.now += 1.0
        here.device.passed = here.device.now
        here.times.collect()
    assert here.device.made == 2


def test_a_device_that_never_passes_anything_costs_bounded_memory() -> None:
    here = Here()
    section = here.section("forward")
    for _ in range(MOST_PENDING + 100):
        with section:
            pass
    assert here.device.made <= 2 * MOST_PENDING
    here.device.passed = 1.0
    here.times.collect()
    assert len(here.taken["forward"]) == MOST_PENDING


def test_an_exception_inside_closes_the_section() -> None:
    here = Here()
    with pytest.raises(ValueError, match="inside"), here.section("forward"):
        raise ValueError("inside")
    here.device.passed = 0.0
    here.times.collect()
    assert here.taken == {"forward": [0.0]}
    assert here.page.depth == 0


def test_a_section_that_is_never_closed_harms_no_other() -> None:
    here = Here()
    here.section("open").__enter__()
    with here.section("forward"):
        here.device.now = 1.0
    here.device.passed = 1.0
    here.times.collect()
    assert here.taken == {"forward": [1.0]}
