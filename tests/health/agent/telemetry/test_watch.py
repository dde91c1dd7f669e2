"""The watch over calls: what counts as silence, and what does not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from outlast.health.agent.telemetry.collector import Runner, Watch
from outlast.health.policy.telemetry import Notice, Sample
from tests.support.launching import until


class Source:
    """A source whose state a test sets; it raises, and blocks from the fifth call on."""

    name = "NVML"

    def __init__(self) -> None:
        self.starting = False
        self.doing = (1, "device 0, power")
        self.tried = threading.Event()
        self._calls = 0

    def sample(self, now: float) -> Sequence[Sample]:
        self._calls += 1
        if self._calls == 5:
            self.tried.set()
            threading.Event().wait()
        raise OSError("cable on fire")


class Thread(Runner):
    """A runner that is not started; it says that it waited for a processor so long."""

    waiting = 0.0

    def waited(self) -> float:
        return self.waiting


def made() -> tuple[Source, Thread, Watch]:
    source = Source()
    thread = Thread(source, "n", 10.0, queue.Queue())
    thread.calling = True
    return source, thread, Watch(thread, 2.0, "n")


def reports(watch: Watch, ticks: int, passed: float = 0.25) -> list[float]:
    found = (watch.tick(passed, 5.0) for _ in range(ticks))
    return [one.seconds for one in found if one is not None]


def test_a_call_is_reported_at_the_timeout_and_again_after_each_further_one() -> None:
    _, _, watch = made()
    assert reports(watch, 8) == []
    assert reports(watch, 1) == [2.0]
    assert reports(watch, 16) == [4.0, 6.0]


def test_each_call_has_the_whole_timeout() -> None:
    source, _, watch = made()
    for number in range(10):
        source.doing = (number, "device 0, power")
        assert reports(watch, 8) == []


def test_the_first_call_of_a_driver_has_six_times_as_long() -> None:
    source, _, watch = made()
    source.starting = True
    assert reports(watch, 48) == []
    assert reports(watch, 1) == [12.0]


def test_a_stopped_process_counts_as_two_ticks_whatever_the_clock_says() -> None:
    _, _, watch = made()
    watch.tick(0.25, 5.0)
    assert reports(watch, 3, passed=3600.0) == []


def test_time_without_a_processor_is_not_counted() -> None:
    _, thread, watch = made()
    watch.tick(0.25, 5.0)
    for at in range(40):
        thread.waiting = (at + 1) * 0.25
        assert watch.tick(0.25, 5.0) is None
    assert reports(watch, 8) == [2.0]


def test_a_source_that_raises_is_told_once_and_tried_again() -> None:
    found: queue.Queue[Sample] = queue.Queue()
    source = Source()
    thread = Runner(source, "n", 0.01, found)
    thread.start()
    until(source.tried.is_set, "the fifth call")
    first = found.get_nowait()
    assert isinstance(first, Notice)
    assert "device 0, power" in first.text
    assert "OSError: cable on fire" in first.text
    assert found.empty()
