"""The oracle: whether a run with faults gave the same results as a run without.

It compares the results of two runs, one without faults and one with a scenario. It knows nothing of how a
recovery works, and has no tolerance: losses are compared as bits, samples by id, weights by digest. Steps
that were computed again after a fault must give the same bits each time.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SHOWN = 5  # differences of one sort that are spelt out; the rest is counted


@dataclass(frozen=True)
class Step:
    """One line of a trace: a step that one rank completed.

    Args:
        loss: the loss as ``float.hex`` writes it.
        ids: identities of the samples that the rank trained on.
        clock: monotonic seconds, 0 where the trace has none.
    """

    step: int
    loss: str
    ids: tuple[int, ...]
    clock: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Args:
        traces: the steps of each rank in the order in which they were completed, replays included.
        weights: digest of the final parameters, "" when the run did not write one.
        leftovers: processes and files that outlived the run, one phrase each.
    """

    traces: Mapping[int, Sequence[Step]]
    weights: str
    leftovers: tuple[str, ...] = ()

    def replayed(self) -> int:
        """Return how many steps rank 0 computed more than once."""
        steps = [line.step for line in self.traces.get(0, ())]
        return len(steps) - len(set(steps))


def steps_lost(traces: Mapping[int, Sequence[Step]], since: float, until: float) -> int:
    """Return how far the ranks fell back between two moments, in completed steps that came again."""
    most = 0
    for trace in traces.values():
        lines = [line for line in trace if line.clock < until]
        falls = [a.step + 1 - b.step for a, b in pairwise(lines) if b.clock >= since]
        most = max([most, *falls])
    return most


def read_traces(folder: Path) -> dict[int, tuple[Step, ...]]:
    """Read the files ``rank-NNNNN.jsonl`` of a folder.

    Raises:
        ValueError: a line is no step; names the file and the line.
    """
    traces: dict[int, tuple[Step, ...]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines: list[Step] = []
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                value = json.loads(text)
                line = Step(
                    int(value["step"]), str(value["loss"]), tuple(value["ids"]), value.get("clock", 0.0)
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a step of a trace ({error}): {text[:80]!r}"
                ) from error
            lines.append(line)
        traces[int(path.stem.removeprefix("rank-"))] = tuple(lines)
    return traces


def judge(reference: Outcome, run: Outcome, steps: int) -> tuple[str, ...]:
    """Return every difference between ``run`` and ``reference``; empty: the results are equal.

    Args:
        reference: the fault-free run; it must itself be whole, or nothing can be said.
        run: the run under faults.
        steps: steps that both were asked for.
    """
    problems = [f"the fault-free run is no reference: {problem}" for problem in _incomplete(reference, steps)]
    if len(set(map(len, reference.traces.values()))) > 1 or reference.replayed():
        problems.append("the fault-free run is no reference: it computed a step more than once")
    if problems:
        return tuple(problems)
    problems += _incomplete(run, steps)
    problems += _unequal_steps(reference, run)
    problems += _unequal_samples(reference, run)
    if run.weights != reference.weights:
        problems.append(f"final weights: {_short(run.weights)}, without faults {_short(reference.weights)}")
    problems += [f"still there: {what}" for what in run.leftovers]
    return tuple(problems)


def _incomplete(outcome: Outcome, steps: int) -> list[str]:
    problems = [] if outcome.traces else ["no rank left a trace"]
    wanted = set(range(steps))
    for rank, trace in sorted(outcome.traces.items()):
        found = {line.step for line in trace}
        if missing := sorted(wanted - found):
            problems.append(
                f"rank {rank}: {len(missing)} of {steps} steps missing, the first is {missing[0]}"
            )
        if extra := sorted(found - wanted):
            problems.append(f"rank {rank}: step {extra[-1]} of a run of {steps} steps")
    if not outcome.weights:
        problems.append("no final weights")
    return problems


def _unequal_steps(reference: Outcome, run: Outcome) -> list[str]:
    """Compare every execution of every step, replays included, with the reference's."""
    problems: list[str] = []
    if run.traces.keys() != reference.traces.keys():
        problems.append(f"ranks {sorted(run.traces)}, without faults {sorted(reference.traces)}")
    losses: list[str] = []
    samples: list[str] = []
    for rank, trace in sorted(run.traces.items()):
        expected = {line.step: line for line in reference.traces.get(rank, ())}
        executions: Counter[int] = Counter()
        for line in trace:
            executions[line.step] += 1
            other = expected.get(line.step)
            if other is None:
                continue
            what = f"rank {rank}, step {line.step}, execution {executions[line.step]}"
            if line.loss != other.loss:
                losses.append(f"{what}: loss {line.loss}, without faults {other.loss}")
            if line.ids != other.ids:
                samples.append(f"{what}: samples {list(line.ids)}, without faults {list(other.ids)}")
    return problems + _first(losses, "losses differ") + _first(samples, "batches differ")


def _unequal_samples(reference: Outcome, run: Outcome) -> list[str]:
    """Compare which samples the kept steps trained on, however they were spread over ranks."""
    expected, found = _kept_samples(reference), _kept_samples(run)
    lost, doubled = expected - found, found - expected
    problems = [f"sample {sample} was trained on {count} time(s) too few" for sample, count in lost.items()]
    problems += [
        f"sample {sample} was trained on {count} time(s) too often" for sample, count in doubled.items()
    ]
    return _first(problems, "samples differ")


def _kept_samples(outcome: Outcome) -> Counter[int]:
    kept = {(rank, line.step): line.ids for rank, trace in outcome.traces.items() for line in trace}
    return Counter(sample for ids in kept.values() for sample in ids)


def _first(problems: list[str], what: str) -> list[str]:
    if len(problems) <= SHOWN:
        return problems
    return [*problems[:SHOWN], f"{what} in {len(problems) - SHOWN} more places"]


def _short(digest: str) -> str:
    return digest[:16] or "none"
