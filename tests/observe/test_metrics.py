"""Metrics: an independent parser reads them, the reference lists them, rules name no others, alerts fire."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast import cli
from outlast.observe.following import RunFollower
from outlast.observe.metrics import command
from outlast.observe.metrics.exporter import Exporter
from outlast.observe.policy.metrics import METRICS, exposition
from outlast.observe.policy.now import Now, NowFold
from outlast.observe.recorder import read
from tests.source_tree import ROOT

DATA = Path(__file__).parent / "data"
RULES = ROOT / "src" / "outlast" / "observe" / "metrics" / command.RULES
NAMES = {one.name for one in METRICS}
WITHIN = 60.0


def sample() -> Now:
    told = NowFold()
    for record in read(DATA / "eventful.jsonl").records:
        told.take(record)
    return told.now()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    shutil.copy(DATA / "eventful.jsonl", tmp_path / "run" / "events.jsonl")
    return tmp_path / "run"


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples by name and values of labels, as Prometheus' own client reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    assert {one.name for one in families} == {re.sub("_total$", "", name) for name in NAMES}
    assert all(one.documentation for one in families)
    return {
        each.name: {tuple(also.labels.values()): also.value for also in one.samples if also.name == each.name}
        for one in families
        for each in one.samples
    }


def promtool(*words: str) -> str:
    """Run Prometheus' own checker; skip where it is not installed (Debian's package prometheus)."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_metrics_say_what_the_run_does(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", str(run_dir)]) == 0
    found = parsed(capsys.readouterr().out)
    run = "9c41d07ab2e5"
    assert found["outlast_step"] == {(run,): 500}
    assert found["outlast_faults_total"][run, "hang"] == 1
    assert found["outlast_faults_total"][run, "lost"] == 0
    assert found["outlast_actions_total"][run, "restart-in-job"] == 2
    assert found["outlast_checkpoint_step"] == {(run, "disk"): 500}
    assert found["outlast_run_state"][run, "ended"] == 1
    assert sum(found["outlast_run_state"].values()) == 1
    assert found["outlast_exit_code"] == {(run,): 0}


def test_a_run_of_which_nothing_is_known_has_no_invented_numbers() -> None:
    found = parsed(exposition([Now(run_id="empty")]))
    unknown = {"outlast_step", "outlast_steps_per_second", "outlast_exit_code", "outlast_checkpoint_step"}
    assert not unknown & found.keys()


def test_the_reference_lists_every_metric_with_its_kind_labels_and_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for one in METRICS:
        labels = ", ".join(f"`{name}`" for name in ("run", *one.labels))
        assert f"| `{one.name}` | {one.kind} | {labels} | {one.meaning} |" in page
    assert {name for name in re.findall(r"`(outlast_\w+)`", page)} == NAMES


def test_a_file_for_node_exporter_is_replaced_until_ctrl_c(run_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "outlast.prom"
    lines = (run_dir / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines[:6]))
    command = [sys.executable, "-m", "outlast", "metrics", str(run_dir), "--textfile", str(target)]
    with subprocess.Popen([*command, "--interval", "1"]) as writer:
        try:
            wait_for(target, 'outlast_checkpoint_step{run="9c41d07ab2e5",tier="disk"} 100.0\n')
            with open(run_dir / "events.jsonl", "ab") as file:
                file.write(b"".join(lines[6:]))
            wait_for(target, 'outlast_checkpoint_step{run="9c41d07ab2e5",tier="disk"} 500.0\n')
            writer.send_signal(signal.SIGINT)
            assert writer.wait(WITHIN) == 0
        finally:
            writer.kill()
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_run_that_is_deleted_is_left_out_and_named_and_the_others_go_on(
    run_dir: Path, tmp_path: Path
) -> None:
    target, other = tmp_path / "outlast.prom", tmp_path / "other"
    other.mkdir()
    log = (run_dir / "events.jsonl").read_text()
    (other / "events.jsonl").write_text(log.replace("9c41d07ab2e5", "other"))
    command = [
        sys.executable,
        "-m",
        "outlast",
        "metrics",
        str(run_dir),
        str(other),
        "--textfile",
        str(target),
    ]
    with subprocess.Popen([*command, "--interval", "1"], stderr=subprocess.PIPE, text=True) as writer:
        try:
            wait_for(target, 'outlast_step{run="other"} 500.0\n')
            shutil.rmtree(other)
            deadline = time.monotonic() + WITHIN
            while 'run="other"' in target.read_text():
                assert writer.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            wait_for(target, 'outlast_step{run="9c41d07ab2e5"} 500.0\n')
            writer.send_signal(signal.SIGINT)
            said = writer.communicate(timeout=WITHIN)[1]
        finally:
            writer.kill()
    assert writer.returncode == 0
    assert sum(str(other) in line for line in said.splitlines()) == 1


def test_a_copy_of_a_run_that_appears_later_does_not_end_the_metrics_of_the_others(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "events.jsonl").touch()
    exporter = Exporter([RunFollower(run_dir), RunFollower(copy)])
    assert parsed(exporter.begin())["outlast_step"] == {("9c41d07ab2e5",): 500}
    shutil.copy(run_dir / "events.jsonl", copy / "events.jsonl")
    capsys.readouterr()
    texts = {exporter.text() for _ in range(3)}
    assert [parsed(one)["outlast_step"] for one in texts] == [{("9c41d07ab2e5",): 500}]
    assert sum(str(copy) in line for line in capsys.readouterr().err.splitlines()) == 1


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + WITHIN
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--rules"),
        (["RUN", "--interval", "5"], "--interval"),
        (["RUN", "--to", "tensorboard:x", "--textfile", "a.prom"], "--textfile"),
        (["RUN", "/other", "--to", "tensorboard:x"], "--to"),
        (["RUN", "--rules"], "--rules"),
        (["--grafana", "--rules"], "--grafana"),
        (["RUN", "RUN"], "run"),
        (["RUN", "--textfile", "/nowhere/a.prom"], "No such file or directory"),
        (["/nowhere"], "/nowhere"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], named: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["metrics", *(str(run_dir) if one == "RUN" else one for one in words)]) == 2
    assert named in capsys.readouterr().err


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_rules_name_metrics_and_labels_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        named = set(re.findall(r"(?:run:)?outlast_\w+(?::\w+)?", rule["expr"]))
        assert named <= NAMES | recorded, rule
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"].keys() == {"summary", "description"}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == set(FIRES)
    assert cli.main(["metrics", "--rules"]) == 0
    assert capsys.readouterr().out == RULES.read_text()


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RULES.parent / command.DASHBOARD).read_text())
    return found


