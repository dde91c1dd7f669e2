"""What a run does now, as metrics in Prometheus' text format (version 0.0.4).

The names are stable: one is only ever added. Counters of faults and actions have a sample for each kind
from the start, since ``increase()`` does not see a series that begins at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outlast.observe.policy.now import Now, State
from outlast.recovery.policy.events import FaultKind, RecoveryAction

Sample = tuple[tuple[str, ...], float]  # values of the labels behind ``run``, and the value


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        name: with its unit; of a counter with ``_total``.
        kind: ``gauge`` or ``counter``.
        meaning: one sentence, the help text.
        samples: returns those of a run; none where the value is not known.
        labels: behind ``run``, which every sample has.
    """

    name: str
    kind: str
    meaning: str
    samples: Callable[[Now], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _one(value: float | None) -> list[Sample]:
    return [] if value is None else [((), value)]


def _known(value: float, known: bool) -> list[Sample]:
    return _one(value if known else None)


METRICS = (
    Metric(
        "outlast_run_state",
        "gauge",
        "1 for the state that the run is in, 0 for all others.",
        lambda now: [((one.value,), now.state is one) for one in State],
        ("state",),
    ),
    Metric(
        "outlast_step",
        "gauge",
        "Steps completed by the slowest rank.",
        lambda now: _known(now.step, now.step >= 0),
    ),
    Metric(
        "outlast_steps_planned",
        "gauge",
        "Steps after which the script's loop ends.",
        lambda now: _known(now.total, now.total > 0),
    ),
    Metric(
        "outlast_step_timestamp_seconds",
        "gauge",
        "Time at which the event log told this step first, in seconds since the epoch.",
        lambda now: _known(now.stepped, now.stepped > 0),
    ),
    Metric(
        "outlast_steps_per_second",
        "gauge",
        "Steps a second over the last minute of the generation.",
        lambda now: _one(now.rate),
    ),
    Metric(
        "outlast_last_record_timestamp_seconds",
        "gauge",
        "Time of the latest record of the event log, in seconds since the epoch.",
        lambda now: _known(now.heard, now.heard > 0),
    ),
    Metric(
        "outlast_generation", "gauge", "Number of the newest generation.", lambda now: _one(now.generation)
    ),
    Metric("outlast_ranks", "gauge", "Ranks of the newest generation.", lambda now: _one(now.ranks)),
    Metric(
        "outlast_nodes",
        "gauge",
        "Nodes that have ranks of the newest generation.",
        lambda now: _one(sum(one.present for one in now.nodes)),
    ),
    Metric("outlast_launches_total", "counter", "Starts of the launcher.", lambda now: _one(now.launches)),
    Metric(
        "outlast_faults_total",
        "counter",
        "Faults that led to an action, by kind.",
        lambda now: [((one.value,), now.faults.get(one.value, 0)) for one in FaultKind],
        ("kind",),
    ),
    Metric(
        "outlast_actions_total",
        "counter",
        "Recovery actions; stop also ends a run without a fault.",
        lambda now: [
            ((one.value,), now.actions.get(one.value, 0))
            for one in RecoveryAction
            if one is not RecoveryAction.NONE
        ],
        ("action",),
    ),
    Metric(
        "outlast_checkpoint_step",
        "gauge",
        "Step of the newest checkpoint, by tier: disk, or script for one that the script announced.",
        lambda now: [((one.tier,), one.step) for one in now.checkpoints],
        ("tier",),
    ),
    Metric(
        "outlast_checkpoint_timestamp_seconds",
        "gauge",
        "Time at which the newest checkpoint was committed, in seconds since the epoch, by tier.",
        lambda now: [((one.tier,), one.time) for one in now.checkpoints],
        ("tier",),
    ),
    Metric(
        "outlast_checkpoints_total", "counter", "Checkpoints committed to disk.", lambda now: _one(now.saves)
    ),
    Metric(
        "outlast_checkpoints_lost_total",
        "counter",
        "Checkpoints that could not be written.",
        lambda now: _one(now.saves_lost),
    ),
    Metric("outlast_slow_ranks", "gauge", "Ranks that slow the job now.", lambda now: _one(len(now.slow))),
    Metric(
        "outlast_exit_code",
        "gauge",
        "Exit code of a run that has ended.",
        lambda now: _one(None if now.end is None else now.end.exit_code),
    ),
)


@dataclass(frozen=True)
class Measured:
    """A value of a run, with its metric and the values of the metric's labels by name."""

    metric: Metric
    labels: Mapping[str, str]
    value: float


def measured(now: Now) -> list[Measured]:
    """Return all values of a run that are known."""
    return [
        Measured(metric, dict(zip(metric.labels, values, strict=True)), float(value))
        for metric in METRICS
        for values, value in metric.samples(now)
    ]


def flat_name(one: Measured) -> str:
    """Return a name for those that know no labels: ``outlast_faults_total/crash``."""
    return "/".join((one.metric.name, *one.labels.values()))


def exposition(runs: Sequence[Now]) -> str:
    """Return the metrics of runs in the text format; a run is named by its id in the label ``run``."""
    return "".join(f"{line}\n" for metric in METRICS for line in _lines(metric, runs))


def _lines(metric: Metric, runs: Sequence[Now]) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.meaning}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for now in runs:
        for values, value in metric.samples(now):
            named = zip(("run", *metric.labels), (now.run_id, *values), strict=True)
            labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in named)
            yield f"{metric.name}{{{labels}}} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
