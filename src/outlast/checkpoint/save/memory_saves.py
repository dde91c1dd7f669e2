"""After which steps a state is saved in memory.

Rank 0 measures the time of a step and of a save in memory and chooses the interval. The ranks take it over
after the first, second, fourth, ... save in memory of a generation, so the agreement costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outlast.checkpoint.policy.cadence import FIRST_STEPS, best_steps, fault_rate
from outlast.checkpoint.save.buffers import current_device
from outlast.ports import Exchange

_NEWEST = 0.5  # weight of the newest measurement of a save


class MemorySaves:
    """Decides whether a step is saved in memory.

    Args:
        interval: steps between two such saves; None: chosen by cost and fault rate.
        restarts: of this job so far.
        timeout: seconds that ranks wait for each other.
        began: when this process began to train; monotonic seconds.
    """

    def __init__(self, interval: int | None, restarts: int, timeout: float, began: float) -> None:
        self._fixed = interval is not None
        self.steps = FIRST_STEPS if interval is None else interval
        self._restarts = restarts
        self._timeout = timeout
        self._began = began
        self._cost: float | None = None
        self._saves = 0
        self._training = 0.0
        self._trained = 0

    def due(self, step: int) -> str:
        """Return why the state after a step is saved in memory; empty: it is not."""
        return f"memory every {self.steps} steps" if step > 0 and step % self.steps == 0 else ""

    def trained(self, seconds: float) -> None:
        """Take in the duration of a step."""
        self._training += seconds
        self._trained += 1

    def settle(self, clock: Callable[[], float]) -> float:
        """Return the time from which the cost of a save is counted.

        If the cost will be used, the device first finishes the work of training. The first copy would wait
        for that work, whose time would count as the save's; now it counts as the training's.

        Args:
            clock: monotonic seconds.
        """
        began = clock()
        if self._fixed or (self._saves + 1) & self._saves or current_device() is None:
            return began
        torch.cuda.synchronize()
        now = clock()
        self._training += now - began
        return now

    def saved(self, seconds: float, exchange: Exchange, now: float) -> None:
        """Take in the duration of a save in memory; after some of them all ranks agree on the interval."""
        self._saves += 1
        if self._fixed or self._saves & (self._saves - 1):
            return
        text = ""
        if exchange.rank == 0:
            before = seconds if self._cost is None else self._cost
            self._cost = _NEWEST * seconds + (1 - _NEWEST) * before
            rate = fault_rate(self._restarts, now - self._began)
            text = str(best_steps(self._cost, self._training / max(self._trained, 1), rate))
        self.steps = int(exchange.gather("schedule", text, self._timeout)[0])
        self._training, self._trained = 0.0, 0
