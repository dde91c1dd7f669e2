"""Windows of steps in a page, with a product between two of them: what a rank leaves, and its agent reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader
from outlast.ipc.timing_words import ROWS, WINDOWS
from outlast.stragglers.agent import TimesOfRanks
from outlast.stragglers.policy.gathering import RankWindow, SectionTimes, joined
from outlast.stragglers.policy.measuring import Times, Window
from outlast.stragglers.policy.rows import BENCHMARK, Kind
from outlast.stragglers.worker.benchmark import ENTRIES, compute
from outlast.stragglers.worker.windows import Windows

SIZE = 2


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[HeartbeatReader]:
    one = HeartbeatReader(tmp_path / "page", rank=3, generation=1, spawned=time.monotonic())
    one.times.ask(SIZE)
    yield one
    one.close()


@pytest.fixture
def page(reader: HeartbeatReader) -> Iterator[HeartbeatPage]:
    page = HeartbeatPage.open(reader.path)
    windows = Windows(page)
    yield page
    windows.close()


def reports(reader: HeartbeatReader, nodes: int = 1) -> TimesOfRanks:
    times = TimesOfRanks(nodes)
    times.begin(1, {3: reader})
    return times


def reported(reader: HeartbeatReader) -> tuple[RankWindow, ...]:
    report = reports(reader).look(0.0)
    assert report is not None
    return report.windows


def section(of: RankWindow, name: str) -> SectionTimes:
    return {one.section: one for one in of.sections}[name]


def trained(page: HeartbeatPage, steps: range, seconds: float = 0.1, name: str = "forward") -> None:
    for step in steps:
        with page.section(name):
            time.sleep(seconds)
        page.heartbeat(step)


def test_the_agent_reads_the_sections_of_each_window_once(
    reader: HeartbeatReader, page: HeartbeatPage
) -> None:
    trained(page, range(1, 14))
    times = reports(reader)
    report, before = times.look(0.0), 1
    assert report is not None
    assert report.windows[0].end == 2
    for window in report.windows:
        parts, before = window.end - before, window.end
        forward = section(window, "forward")
        assert (forward.kind, forward.count) == (Kind.COMPUTE, parts * SIZE)
        assert (forward.total >= SIZE * 0.1, forward.median >= 0.1) == (True, True)
    assert times.look(1.0) is None


def test_short_steps_are_put_together(reader: HeartbeatReader, page: HeartbeatPage) -> None:
    for step in range(1, 400):
        page.heartbeat(step)
    ends = {one.end for one in reported(reader)}
    assert len(ends) < 20
    assert all(end & (end - 1) == 0 for end in ends if end > 4)


def test_a_rank_that_goes_back_leaves_no_window_of_both(reader: HeartbeatReader, page: HeartbeatPage) -> None:
    trained(page, range(1, 4))
    trained(page, range(1, 6))
    (window,) = reported(reader)
    assert (window.end, section(window, "forward").count) == (2, SIZE)


def test_a_section_that_is_never_closed_and_one_with_an_exception_are_reported(
    reader: HeartbeatReader, page: HeartbeatPage
) -> None:
    page.section("open").__enter__()
    for step in range(1, 6):
        with contextlib.suppress(ValueError), page.section("forward"):
            time.sleep(0.1)
            raise ValueError
        page.heartbeat(step)
    window = reported(reader)[-1]
    assert section(window, "forward").count == SIZE
    assert "open" not in {one.section for one in window.sections}


def test_time_of_saves_is_no_time_of_steps(reader: HeartbeatReader, page: HeartbeatPage) -> None:
    trained(page, range(1, 6), 0.2, "checkpointing")
    assert sum(one.total for one in reported(reader)[-1].sections) < 0.2


def test_a_page_that_asks_for_nothing_is_not_measured(tmp_path: Path) -> None:
    with contextlib.closing(HeartbeatReader(tmp_path / "page", rank=0, generation=1, spawned=0.0)) as reader:
        assert HeartbeatPage.open(reader.path).times.steps == 0


def test_windows_that_were_overwritten_are_lost_and_the_rest_is_whole(reader: HeartbeatReader) -> None:
    page = HeartbeatPage.open(reader.path)
    row = Times(0, Kind.DATA, 1, 0.1, 0.2, 0.3, 0.4, 0.0)
    for number in range(3 * WINDOWS):
        page.times.write(Window(number, number + 1, (row,) * (ROWS + 4)))
    found = reader.times.new()
    assert [one.first for one in found] == list(range(2 * WINDOWS + 1, 3 * WINDOWS))
    assert all(one.rows == (row,) * ROWS for one in found)


def test_a_window_that_is_being_written_is_not_read(reader: HeartbeatReader) -> None:
    page = HeartbeatPage.open(reader.path)
    for number in range(2):
        page.times.write(Window(number, number + 1, (Times(0, Kind.OTHER, 1, 1, 1, 1, 1, 0),)))
    at = page.times._at + 8 + 2 * (8 + ROWS * 8)
    page.words[at] += WINDOWS  # the rank has begun to write over the second one
    assert [one.first for one in reader.times.new()] == [0]


def test_a_page_full_of_nonsense_is_no_report(reader: HeartbeatReader) -> None:
    page = HeartbeatPage.open(reader.path)
    page.section("forward")
    bad = (float("nan"), float("inf"), -1.0, 1e300)
    rows = tuple(Times(place, Kind.OTHER, 1, one, 1, 1, 1, 1) for place, one in enumerate(bad))
    for end in (-1, 1 << 60):
        page.times.write(Window(-5, end, rows))
        assert reports(reader).look(0.0) is None
    page.times.write(Window(0, 1, rows))
    assert [one.sections for one in reported(reader)] == [()]


def test_many_nodes_report_less_often(reader: HeartbeatReader, page: HeartbeatPage) -> None:
    times = reports(reader, nodes=1000)
    trained(page, range(1, 6), 0.15)
    assert times.look(100.0) is not None
    trained(page, range(6, 10), 0.15)
    assert times.look(101.0) is None
    assert times.look(151.0) is not None


def test_timing_that_fails_ends_and_training_goes_on(
    page: HeartbeatPage, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        steps = SIZE

        def write(self, _: Window) -> None:
            raise OSError("no space")

    page.times = Broken()  # type: ignore[assignment]
    trained(page, range(1, 14))
    assert page.stepped is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[outlast]")
    assert line.endswith("no space")


def test_a_fork_of_the_rank_measures_nothing(reader: HeartbeatReader, page: HeartbeatPage) -> None:
    trained(page, range(1, 4))
    assert isinstance(page.stepped.__self__, Windows)  # type: ignore[union-attr]
    page.stepped.__self__._pid = -1  # type: ignore[union-attr]
    page.heartbeat(4)
    assert page.stepped is None


# The product


@pytest.fixture
def with_product(reader: HeartbeatReader, page: HeartbeatPage) -> Callable[[], RankWindow]:
    """Return what trains with the product between two steps, and reports all windows as one."""

    def train() -> RankWindow:
        trained(page, range(1, 7))
        compute(page)
        trained(page, range(7, 14))
        return joined(reported(reader))

    return train


def test_the_agent_reads_how_long_products_took(with_product: Callable[[], RankWindow]) -> None:
    state = torch.get_rng_state()
    found = with_product()
    product = section(found, BENCHMARK)
    assert product.kind is Kind.COMPUTE
    assert 1 < product.count <= 1 + ENTRIES
    assert 0 < product.median <= product.p90 <= product.longest
    assert section(found, "step").longest < product.total, "it is no part of a step"
    assert torch.equal(torch.get_rng_state(), state)


def test_training_goes_on_after_a_product_that_cannot_be_computed(
    with_product: Callable[[], RankWindow], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_device("meta")
    try:
        found = with_product()
    finally:
        torch.set_default_device(None)
    assert section(found, "forward").count > 5
    assert section(found, BENCHMARK).count == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[outlast]")
    assert "meta" in line
