"""Three traces of real jobs (tests/stragglers/data): the true straggler is found, and no other."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.nvrx import below
from outlast.stragglers.policy.rows import Kind, Place, Row, State, Verdict

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "stragglers" / "data"


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    """Return bench/straggler_traces.py."""
    spec = importlib.util.spec_from_file_location("straggler_traces", ROOT / "bench" / "straggler_traces.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["straggler_traces"] = module
    spec.loader.exec_module(module)
    return module


def trace(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return found


def merged(rows: dict[int, list[Row]], steps: int) -> dict[int, list[Row]]:
    """Return windows of so many steps; the medians are those of the windows' medians."""
    parts: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for window, some in rows.items():
        for row in some:
            parts[window // steps, row.rank, row.section].append(row)
    found = defaultdict(list)
    for (window, _, _), some in parts.items():
        whole = replace(
            some[0],
            window=window,
            count=sum(one.count for one in some),
            median=sorted(one.median for one in some)[len(some) // 2],
            p90=max(one.p90 for one in some),
            longest=max(one.longest for one in some),
            total=math.fsum(one.total for one in some),
            waiting=math.fsum(one.waiting for one in some),
        )
        found[window].append(whole)
    return dict(found)


def watch(
    rows: dict[int, list[Row]], places: dict[int, Place], steps: int, seconds: float = 1.0
) -> list[Verdict]:
    decider = Straggling(steps)
    return [
        verdict
        for window in sorted(rows)
        for verdict in decider.observe(window, rows[window], places, window * seconds)
    ]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_rank_that_was_slowed_is_found_and_no_other(traces: ModuleType, steps: int) -> None:
    rows, places = traces.windows(trace("AR"))
    verdicts = watch(merged(rows, steps), places, steps)
    assert {(one.rank, one.section) for one in verdicts} == {(0, "forward-compute"), (0, "backward-compute")}
    for one in verdicts:
        assert (one.state, one.kind) == (State.ON, Kind.COMPUTE)
        assert one.confidence > 0.999
        # The authors' simulation of the job without it: 46.3 s for 23.5 s, 1.97.
        assert 1.9 < one.job_slowdown < 2.5
    assert places[0].stage == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_stage_with_more_work_is_no_straggler(traces: ModuleType, steps: int) -> None:
    rows, places = traces.windows(trace("ST"))
    assert not watch(merged(rows, steps), places, steps)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_rank_whose_pair_meets_earlier_than_the_others_is_not_late(traces: ModuleType, steps: int) -> None:
    """Sequences are of unequal length and the last stage is long; its windows are of two steps each."""
    rows, places = traces.windows(trace("SE"))
    assert len(places) == 64
    assert not watch(merged(rows, steps), places, 2 * steps)


def test_by_waiting_alone_the_same_rank_is_found_and_the_healthy_job_is_healthy(traces: ModuleType) -> None:
    """Only the collectives were timed: the culprit waits least."""
    for name, seconds, found in (("AR", 1.0, {(0, "")}), ("ST", 2.2, set())):
        rows, places = traces.windows(trace(name))
        for some in rows.values():
            some[:] = [one for one in some if one.kind is Kind.COMMUNICATION]
        verdicts = watch(rows, places, 1, seconds)
        assert {(one.rank, one.section) for one in verdicts} == found


def test_the_formula_of_nvrx_names_the_stage_with_more_work(traces: ModuleType) -> None:
    of_ar, of_st = traces.scores_of_nvrx(trace("AR")), traces.scores_of_nvrx(trace("ST"))
    assert below(of_ar, 0.7) == [0]
    assert below(of_st, 0.7) == [6, 7]
    assert below(of_st, 0.75) == [6, 7]


@pytest.mark.parametrize("factor", [1.15, 1.5])
@pytest.mark.parametrize("rank", [1, 2, 7])
def test_a_slowed_rank_of_the_healthy_job_is_found(traces: ModuleType, rank: int, factor: float) -> None:
    """Also if a rank has a single peer, and in a stage with more work."""
    rows, places = traces.windows(trace("ST"))
    for window, some in rows.items():
        if window >= 10:
            some[:] = [
                replace(one, total=one.total * factor)
                if one.rank == rank and one.section.endswith("-compute")
                else one
                for one in some
            ]
    found = {one.rank for one in watch(rows, places, 1)}
    assert found == {rank}


def test_what_the_benchmark_prints_is_of_the_same_rows(traces: ModuleType) -> None:
    assert list(traces.named_by_outlast(trace("AR"))) == [0]
    assert not traces.named_by_outlast(trace("ST"))
