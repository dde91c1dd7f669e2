"""Detectors of other packages: what they report is checked, and none of them stops the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outlast import plugins
from outlast.launcher import detectors
from outlast.launcher.detectors import Registered
from outlast.ports import NodeView, RankView
from outlast.recovery.policy.events import Fault
from tests.support.launching import until
from tests.support.plugging import install

NODE = NodeView("n1", 3, 7, (RankView(4, 100, 7),))
CALLED = threading.Event()


class Scripted:
    """A detector whose one call does what a test says."""

    name = "scripted"
    does: Callable[[NodeView], Sequence[Fault]] = staticmethod(lambda node: ())

    def poll(self, now: float, node: NodeView) -> Sequence[Fault]:
        CALLED.set()
        return type(self).does(node)

    def deadline(self, now: float) -> float:
        return now


@pytest.fixture
def scripted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[NodeView], object]], tuple[Registered, list[str]]]:
    install(tmp_path, plugins.DETECTORS, "scripted", f"from {__name__} import Scripted\n", "Scripted")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(detectors, "_LOOK_EVERY", 0.01)
    CALLED.clear()

    def begin(does: Callable[[NodeView], object]) -> tuple[Registered, list[str]]:
        monkeypatch.setattr(Scripted, "does", staticmethod(does))
        notes: list[str] = []
        return Registered(notes.append), notes

    return begin


def first_fault(registered: Registered, node: NodeView) -> Fault:
    found: Sequence[Fault] = until(lambda: registered.poll(50.0, node), "a fault")
    registered.close()
    return found[0]


def test_a_fault_is_of_the_node_the_moment_and_the_detector(scripted: Callable[..., object]) -> None:
    registered, _ = scripted(lambda node: [replace(node.fault("hot", rank=4), node="another")])
    found = first_fault(registered, NODE)
    assert (found.node, found.rank, found.generation, found.step, found.since) == ("n1", 4, 3, 7, 50.0)
    assert found.evidence == (("detector", "scripted"),)


def test_a_fault_of_an_older_generation_is_dropped(scripted: Callable[..., object]) -> None:
    younger = replace(NODE, generation=4)
    registered, _ = scripted(
        lambda node: [replace(NODE, step=node.generation).fault("old"), younger.fault("new")]
    )
    assert first_fault(registered, younger).reason == "new"


@pytest.mark.parametrize(
    ("does", "named"),
    [
        (lambda node: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda node: ["hot"], "TypeError: "),
        (lambda node: time.sleep(60.0), " 0 s"),
    ],
    ids=["raises", "no-fault", "hangs"],
)
def test_a_detector_that_fails_is_disabled(
    does: Callable[[NodeView], object],
    named: str,
    scripted: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered, notes = scripted(does)
    until(lambda: registered.poll(time.monotonic(), NODE) or CALLED.is_set(), "a call")
    monkeypatch.setattr(detectors, "PATIENCE", 0.2 if "0 s" in named else detectors.PATIENCE)
    until(lambda: registered.poll(time.monotonic(), NODE) or notes, "a note")
    assert [("scripted" in note, named in note) for note in notes] == [(True, True)]
    assert registered.deadline(0.0) == float("inf")
