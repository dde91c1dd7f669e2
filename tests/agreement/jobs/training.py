"""Ranks as threads that train steps of their own lengths, and are held at a gate before the end of one."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

PATIENCE = 60.0


class Trainee(ABC):
    """A rank.

    Args:
        seconds: the length of each step.
        gate: number of the step before whose end it waits until :func:`open_gate`; -1: none.
    """

    def __init__(self, seconds: Sequence[float], gate: int = -1) -> None:
        self.seconds, self.gate = seconds, gate
        self.completed = 0
        self.at_gate, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._train)

    @abstractmethod
    def begin(self) -> None:
        """Begin the loop."""

    @abstractmethod
    def after(self, step: int) -> None:
        """Be after a step."""

    @abstractmethod
    def end(self) -> None:
        """Leave the loop."""

    def _train(self) -> None:
        self.begin()
        try:
            for step, seconds in enumerate(self.seconds, 1):
                if step == self.gate:
                    self.at_gate.set()
                    assert self.go_on.wait(PATIENCE)
                time.sleep(seconds)
                self.completed = step
                self.after(step)
        finally:
            self.end()


def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def all_at_gate(ranks: Sequence[Trainee]) -> None:
    """Wait until all ranks are there: what is asked for now is heard before any has done its steps."""
    for rank in ranks:
        assert rank.at_gate.wait(PATIENCE)


def open_gate(*ranks: Trainee) -> None:
    for rank in ranks:
        rank.go_on.set()


@contextlib.contextmanager
def started(*ranks: Trainee) -> Iterator[None]:
    """Let ranks train, and wait for their ends."""
    for rank in ranks:
        rank.thread.start()
    yield
    for rank in ranks:
        rank.thread.join(PATIENCE)
        assert not rank.thread.is_alive(), f"waits after step {rank.completed}"
