"""What every test shares: the seed of this run, printed, and Hypothesis under that seed's rules."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Generator, Iterator
from contextlib import nullcontext

import pytest
from hypothesis import settings

from tests.support.leftovers import nothing_left, set_apart
from tests.support.opened import closed_at_end

set_apart()

LAUNCHED = {"scenarios", "jobs", "adversary", "chaos", "transcripts"}
MAY_MISS = os.environ.get("TESTS_MAY_MISS", "").split()  # words of the only reasons to skip a test; none: any
SEED_VARIABLE = "OUTLAST_TEST_SEED"
if os.environ.get(SEED_VARIABLE) == "random":
    os.environ[SEED_VARIABLE] = str(random.SystemRandom().randrange(2**32))  # the same for parallel workers
EXPLORES = bool(os.environ.get(SEED_VARIABLE))
SEED = int(os.environ.get(SEED_VARIABLE) or 0)

# Started in the background by a shell, or by nohup, this process ignores these, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A change is judged by the same draws as the one before it; a search for new ones is asked for.
# No deadline: on a busy machine it measures the neighbours. The blob reproduces a failing example anywhere.
settings.register_profile("outlast", deadline=None, print_blob=True, derandomize=not EXPLORES)
settings.load_profile("outlast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", help="write what is printed into them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts jobs, and put it first: it mostly waits, while the rest fills the processors."""
    for item in items:
        if LAUNCHED.intersection(item.path.parts):
            item.add_marker("launched")
    items.sort(key=lambda item: item.get_closest_marker("launched") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped for another reason than those that are allowed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not may_be_skipped(report):
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that is skipped."""
    report = yield
    if report.skipped and not may_be_skipped(report):
        report.outcome = "failed"
    return report


def may_be_skipped(report: pytest.TestReport | pytest.CollectReport) -> bool:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return not MAY_MISS or any(one in reason for one in MAY_MISS)


@pytest.fixture(autouse=True, scope="class")
def nothing_left_by_all(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a class whose tests share processes if they are there afterwards."""
    with nothing_left() if request.node.get_closest_marker("shares") else nullcontext():
        yield


@pytest.fixture(autouse=True)
def nothing_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the checkpointers and end the savers of a test that stands for a job which ended or died.

    What is there after that has been left behind: processes, shared memory, temporary files.
    """
    meant = [word for mark in request.node.iter_markers("leaves") for word in mark.args]
    shares = request.node.get_closest_marker("shares")
    with nullcontext() if shares else nothing_left(*meant), closed_at_end():
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return a seed of the test's own, drawn from the run's and its name; shown when the test fails."""
    drawn = random.Random(f"{SEED}:{request.node.nodeid}").randrange(2**32)
    print(f"{SEED_VARIABLE}={SEED} gives this test the seed {drawn}")
    return drawn


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{SEED_VARIABLE}={SEED} repeats the draws of this run")
