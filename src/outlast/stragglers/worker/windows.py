"""Windows of steps: what a rank measured in each, left for its agent in the heartbeat page.

A window is as many steps as the agent asked for, or a multiple where steps are short. It ends at a multiple
of that, so that windows of all ranks can be compared. A rank that goes back to an earlier step begins anew.
"""

from __future__ import annotations

import os
import sys
from time import monotonic

from outlast.hang.policy.timeouts import OUT_OF_SECTION, STORAGE, WARMUP
from outlast.ipc.heartbeat_page import HeartbeatPage, Section
from outlast.stragglers.policy.kinds import kind_of
from outlast.stragglers.policy.measuring import Doing, Entries, Window, rows
from outlast.stragglers.policy.rows import BENCHMARK
from outlast.stragglers.worker.sampler import Sampler
from outlast.stragglers.worker.sections import DeviceSection, DeviceTimes, cuda_events

SHORTEST = 0.12  # seconds of a window; a shorter one is followed by one of twice as many steps
LEAST_LOOKS = 12  # at the training thread in a window, likewise: on a busy host looks are rare
_MOST_PARTS = 1 << 12
_OURS = frozenset({"step", "setup", WARMUP, OUT_OF_SECTION})  # what they take is the rest of a step
_ASIDE = frozenset({"checkpointing", STORAGE})  # no part of a step


class Windows:
    """Measures the steps of one page, in the process and on the thread that sends its heartbeats.

    Args:
        page: of this process.
    """

    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self._size = page.times.steps
        self._parts = 1  # of a window
        self._step = -1
        self._first = -1  # part of the window that began last
        self._began = self._stepped_at = 0.0
        self._sections: dict[int, Entries] = {}
        self._steps = Entries()
        self._spent = 0.0  # in sections, since the last step
        self._aside = 0.0  # of the window
        self._earlier: dict[int, dict[Doing, float]] = {}  # the latest looks at each section
        self._sampler: Sampler | None = None
        self._pid = os.getpid()
        self._device: DeviceTimes | None = None
        self._on_device: dict[str, DeviceSection] = {}
        page.measured, page.stepped = self._measured, self._guarded

    def on_device(self, section: Section) -> Section | DeviceSection:
        """Return the section, timed on the device too where this process uses CUDA."""
        known = self._on_device.get(section.name)
        if known is not None:
            return known
        make = cuda_events()
        if make is None:
            return section
        if self._device is None:
            self._device = DeviceTimes(make, self._add)
        known = self._on_device[section.name] = DeviceSection(section, self._device)
        return known

    def close(self) -> None:
        """Measure no more."""
        self._page.measured = self._page.stepped = None
        if self._sampler is not None:
            self._sampler.close()

    def _measured(self, section: Section, taken: list[float]) -> None:
        """Take the durations of a section on the host."""
        if section.name in _OURS or section.name in self._on_device:
            return
        if section.name in _ASIDE:
            self._spent += sum(taken)
            self._aside += sum(taken)
            return
        if section.name == BENCHMARK:
            self._aside += sum(taken)
        self._add(section, taken)

    def _add(self, section: Section, taken: list[float]) -> None:
        entries = self._sections.get(section.slot)
        if entries is None:
            entries = self._sections[section.slot] = Entries(kind_of(section.name))
        entries.add(taken)
        self._spent += sum(taken)

    def _guarded(self, step: int) -> None:
        try:
            self._stepped(step)
        except TimeoutError:  # of an alarm of the script
            raise
        except (RuntimeError, OSError) as error:  # training is not touched
            self.close()
            sys.stderr.write(f"[outlast] the steps of this rank are not timed any more: {error}\n")

    def _stepped(self, step: int) -> None:
        """Take note of a heartbeat: so many steps are completed."""
        if os.getpid() != self._pid:  # a fork of the rank, which has none of its threads
            self._page.measured = self._page.stepped = None
            return
        if self._device is not None:
            self._device.collect()
        if step == self._step:
            return
        now, before = monotonic(), self._step
        self._step = step
        if step < before or before < 0:
            self._begin(now)
            return
        self._steps.add([max(0.0, now - self._stepped_at - self._spent)])
        self._steps.count += step - before - 1
        self._stepped_at, self._spent = now, 0.0
        part = step // self._size
        if part > before // self._size and (part % self._parts == 0 or part - self._first >= self._parts):
            self._end(part, now)

    def _begin(self, now: float) -> None:
        if self._sampler is None:
            self._sampler = Sampler(self._page)
            self._sampler.begin()
        self._first = self._step // self._size
        self._clear(now)

    def _clear(self, now: float) -> None:
        assert self._sampler is not None
        self._sampler.take()
        self._sections, self._steps = {}, Entries()
        self._spent = self._aside = 0.0
        self._began = self._stepped_at = now

    def _end(self, part: int, now: float) -> None:
        """Write the window that ends before a part, unless it is incomplete as the first one may be."""
        sampler, wall, steps = self._sampler, now - self._began - self._aside, self._steps
        assert sampler is not None
        if steps.count >= (part - self._first) * self._size:
            looks = sampler.looks
            if not sampler.failure:
                taken = sampler.take()
                found = rows(wall, steps, self._sections, taken, self._earlier)
                self._page.times.write(Window(self._first, part, found))
                self._earlier |= taken
            sampler.step = wall / steps.count
            if wall < SHORTEST or looks < LEAST_LOOKS:
                self._parts = min(2 * self._parts, _MOST_PARTS)
            elif wall > 4 * SHORTEST and looks > 3 * LEAST_LOOKS:
                self._parts = max(1, self._parts // 2)
        self._first = part
        self._clear(now)
