"""Simulated telemetry as a source; the scenario of silence blocks as a driver that hangs would."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outlast.health.policy import simulation
from outlast.health.policy.simulation import Scenario
from outlast.health.policy.telemetry import Sample

_FOR_EVER = 1e9  # seconds


class Simulated:
    """Samples of a scenario that begins with the first call.

    Args:
        scenario: what happens.
        node: name of the node.
        begun: monotonic seconds at which it began in an earlier collector; 0: it begins now.
    """

    name = "NVML"
    starting = False

    def __init__(self, scenario: Scenario, node: str, begun: float) -> None:
        self._scenario = scenario
        self._node = node
        self._begun = begun or time.monotonic()
        self._before = time.monotonic() - begun if begun else -1.0
        self.doing = (0, "")

    def sample(self, now: float) -> Sequence[Sample]:
        """Return the samples of this moment; from the second of a silence on the call does not return."""
        elapsed = time.monotonic() - self._begun
        self.doing = (self.doing[0] + 1, f"device {self._scenario.device}, temperature (simulated)")
        if simulation.silent(self._scenario, elapsed):
            time.sleep(_FOR_EVER)
        found = simulation.samples(self._scenario, self._node, elapsed, self._before, now)
        self._before = elapsed
        return found
