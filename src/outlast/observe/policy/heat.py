"""Heat maps: a row for each rank or device that stands out most, a column for each stretch of the log."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outlast.recovery.policy.events import StepTimes, Telemetry

_MOST_READINGS = 50_000  # of devices that are kept; a heat map has less than a hundredth as many columns


@dataclass(frozen=True)
class Heat:
    """A heat map.

    Args:
        rows: what each row is about.
        cells: of each row, the largest value of each column; NaN: there was none.
        worst: the largest value of each row.
        left_out: rows beyond those that are shown; none of them was larger.
        first, last: where the first column begins and the last one ends: a step, or wall seconds.
    """

    rows: tuple[str, ...] = ()
    cells: tuple[tuple[float, ...], ...] = ()
    worst: tuple[float, ...] = ()
    left_out: int = 0
    first: float = 0.0
    last: float = 0.0


def of_steps(times: Sequence[StepTimes], most_rows: int, most_columns: int) -> Heat:
    """Return how long ranks were busy in a step against the median of all ranks.

    Args:
        times: in the order of the log; ratios of what is no rank are left out.
        most_rows: ranks to show: those that were the furthest above the median.
        most_columns: each is one record, or several.
    """
    each = max(1, math.ceil(len(times) / most_columns))
    columns = [_hottest(times[at : at + each]) for at in range(0, len(times), each)]
    worst: dict[int, float] = {}
    for column in columns:
        for rank, ratio in column.items():
            worst[rank] = max(worst.get(rank, 0.0), ratio)
    chosen = sorted(sorted(worst, key=lambda one: (-worst[one], one))[:most_rows])
    return Heat(
        rows=tuple(f"rank {rank}" for rank in chosen),
        cells=tuple(tuple(column.get(rank, math.nan) for column in columns) for rank in chosen),
        worst=tuple(worst[rank] for rank in chosen),
        left_out=len(worst) - len(chosen),
        first=times[0].step if times else 0.0,
        last=times[-1].step if times else 0.0,
    )


def _hottest(records: Iterable[StepTimes]) -> dict[int, float]:
    found: dict[int, float] = {}
    for record in records:
        for name, ratio in record.ratios.items():
            if name.isascii() and name.isdigit() and len(name) < 10 and math.isfinite(ratio):
                found[int(name)] = max(found.get(int(name), 0.0), ratio)
    return found


class Temperatures:
    """Keeps the temperatures of all devices, from the telemetry of a log."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, str, float]] = deque(maxlen=_MOST_READINGS)

    def take(self, record: Telemetry) -> None:
        """Take the next record; one without a temperature changes nothing."""
        degrees = record.values.get("temperature", math.nan)
        if record.what == "device" and math.isfinite(degrees) and math.isfinite(record.time):
            self._readings.append((record.time, f"{record.node} GPU {record.device}", degrees))

    def heat(self, most_rows: int, most_columns: int) -> Heat:
        """Return the temperatures in degrees Celsius of the hottest devices over wall time."""
        if not self._readings:
            return Heat()
        times = [time for time, _, _ in self._readings]
        first, last = min(times), max(times)
        width = (last - first) / most_columns
        found: dict[str, dict[int, float]] = {}
        for time, name, degrees in self._readings:
            at = min(most_columns - 1, int((time - first) / width)) if width else 0
            row = found.setdefault(name, {})
            row[at] = max(row.get(at, -math.inf), degrees)
        return _shaped(found, most_rows, most_columns if width else 1, (first, last))


def _shaped(
    found: Mapping[str, Mapping[int, float]], most_rows: int, columns: int, span: tuple[float, float]
) -> Heat:
    worst = {name: max(row.values()) for name, row in found.items()}
    chosen = sorted(sorted(worst, key=lambda one: (-worst[one], one))[:most_rows])
    return Heat(
        rows=tuple(chosen),
        cells=tuple(tuple(found[name].get(at, math.nan) for at in range(columns)) for name in chosen),
        worst=tuple(worst[name] for name in chosen),
        left_out=len(worst) - len(chosen),
        first=span[0],
        last=span[1],
    )
