"""Figures of a benchmark: the machine, the summary, and the output files."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def surroundings(seed: int, **versions: str) -> dict[str, Any]:
    """Return the conditions of a measurement: versions, processors, load, seed."""
    import outlast

    return {
        "record": "surroundings",
        "seed": seed,
        "outlast": outlast.__version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "loadavg": os.getloadavg(),
        **versions,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return count, median, 99th percentile (nearest rank), least and greatest."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "min": ordered[0],
        "max": ordered[-1],
    }


def abba(names: Sequence[str], rounds: int) -> list[str]:
    """Return the names in turn, every second time backwards, so that a drift affects all equally."""
    order: list[str] = []
    for number in range(rounds):
        order += names if number % 2 == 0 else reversed(names)
    return order


class Lines:
    """A file of JSON lines, or nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
