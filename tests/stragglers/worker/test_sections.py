"""Sections on the device, with events that a test lets pass: nothing waits, and inner sections count once."""

from __future__ import annotations

import pytest

from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage, Section
from outlast.stragglers.worker.sections import MOST_PENDING, DeviceSection, DeviceTimes, Event


class Moment:
    """An event of a device that passes it only as far as the test lets it."""

    def __init__(self, device: Here) -> None:
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
        self.now, self.passed, self.made = 0.0, -1.0, 0
        self.taken: dict[str, list[float]] = {}
        self.page = HeartbeatPage(bytearray(PAGE_BYTES))
        self.times = DeviceTimes(self._event, self._measured)

    def _event(self) -> Event:
        self.made += 1
        return Moment(self)

    def _measured(self, section: Section, taken: list[float]) -> None:
        self.taken.setdefault(section.name, []).extend(taken)

    def section(self, name: str) -> DeviceSection:
        return DeviceSection(self.page.section(name), self.times)

    def passes(self, until: float) -> dict[str, list[float]]:
        """Let the device pass what it has until then; return all that was measured."""
        self.passed = until
        self.times.collect()
        return self.taken


def test_a_section_is_read_once_the_device_has_passed_it() -> None:
    here = Here()
    with here.section("forward"):
        here.now = 2.0
    assert here.passes(1.0) == {}
    assert here.passes(2.0) == {"forward": [2.0]}


def test_time_of_inner_sections_is_not_counted_twice() -> None:
    here = Here()
    with here.section("outer"):
        here.now = 1.0
        with here.section("inner"):
            here.now = 4.0
        here.now = 5.0
    assert here.passes(5.0) == {"inner": [3.0], "outer": [2.0]}


def test_events_are_used_again_and_a_device_that_passes_none_costs_bounded_memory() -> None:
    here = Here()
    section = here.section("forward")
    for _ in range(100):
        with section:
            here.now += 1.0
        here.passes(here.now)
    assert here.made == 2
    here = Here()
    section = here.section("forward")
    for _ in range(MOST_PENDING + 100):
        with section:
            pass
    assert here.made <= 2 * MOST_PENDING
    assert len(here.passes(1.0)["forward"]) == MOST_PENDING


def test_an_exception_closes_a_section_and_one_that_is_never_closed_harms_no_other() -> None:
    here = Here()
    with pytest.raises(ValueError, match="inside"), here.section("backward"):
        raise ValueError("inside")
    assert (here.passes(0.0), here.page.depth) == ({"backward": [0.0]}, 0)
    here.section("open").__enter__()
    with here.section("forward"):
        here.now = 1.0
    assert here.passes(1.0) == {"backward": [0.0], "forward": [1.0]}
