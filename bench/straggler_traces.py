"""straggler_traces: which ranks of a ByteDance trace are named, by outlast and by NVRx's formula.

A trace is a parquet file of github.com/ByteDance-Seed/StragglerAnalysis (Apache-2.0), one row an operation.
Reading one needs pyarrow. ``--write`` leaves the windows for the tests (tests/stragglers/data).

    python bench/straggler_traces.py trace-AR.parquet --steps 4 --write AR.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.nvrx import Kernel, below, gpu_score, relative_references
from outlast.stragglers.policy.rows import Kind, Place, Row, State

COMPUTE = ("forward-compute", "backward-compute", "optimizer")
KERNELS = ("forward-compute", "backward-compute")  # what NVRx would time; collectives it leaves out
NVRX_THRESHOLDS = (0.70, 0.75)  # of Bridge and NeMo, and of NVRx itself
MICRO = 1e6


def kind_of(operation: str) -> Kind:
    """Return what an operation is: the rest are collectives, transfers, and the norm over all ranks."""
    return Kind.COMPUTE if operation in COMPUTE else Kind.OTHER if operation == "gc" else Kind.COMMUNICATION


def read(path: Path, steps: int) -> dict[str, Any]:
    """Return the windows of a trace: of so many traced steps each, times in whole microseconds."""
    from pyarrow import parquet

    names = ["rank", "stage", "step", "optype", "duration"]
    columns = parquet.read_table(path, columns=names).to_pydict()
    windows = {step: at // steps for at, step in enumerate(sorted(set(columns["step"])))}
    taken: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    stages = {}
    for rank, stage, step, operation, duration in zip(*(columns[name] for name in names), strict=True):
        taken[windows[step], rank, operation].append(duration)
        stages[rank] = stage
    operations = sorted({operation for _, _, operation in taken})
    rows = []
    for (window, rank, operation), durations in sorted(taken.items()):
        ordered = sorted(durations)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        figures = (statistics.median(ordered), p90, ordered[-1], math.fsum(ordered))
        micro = [round(one * MICRO) for one in figures]
        rows.append([window, rank, operations.index(operation), len(ordered), *micro])
    return {"steps": steps, "operations": operations, "stages": sorted(stages.items()), "rows": rows}


def windows(trace: Mapping[str, Any]) -> tuple[dict[int, list[Row]], dict[int, Place]]:
    """Return the rows of each window, and the places of the ranks."""
    found: dict[int, list[Row]] = defaultdict(list)
    for window, rank, operation, count, *micro in trace["rows"]:
        name = trace["operations"][operation]
        kind = kind_of(name)
        median, p90, longest, total = (one / MICRO for one in micro)
        waiting = math.nan if kind is Kind.COMMUNICATION else 0.0
        found[window].append(Row(rank, name, kind, window, count, median, p90, longest, total, waiting))
    return dict(found), {rank: Place(rank, "", stage=stage) for rank, stage in trace["stages"]}


def named_by_outlast(trace: Mapping[str, Any]) -> dict[int, str]:
    """Return the ranks that were ever found slow, each with the first reason."""
    decider = Straggling(trace["steps"])
    rows, places = windows(trace)
    found: dict[int, str] = {}
    for window in sorted(rows):
        for verdict in decider.observe(window, rows[window], places, float(window)):
            if verdict.state is State.ON:
                found.setdefault(verdict.rank, verdict.reason)
    return found


def scores_of_nvrx(trace: Mapping[str, Any]) -> dict[int, float]:
    """Return the relative GPU scores of the whole trace by NVRx's formula, from its windows' medians."""
    medians: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    weights: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in (row for rows in windows(trace)[0].values() for row in rows if row.section in KERNELS):
        medians[one.rank][one.section].append(one.median)
        weights[one.rank][one.section] += one.total
    kernels = {
        rank: {name: Kernel(statistics.median(some), weights[rank][name]) for name, some in of_rank.items()}
        for rank, of_rank in medians.items()
    }
    references = relative_references(
        [{name: kernel.median for name, kernel in one.items()} for one in kernels.values()]
    )
    return {rank: gpu_score(one, references) for rank, one in sorted(kernels.items())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read traces and print who is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=2, help="traced steps of a window (default: 2)")
    parser.add_argument("--write", type=Path, help="write the windows of the one trace to this file")
    options = parser.parse_args(arguments)
    for path in options.traces:
        trace = read(path, options.steps)
        print(f"{path.name}: {len(trace['stages'])} ranks, {trace['rows'][-1][0] + 1} windows")
        for rank, reason in named_by_outlast(trace).items():
            print(f"  outlast: {rank}: {reason}")
        scores = scores_of_nvrx(trace)
        for threshold in NVRX_THRESHOLDS:
            print(f"  NVRx's formula below {threshold:.2f}: {below(scores, threshold)}")
        if options.write:
            text = json.dumps(trace, separators=(",", ":"))
            options.write.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
