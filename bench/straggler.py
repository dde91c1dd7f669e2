"""straggler: time of a report, false alarms against spread, cost of a section.

Simulated ranks: each window of a rank has the times of SECTIONS sections. The same windows go to outlast's
decider and to NVRx's relative score (its formula in ``stragglers/policy/nvrx``, without its transport).

- report: seconds that the decider takes for the windows of all ranks, in pipeline stages of equal size
- spread: healthy ranks whose windows differ by a standard deviation. NVRx: share of reports that name
  somebody. outlast: alarms, and in how many windows
- section: nanoseconds of an entry

    python bench/straggler.py report spread section --out straggler.jsonl
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from peers import figures

from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage
from outlast.stragglers.policy.detector import Straggling
from outlast.stragglers.policy.nvrx import below, relative_references, section_scores
from outlast.stragglers.policy.rows import Kind, Place, Row, State

STEPS = 4
SECTIONS = 8
SIZES = ((512, 1), (512, 8), (4096, 1), (4096, 8), (4096, 512))  # ranks, stages
WINDOWS = 12
SPREADS = (0.005, 0.01, 0.02, 0.05, 0.10)
SPREAD_RANKS = (8, 64, 512, 4096)
RANK_WINDOWS = 100_000  # looked at for each spread and number of ranks; at least 20 windows
NVRX_THRESHOLDS = (0.70, 0.75)
ENTRIES = 20_000


def places(ranks: int, stages: int) -> dict[int, Place]:
    """Return ranks in consecutive stages, eight on a node."""
    return {rank: Place(rank, f"n{rank // 8}", stage=rank * stages // ranks) for rank in range(ranks)}


def window(number: int, ranks: int, sections: int, spread: float, draw: random.Random) -> list[Row]:
    """Return the rows of healthy ranks; the last section is a collective in which they wait."""
    rows = []
    for rank in range(ranks):
        for section in range(sections):
            total = STEPS * 0.1 * max(draw.gauss(1, spread), 0.01)
            collective = sections > 1 and section == sections - 1
            kind, waiting = (Kind.COMMUNICATION, 0.9 * total) if collective else (Kind.COMPUTE, 0.0)
            each = total / STEPS
            rows.append(Row(rank, f"s{section}", kind, number, STEPS, each, each, each, total, waiting))
    return rows


def report_times(seed: int) -> Iterator[dict[str, Any]]:
    """Yield what the decider takes for a window."""
    for ranks, stages in SIZES:
        draw, decider, where = random.Random(seed), Straggling(STEPS), places(ranks, stages)
        wall, cpu = [], []
        for number in range(WINDOWS):
            rows = window(number, ranks, SECTIONS, 0.01, draw)
            gc.collect()
            began, began_cpu = time.perf_counter(), time.process_time()
            decider.observe(number, rows, where, number * 1.0)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - began_cpu)
        yield {
            "record": "report",
            "ranks": ranks,
            "stages": stages,
            "sections": SECTIONS,
            "first_ms": wall[0] * 1e3,
            "ms": {
                name: one * 1e3 for name, one in (("least", min(wall)), ("median", statistics.median(wall)))
            },
            "cpu_ms": {
                name: one * 1e3 for name, one in (("least", min(cpu)), ("median", statistics.median(cpu)))
            },
        }


def false_alarms(seed: int) -> Iterator[dict[str, Any]]:
    """Yield how often healthy ranks are named."""
    for ranks in SPREAD_RANKS:
        for spread in SPREADS:
            draw, decider, where = random.Random(seed), Straggling(STEPS), places(ranks, 1)
            windows, alarms = max(20, RANK_WINDOWS // ranks), 0
            reports = dict.fromkeys(NVRX_THRESHOLDS, 0)
            for number in range(windows):
                rows = window(number, ranks, 1, spread, draw)
                told = decider.observe(number, rows, where, number * 1.0)
                alarms += sum(one.state is State.ON for one in told)
                times = [{"s0": row.median} for row in rows]
                references = relative_references(times)
                scores = {rank: section_scores(one, references)["s0"] for rank, one in enumerate(times)}
                for threshold in NVRX_THRESHOLDS:
                    reports[threshold] += bool(below(scores, threshold))
            yield {
                "record": "spread",
                "ranks": ranks,
                "spread": spread,
                "windows": windows,
                "outlast_alarms": alarms,
                **{f"nvrx_reports_{threshold:.2f}": named / windows for threshold, named in reports.items()},
            }


def section_costs(_: int) -> Iterator[dict[str, Any]]:
    """Yield the nanoseconds of an entry of a section, each the least of several batches."""
    from outlast.compat.straggler import Detector

    Detector.initialize()
    page = HeartbeatPage(bytearray(PAGE_BYTES))
    ours, empty = page.section("step"), nullcontext()
    sections: dict[str, Callable[[], Any]] = {
        "an empty context manager": lambda: empty,
        "session.section, kept": lambda: ours,
        "outlast.compat.straggler, with its name": lambda: Detector.detection_section("step"),
        "outlast.compat.straggler, without a name": Detector.detection_section,
    }
    for name, section in sections.items():
        batches = []
        for _ in range(10):
            began = time.perf_counter_ns()
            for _ in range(ENTRIES):
                with section():
                    pass
            batches.append((time.perf_counter_ns() - began) / ENTRIES)
        yield {"record": "section", "what": name, "ns": min(batches), "median_ns": statistics.median(batches)}
    Detector.shutdown()


MEASURES: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "report": report_times,
    "spread": false_alarms,
    "section": section_costs,
}


def line(record: dict[str, Any]) -> str:
    """Return a record as text."""
    if record["record"] == "report":
        size = f"{record['ranks']:5} ranks, {record['stages']:3} stages, {record['sections']} sections"
        ms, cpu = record["ms"], record["cpu_ms"]
        return (
            f"report   {size}: {ms['least']:6.1f} ms, median {ms['median']:6.1f}, "
            f"first {record['first_ms']:6.1f}; processor {cpu['least']:6.1f}, median {cpu['median']:6.1f}"
        )
    if record["record"] == "spread":
        nvrx = ", ".join(
            f"{record[f'nvrx_reports_{threshold:.2f}']:7.1%} below {threshold:.2f}"
            for threshold in NVRX_THRESHOLDS
        )
        return (
            f"spread   {record['ranks']:5} ranks, {record['spread']:5.1%}: "
            f"outlast {record['outlast_alarms']} alarms in {record['windows']} windows; "
            f"NVRx's formula names somebody in {nvrx} of the reports"
        )
    return f"section  {record['what']}: {record['ns']:.0f} ns, median {record['median_ns']:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", default=list(MEASURES), help=f"of {', '.join(MEASURES)}; default all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    if unknown := set(options.what) - MEASURES.keys():
        parser.error(f"{min(unknown)!r} is none of {', '.join(MEASURES)}")
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(options.seed))
    for name in options.what:
        for record in MEASURES[name](options.seed):
            lines.write(record)
            figures.say(line(record))


if __name__ == "__main__":
    main()