def expressions(found: dict[str, Any]) -> list[str]:
    """Return what the panels ask of Prometheus, with a value for each variable of Grafana."""
    asked = [target["expr"] for panel in found["panels"] for target in panel["targets"]]
    return [one.replace("$run", ".*") for one in asked]


def unknown(expression: str) -> list[str]:
    """Return the metrics and labels of an expression that no run has."""
    labels = {one.name: {"run", *one.labels} for one in METRICS}
    names = set(re.findall(r"outlast_\w+", expression))
    known = set.union(*(labels.get(name, set()) for name in names))
    used = re.findall(r"[{,](\w+)[=!]", expression)
    used += [one for group in re.findall(r"by \(([^)]*)\)", expression) for one in group.split(", ")]
    return sorted(names - labels.keys()) + sorted(set(used) - known)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    found = dashboard()
    assert len(expressions(found)) >= len(found["panels"]) >= 10
    assert [unknown(one) for one in expressions(found) if unknown(one)] == []
    assert unknown('sum by (run, node) (outlast_steps{kind="x"})') == ["outlast_steps", "kind", "node", "run"]
    for panel in found["panels"]:
        legends = [name for one in panel["targets"] for name in re.findall(r"{{(\w+)}}", one["legendFormat"])]
        assert set(legends) <= {"run", "state", "kind", "action", "tier"}
        assert panel["title"]
        assert panel["description"]
    assert found["templating"]["list"][1]["query"] == "label_values(outlast_run_state, run)"
    assert cli.main(["metrics", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_promtool_reads_what_the_dashboard_asks(tmp_path: Path) -> None:
    asked = [
        {"record": f"run:dashboard:{at}", "expr": one} for at, one in enumerate(expressions(dashboard()))
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": asked}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(path))


# For each alert: series of a run in the notation of promtool's tests (a sample each minute) that fire it.
FIRES = {
    "OutlastRunQuiet": ["outlast_last_record_timestamp_seconds{run='r'} 0x60"],
    "OutlastRunFailed": ["outlast_exit_code{run='r'} 1x60"],
    "OutlastRecoveryTakesLong": ["outlast_run_state{run='r',state='recovering'} 1x60"],
    "OutlastRestartsOften": ["outlast_actions_total{run='r',action='restart-in-job'} 0+1x60"],
    "OutlastNoCheckpoint": [
        "outlast_checkpoint_timestamp_seconds{run='r',tier='disk'} 0x200",
        "outlast_run_state{run='r',state='training'} 1x200",
    ],
    "OutlastCheckpointLost": ["outlast_checkpoints_lost_total{run='r'} 0x50 1x150"],
    "OutlastSlowRank": ["outlast_slow_ranks{run='r'} 1x60"],
}
# A healthy run of an hour that was restarted once, saves every ten minutes and ends to be started again.
HEALTHY = [
    "outlast_last_record_timestamp_seconds{run='r'} 0+60x60",
    "outlast_run_state{run='r',state='training'} 1x60",
    "outlast_run_state{run='r',state='recovering'} 0x20 1 0x60",
    "outlast_actions_total{run='r',action='restart-in-job'} 0x20 1x60",
    "outlast_actions_total{run='r',action='stop'} 0x60",
    "outlast_checkpoint_timestamp_seconds{run='r',tier='disk'} 0+60x60",
    "outlast_checkpoints_lost_total{run='r'} 0x60",
    "outlast_slow_ranks{run='r'} 0x60",
    "outlast_exit_code{run='r'} _x50 75x10",
]
_AT = {"OutlastNoCheckpoint": "3h", "OutlastCheckpointLost": "55m"}


def test_promtool_finds_no_fault_in_metrics_and_rules(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    tool = shutil.which("promtool")
    assert tool is not None
    text = exposition([sample()])
    done = subprocess.run(
        [tool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=WITHIN, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_each_alert_fires_for_its_fault_and_all_are_silent_in_a_healthy_hour(tmp_path: Path) -> None:
    cases = [(series, _AT.get(name, "55m"), name, True) for name, series in FIRES.items()]
    cases += [(HEALTHY, "55m", name, False) for name in FIRES]
    path = tmp_path / "tests.yaml"  # JSON is YAML
    told = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [_case(*one) for one in cases]}
    path.write_text(json.dumps(told))
    assert "SUCCESS" in promtool("test", "rules", str(path))


def _case(series: list[str], at: str, name: str, fires: bool) -> dict[str, Any]:
    pairs = (one.split(" ", 1) for one in series)
    firing = f"count(ALERTS{{alertname='{name}',alertstate='firing'}}) or vector(0)"
    return {
        "interval": "1m",
        "input_series": [{"series": what, "values": values} for what, values in pairs],
        "promql_expr_test": [{"expr": firing, "eval_time": at, "exp_samples": [{"value": int(fires)}]}],
    }
