"""What trackers have of a run: read back by their own packages, or taken by a collector."""

from __future__ import annotations

import http.server
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast import cli

DATA = Path(__file__).parent / "data"
RUN_ID = "9c41d07ab2e5"
WITHIN = 60.0
NAMES = ("outlast_step", "outlast_faults_total/crash", "outlast_faults_total/hang")
EXPECTED = {"outlast_step": 500.0, "outlast_faults_total/crash": 1.0, "outlast_faults_total/hang": 1.0}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has ended."""
    found = tmp_path / "run"
    found.mkdir()
    shutil.copy(DATA / "eventful.jsonl", found / "events.jsonl")
    return found


def from_tensorboard(place: Path) -> dict[str, float]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(place / RUN_ID))
    found.Reload()
    events = {name: found.Scalars(name)[-1] for name in NAMES}
    assert {one.step for one in events.values()} == {500}
    return {name: one.value for name, one in events.items()}


def from_wandb(place: Path) -> dict[str, float]:
    from wandb.proto import wandb_internal_pb2

    (path,) = place.glob("wandb/offline-run-*/*.wandb")
    content, at, found = path.read_bytes(), 7, dict[str, float]()
    assert content.startswith(b":W&B")
    while at < len(content):  # LevelDB's log, of which a short one has one block and no parted record
        _, size, kind = struct.unpack_from("<IHB", content, at)
        assert kind == 1
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[at + 7 : at + 7 + size])
        at += 7 + size
        for item in record.history.item:
            found["/".join(item.nested_key) or item.key] = float(item.value_json)
    return {name: found[name] for name in NAMES}


def from_mlflow(place: Path) -> dict[str, float]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=place.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("outlast").experiment_id])
    assert (run.info.run_name, run.info.status) == (RUN_ID, "FINISHED")
    return {name: run.data.metrics[name] for name in NAMES}


@pytest.mark.parametrize(
    ("kind", "read", "as_uri"),
    [
        ("tensorboard", from_tensorboard, False),
        ("wandb", from_wandb, False),
        ("mlflow", from_mlflow, True),
    ],
)
def test_a_tracker_has_the_values_of_a_run(
    kind: str,
    read: Callable[[Path], dict[str, float]],
    as_uri: bool,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(kind)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = tmp_path / "there"
    assert cli.main(["metrics", str(run_dir), "--to", f"{kind}:{place.as_uri() if as_uri else place}"]) == 0
    assert read(place) == EXPECTED


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what a collector of OpenTelemetry takes."""

    taken: list[bytes]

    def do_POST(self) -> None:
        self.taken.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if self.path == "/refused" else 200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    taken: list[bytes] = []
    handler = type("Taking", (Collector,), {"taken": taken})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", taken
        server.shutdown()


def test_a_collector_gets_names_labels_and_kinds(run_dir: Path, collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

    address, taken = collector
    assert cli.main(["metrics", str(run_dir), "--to", f"otlp:{address}"]) == 0
    request = metrics_service_pb2.ExportMetricsServiceRequest()
    request.ParseFromString(taken[-1])
    (resource,) = request.resource_metrics
    assert {one.key: one.value.string_value for one in resource.resource.attributes}[
        "service.name"
    ] == "outlast"
    metrics = {one.name: one for one in resource.scope_metrics[0].metrics}
    assert metrics["outlast_step"].gauge.data_points[0].as_double == 500
    faults = metrics["outlast_faults_total"].sum
    assert faults.is_monotonic
    points = {
        (labels["run"], labels["kind"]): one.as_double
        for one in faults.data_points
        for labels in [{each.key: each.value.string_value for each in one.attributes}]
    }
    assert points[RUN_ID, "crash"] == points[RUN_ID, "hang"] == 1
    assert points[RUN_ID, "corrupt"] == 0


def test_values_that_a_collector_refuses_are_an_error(
    run_dir: Path, collector: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    address = collector[0].replace("/v1/metrics", "/refused")
    assert cli.main(["metrics", str(run_dir), "--to", f"otlp:{address}"]) == 2
    assert f"--to otlp:{address}: ConnectionError" in capsys.readouterr().err


def test_a_run_that_goes_on_is_followed_until_it_ends(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = run_dir / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:10]))
    place = tmp_path / "boards"
    command = [sys.executable, "-m", "outlast", "metrics", str(run_dir), "--to", f"tensorboard:{place}"]
    with subprocess.Popen([*command, "--interval", "1"]) as sender:
        try:
            deadline = time.monotonic() + WITHIN
            while not list(place.glob("*/events*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            with log.open("ab") as file:
                file.writelines(lines[10:])
            assert sender.wait(WITHIN) == 0
        finally:
            sender.kill()
    assert from_tensorboard(place) == EXPECTED


def test_a_package_that_is_missing_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert cli.main(["metrics", str(run_dir), "--to", "wandb:there"]) == 2
    assert "pip install wandb" in capsys.readouterr().err
