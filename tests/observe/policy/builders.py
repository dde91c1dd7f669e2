"""Records, views and pieces of logs for the tests of the policies of observe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outlast.observe.policy import page
from outlast.observe.policy.goodput import Ledger
from outlast.observe.policy.now import Now, NowFold
from outlast.observe.policy.page import History, View
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    FirstStep,
    GenerationStarted,
    Loaded,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
)

DATA = Path(__file__).parent.parent / "data"
EPOCH = 1_795_000_000.0
START = RunStarted(10.0, 10.0, 1, "id", "n0", 7, "boot", ("train.py",), 4, "a new run")


def told_now(*records: Record, node: str = "") -> Now:
    """Return what a run does after some records."""
    told = NowFold()
    for record in records:
        told.take(record, node)
    return told.now()


def viewed(*records: Record, node: str = "", most: int = page.MOST_RECORDS) -> View:
    """Return the content of the page after some records."""
    history = History(most)
    for record in records:
        history.take(record, node)
    return history.view()


def seconds(ledger: Ledger) -> dict[str, float]:
    """Return the seconds of a ledger where there are some."""
    return {name.value: spent for name, spent in ledger.seconds.items() if spent}


def progress(clock: float, step: int, generation: int = 1, source: str = "session") -> Progress:
    return Progress(clock, clock, generation, step, source)


@dataclass
class Line:
    """Makes records at seconds after the start of one launch."""

    generation: int = 1

    def at(self, after: float) -> tuple[float, float, int]:
        return EPOCH + after, 100.0 + after, self.generation

    def start(self, after: float = 0.0, boot_id: str = "boot") -> RunStarted:
        return RunStarted(*self.at(after), "job", "n01", 1, boot_id, (), 2, "a new run")

    def workers(self, after: float) -> GenerationStarted:
        return GenerationStarted(*self.at(after), 2, (1, 2), "zygote", "")

    def step(self, after: float, step: int = 1, **marks: float) -> FirstStep:
        return FirstStep(*self.at(after), step, {name: 100.0 + mark for name, mark in marks.items()})

    def fault(self, after: float, since: float, step: int = 10, kind: str = "crash") -> FaultSeen:
        return FaultSeen(*self.at(after), kind, "n01", 1, step, 100.0 + since, "died", "signal 9")

    def action(self, after: float, kind: str = "restart-in-job") -> ActionTaken:
        return ActionTaken(*self.at(after), kind, self.generation + 1, "newest", "because")

    def saved(self, after: float, step: int, spent: float = 0.0) -> Saved:
        return Saved(*self.at(after), step, f"c{step}", 1, spent, "due")

    def loaded(self, after: float, step: int, spent: float = 0.0) -> Loaded:
        return Loaded(*self.at(after), step, f"c{step}", 1, spent, "newest")

    def ended(self, after: float, exit_code: int = 0) -> RunEnded:
        return RunEnded(*self.at(after), 99, exit_code, "")
