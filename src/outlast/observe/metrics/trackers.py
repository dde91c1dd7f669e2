"""Experiment trackers and collectors: each takes what a run does through one port.

Their packages are not needed by outlast; each is imported when it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from outlast.errors import UsageError
from outlast.observe.policy.metrics import METRICS, Measured, flat_name
from outlast.observe.policy.now import Now

_PROJECT = "outlast"
_FOREVER_MS = 1e12  # milliseconds: OpenTelemetry exports when it is told to
_SENT_WITHIN_MS = 10_000  # milliseconds


class Tracker(Protocol):
    """Takes the values of one run."""

    def log(self, measured: Sequence[Measured], now: Now) -> None:
        """Take the values of a moment."""

    def close(self) -> None:
        """Write what is left."""


class _TensorBoard:
    """Event files in a folder."""

    def __init__(self, place: str, run_id: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(Path(place) / run_id))

    def log(self, measured: Sequence[Measured], now: Now) -> None:
        found = [self._summary.Value(tag=flat_name(one), simple_value=one.value) for one in measured]
        event = self._event(wall_time=now.heard, step=max(0, now.step), summary=self._summary(value=found))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of W&B in a folder, offline: ``wandb sync`` sends it."""

    def __init__(self, place: str, run_id: str) -> None:
        import wandb

        Path(place).mkdir(parents=True, exist_ok=True)
        self._end = wandb.teardown
        quiet = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(project=_PROJECT, name=run_id, dir=place, mode="offline", settings=quiet)
        # A restart repeats steps, and W&B drops what is logged at an earlier one.
        self._run.define_metric("*", step_metric="outlast_step")

    def log(self, measured: Sequence[Measured], now: Now) -> None:  # noqa: ARG002 - the port's
        self._run.log({flat_name(one): one.value for one in measured})

    def close(self) -> None:
        self._run.finish()
        self._end()  # the file is complete when W&B's own process has ended


class _MLflow:
    """A run of MLflow at a tracking URI."""

    def __init__(self, place: str, run_id: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=place)
        known = self._client.get_experiment_by_name(_PROJECT)
        experiment = self._client.create_experiment(_PROJECT) if known is None else known.experiment_id
        self._id = self._client.create_run(experiment, run_name=run_id).info.run_id

    def log(self, measured: Sequence[Measured], now: Now) -> None:
        at, step = int(now.heard * 1000), max(0, now.step)
        metrics = [self._metric(flat_name(one), one.value, at, step) for one in measured]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _OpenTelemetry:
    """A collector that takes OTLP over HTTP (``http://HOST:4318/v1/metrics``); it gets labels, too."""

    def __init__(self, place: str, run_id: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import CallbackOptions, Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        self._newest: Sequence[Measured] = ()
        self._taken = taken = [True]

        class Exporter(OTLPMetricExporter):
            """Keeps whether the collector took the values: the reader tells nobody."""

            def export(self, *args: Any, **more: Any) -> MetricExportResult:
                found = super().export(*args, **more)
                taken[0] = found is MetricExportResult.SUCCESS
                return found

        reader = PeriodicExportingMetricReader(Exporter(place), _FOREVER_MS, _SENT_WITHIN_MS)
        resource = Resource.create({"service.name": _PROJECT, "service.instance.id": run_id})
        self._provider = MeterProvider([reader], resource)
        meter = self._provider.get_meter(_PROJECT)

        def those_of(name: str) -> Callable[[CallbackOptions], list[Observation]]:
            return lambda _: [
                Observation(one.value, {"run": run_id, **one.labels})
                for one in self._newest
                if one.metric.name == name
            ]

        for metric in METRICS:
            counts = metric.kind == "counter"
            make = meter.create_observable_counter if counts else meter.create_observable_gauge
            make(metric.name, [those_of(metric.name)], description=metric.meaning)

    def log(self, measured: Sequence[Measured], now: Now) -> None:  # noqa: ARG002 - the port's
        self._newest = measured
        self._provider.force_flush(_SENT_WITHIN_MS)
        if not self._taken[0]:
            raise ConnectionError("the collector did not take the values; see above")

    def close(self) -> None:
        self._provider.shutdown(_SENT_WITHIN_MS)


_KINDS: Mapping[str, tuple[Callable[[str, str], Tracker], str]] = {
    "tensorboard": (_TensorBoard, "tensorboard"),
    "wandb": (_WeightsAndBiases, "wandb"),
    "mlflow": (_MLflow, "mlflow-skinny"),
    "otlp": (_OpenTelemetry, "opentelemetry-exporter-otlp-proto-http"),
}
KINDS = tuple(_KINDS)


class _Checked:
    """A tracker whose errors name it: each package raises errors of its own.

    Args:
        make: returns the tracker.
        where: the option's value.
    """

    def __init__(self, make: Callable[[], Tracker], where: str) -> None:
        self._where = where
        self._tracker = self._made(make)

    def log(self, measured: Sequence[Measured], now: Now) -> None:
        self._made(lambda: self._tracker.log(measured, now))

    def close(self) -> None:
        self._made(self._tracker.close)

    def _made(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ModuleNotFoundError:
            raise
        except Exception as error:  # whatever the user's package raises
            words = f"--to {self._where}: {type(error).__name__}: {error}; nothing more was sent"
            raise UsageError(words) from error


def opened(kind: str, place: str, run_id: str) -> Tracker:
    """Return a tracker.

    Args:
        kind: one of ``KINDS``.
        place: a folder; of mlflow a tracking URI, of otlp a URL.
        run_id: names the run there.

    Raises:
        UsageError: its package is not installed, or it cannot write there.
    """
    make, package = _KINDS[kind]
    try:
        return _Checked(lambda: make(place, run_id), f"{kind}:{place}")
    except ModuleNotFoundError as error:
        raise UsageError(f"--to {kind}: {error.name} is needed (pip install {package})") from error
