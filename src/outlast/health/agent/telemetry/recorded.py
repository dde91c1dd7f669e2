"""Samples from a file, in the times between them."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from outlast.errors import UsageError
from outlast.health.policy import weighted
from outlast.health.policy.telemetry import (
    COLUMNS,
    DeviceSample,
    Notice,
    Sample,
    from_cells,
    from_fields,
    from_line,
    to_cells,
    to_line,
)

_BYTES = 1 << 30
_LINE = 1 << 16
_LARGEST = float(1 << 63)  # in a cell of gpu_metrics.csv


def is_table(path: Path) -> bool:
    """Say whether a file is a table, by its name."""
    return path.suffix.lower() == ".csv"


def read(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file.

    Args:
        path: JSON lines, or, by the suffix .csv, a table: gpu_metrics.csv, or samples with the names of their
            fields as columns, which are of devices where there is no column ``kind``.

    Raises:
        UsageError: the file cannot be read, or a line is no sample; says which.
    """
    try:
        if path.stat().st_size > _BYTES or not path.is_file():
            raise UsageError(f"{path}: a file of up to {_BYTES >> 30} GiB expected")
        with path.open(encoding="utf-8", newline="") as file:
            rows = _table(file) if is_table(path) else _lines(file)
            for number, make in rows:
                try:
                    yield make()
                except ValueError as error:
                    raise UsageError(f"{path}, line {number}: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def _lines(file: io.TextIOBase) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := file.readline(_LINE):
        number += 1
        if line.strip():
            yield number, lambda line=line: from_line(line)


def _table(file: io.TextIOBase) -> Iterator[tuple[int, Any]]:
    table = csv.DictReader(iter(lambda: file.readline(_LINE), ""))
    names = table.fieldnames or ()
    make: Callable[[Mapping[str, str | None]], Sample] = from_cells
    if set(weighted.METRICS) <= set(names):
        make = _FromMetrics().sample
    elif "time" not in names:
        raise UsageError(
            f"{getattr(file, 'name', 'the table')}: found the columns {', '.join(names)[:200]!r}, expected"
            f" those of gpu_metrics.csv ({', '.join(weighted.METRICS)}), or of samples (at least time, node,"
            " index)"
        )
    for row in table:
        yield table.line_num, lambda row=row: make(row)


def write(samples: Iterable[Sample], file: TextIO, table: bool) -> int:
    """Write samples for :func:`read`, as a table or as lines of JSON, and return how many."""
    count = 0
    rows = csv.DictWriter(file, COLUMNS, lineterminator="\n") if table else None
    if rows is not None:
        rows.writeheader()
    for count, sample in enumerate(samples, 1):  # noqa: B007 - it is returned
        if rows is not None:
            rows.writerow(to_cells(sample))
        else:
            file.write(to_line(sample) + "\n")
    return count


class Recorded:
    """Replays a file: a sample is due as many seconds after the beginning as it is after the first sample.

    Args:
        path: the file.
        node: name of this node, under which samples of any node are replayed.
        begun: monotonic seconds at which an earlier collector began; what was due until now is skipped.
            0: the replay begins now.

    Raises:
        UsageError: the first line is no sample.
    """

    name = "replay"
    starting = False

    def __init__(self, path: Path, node: str, begun: float = 0.0) -> None:
        self._samples = read(path)
        self._path = path
        self._node = node
        self._next: Sample | None = next(self._samples, None)
        self._first = 0.0 if self._next is None else self._next.time
        self._begun = begun or time.monotonic()
        self._over = False
        self.doing = (0, "")
        if begun:
            self.sample(0.0)

    def sample(self, now: float) -> Sequence[Sample]:
        """Return what is due, with the present time."""
        elapsed = time.monotonic() - self._begun
        self.doing = (self.doing[0] + 1, str(self._path))
        found: list[Sample] = []
        try:
            while self._next is not None and self._next.time - self._first <= elapsed:
                found.append(replace(self._next, time=now, node=self._node))
                self._next = next(self._samples, None)
        except UsageError as error:
            self._next = None
            found.append(Notice(now, self._node, f"the replay ends: {error}"))
            self._over = True
        if self._next is None and not self._over:
            self._over = True
            found.append(Notice(now, self._node, f"the replay of {self._path} is over"))
        return found


class _FromMetrics:
    """Makes samples of the rows of gpu_metrics.csv, outlast's own or that project's.

    The rows have the errors within the window; where their number rises, so many uncorrected ECC errors have
    come. Driver and score are not taken over.
    """

    def __init__(self) -> None:
        self._errors: dict[int, tuple[int, int]] = {}  # those within the window, and all

    def sample(self, row: Mapping[str, str | None]) -> DeviceSample:
        """Return the sample of a row.

        Raises:
            ValueError: a cell cannot be; says which.
        """
        index = int(row.get("gpu_id") or "")
        busy, used, total = (_cell(row, name) for name in ("gpu_utilization", "memory_used", "memory_total"))
        errors = int(_cell(row, "errors") or 0)
        before, all_of_them = self._errors.get(index, (errors, errors))
        all_of_them += max(0, errors - before)
        self._errors[index] = (errors, all_of_them)
        values = {
            "time": _seconds(row.get("timestamp") or ""),
            "node": "",
            "index": index,
            "model": row.get("gpu_name") or "",
            "temperature": _cell(row, "temperature"),
            "power": _cell(row, "power_draw"),
            "utilization": None if busy is None else busy / 100,
            "memory_used": None if used is None else round(used * weighted.MIB),
            "memory_total": None if total is None else round(total * weighted.MIB),
            "ecc_uncorrected": all_of_them,
        }
        found = from_fields(DeviceSample, values)
        assert isinstance(found, DeviceSample)
        return found


def _cell(row: Mapping[str, str | None], name: str) -> float | None:
    text = row.get(name)
    value = float(text) if text else None
    if value is not None and not abs(value) < _LARGEST:
        raise ValueError(f"{name}: a number expected, {text!r:.80} found")
    return value


def _seconds(text: str) -> float:
    """Return the wall seconds of a time in words; without a zone it is in UTC, as this file is written."""
    found = datetime.fromisoformat(text.strip().replace("/", "-").replace("Z", "+00:00"))
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
