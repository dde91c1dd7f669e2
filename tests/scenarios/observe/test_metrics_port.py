"""``outlast run --metrics-port``: a real Prometheus sees a fault, and a port that is taken ends no job."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT
from tests.support.dashboards import EVENTFUL
from tests.support.launching import Run, running, until
from tests.support.ports import free_port

WITHIN = 60.0
RULES = ROOT / "src" / "outlast" / "observe" / "metrics" / "prometheus-rules.yaml"
# Waits until it is told to fail. It is no Python script, so that no zygote imports torch.
SCRIPT = '#!/bin/sh\nuntil [ -e "$1" ]; do sleep 0.1; done\nexit "$(cat "$1")"\n'


@pytest.fixture
def job(tmp_path: Path) -> Run:
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    options = ("--no-python", "--max-restarts=0", "--rdzv-id=watched", "--metrics-port=0")
    return Run(tmp_path / "run", str(script), str(tmp_path / "end"), options=options)


def samples(url: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric by the values of its labels, as Prometheus' own client reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    with urllib.request.urlopen(url, timeout=WITHIN) as answer:
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    return {
        tuple(one.labels.values()): one.value for each in families for one in each.samples if one.name == name
    }


def told(run: Run) -> str:
    """Return where the agent serves its metrics."""
    found = run.until(lambda: re.search(r"(http://127\.0\.0\.1:\d+/metrics)\s", run.console()))
    return str(found[1])


def test_an_agent_serves_what_its_event_log_says_until_it_ends(job: Run, tmp_path: Path) -> None:
    with running(job):
        url = told(job)
        job.pids()
        until(lambda: samples(url, "outlast_ranks") == {("watched",): 1}, "one rank")
        assert samples(url, "outlast_run_state")["watched", "starting"] == 1
        (tmp_path / "end").write_text("0")
        assert job.finish() == 0
    with pytest.raises(OSError):  # noqa: PT011 - refused, or reset
        samples(url, "outlast_ranks")


def test_clients_that_send_nothing_do_not_keep_others_out(tmp_path: Path) -> None:
    shutil.copy(EVENTFUL, tmp_path / "events.jsonl")
    command = [sys.executable, "-m", "outlast", "metrics", str(tmp_path), "--listen", "0"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as exporter,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(exporter.kill)
        assert exporter.stderr is not None
        url = exporter.stderr.readline().split()[-1]
        place = urllib.parse.urlsplit(url)
        for _ in range(70):  # 64 may be open at once
            stack.enter_context(socket.create_connection((place.hostname or "", place.port or 0), WITHIN))
        assert samples(url, "outlast_ranks")


def test_a_port_that_is_taken_is_reported_and_the_job_goes_on(job: Run, tmp_path: Path) -> None:
    (tmp_path / "end").write_text("0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job.command[job.command.index("--metrics-port=0")] = f"--metrics-port={port}"
        with running(job):
            assert job.finish() == 0
    assert "--metrics-port" in job.console()
    assert any(f"127.0.0.1:{port}" in one["reason"] for one in job.records("note"))


def test_what_is_no_port_is_refused_before_anything_starts(job: Run) -> None:
    job.command[job.command.index("--metrics-port=0")] = "--metrics-port=here"
    with running(job):
        assert job.finish() == 2
    assert "--metrics-port=here" in job.console()


class Prometheus:
    """A Prometheus server that scrapes targets each half second and evaluates our rules."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        tool = shutil.which("prometheus")
        if tool is None:
            pytest.skip("prometheus is not installed (Debian's package prometheus)")
        self.address = f"127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}]}
                for name, url in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.command = [
            tool,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={self.address}",
        ]
        self.log = folder / "prometheus.log"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with open(self.log, "wb") as log:
            process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.kill()
            process.wait(WITHIN)

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the series that a query finds now; none while the server does not answer yet."""
        words = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{words}", timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except OSError:
            return []

    def wait(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = until(
            lambda: self.ask(query), lambda: f"{query}; log:\n{self.log.read_text()}", WITHIN
        )
        return found


def test_a_real_prometheus_sees_a_run_and_its_alert_fires_on_a_planted_fault(
    job: Run, tmp_path: Path
) -> None:
    with running(job), contextlib.ExitStack() as stack:
        agent = told(job)
        job.pids()
        command = [sys.executable, "-m", "outlast", "metrics", str(job.folder), "--listen", "0"]
        exporter = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(exporter.kill)
        assert exporter.stderr is not None
        served = exporter.stderr.readline().split()[-1]
        prometheus = Prometheus(tmp_path, {"agent": agent, "run": served})
        stack.enter_context(prometheus.running())
        for target in ("agent", "run"):
            prometheus.wait(f'outlast_run_state{{run="watched",state="starting",job="{target}"}} == 1')
        prometheus.wait('run:outlast_quiet_seconds:min{run="watched"} < 600')  # the rules are evaluated
        assert prometheus.ask('ALERTS{alertstate="firing"}') == []
        (tmp_path / "end").write_text("7")
        assert job.finish() != 0
        (alert,) = prometheus.wait('ALERTS{alertstate="firing"}')
        assert (
            alert["metric"].items()
            >= {
                "alertname": "OutlastRunFailed",
                "severity": "page",
                "run": "watched",
                "job": "run",
            }.items()
        )
        prometheus.wait('outlast_faults_total{job="run"} == 1')
