"""The health of a node in its agent: what is said, written and ordered, on samples that are made up."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.config import CheckpointOptions, Config
from outlast.errors import ExitCode, UsageError
from outlast.health.agent.node_health import NodeHealth
from outlast.health.policy import simulation
from outlast.health.policy.emergency import Decision, Do
from outlast.health.policy.ledger import Entry, What
from outlast.health.policy.options import HealthOptions
from outlast.health.policy.telemetry import DeviceSample, Sample
from outlast.launcher.output.file_thread import FileThread
from outlast.recovery.policy.events import Fault, FaultKind


class Node:
    """A node whose telemetry is a scenario, read every 10 s from an hour ago on."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.files = FileThread(folder)
        config = Config(
            health=HealthOptions(telemetry="simulate:healthy", **options),  # type: ignore[arg-type]
            checkpoints=CheckpointOptions(save_interval=100),
        )
        self.health = NodeHealth(config, "n1", (folder, folder / "own"), self.files, self.notes.append)
        self.begun = time.time() - 3600

    def see(self, scenario: str, seconds: int, step: int = 500) -> list[Decision]:
        parsed, found, before = simulation.parse(scenario), [], -1.0
        for second in range(0, seconds + 1, 10):
            at = float(second)
            samples = simulation.samples(parsed, "n1", at, before, self.begun + at)
            found += self.health.look(samples, 1, step)
            before = at
        self.settle()
        return found

    def settle(self) -> None:
        assert self.files.settle(30.0)

    def ledger(self) -> list[dict[str, object]]:
        self.settle()
        lines = (path.read_text().splitlines() for path in (self.folder / "ledger").glob("*.jsonl"))
        return [json.loads(line) for each in lines for line in each]


def age(node: Node, seconds: float) -> None:
    """Let the last checkpoint be of some time ago."""
    node.health._saved = (100, time.time() - seconds)


def test_a_dead_device_orders_a_save_and_the_drain(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="act")
    age(node, 300.0)
    found = node.see("xid,device=3", 60)
    assert [one.do for one in found] == [Do.SAVE, Do.DRAIN]
    assert "GPU 3: XID 79" in found[0].reason
    assert "GPU-simulated-3: XID 79" in node.notes[-1]


def test_an_hour_of_health_orders_nothing_and_says_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="act")
    age(node, 1e6)
    assert node.see("healthy", 3600) == []
    assert node.notes == []
    assert node.ledger() == []


def test_observing_says_what_would_be_done_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    age(node, 300.0)
    assert node.see("xid,device=3", 200) == []
    save, drain = (text for text in node.notes if "would" in text)
    assert "100.00%" in save
    assert "100.00%" not in drain


def test_before_ranks_run_it_watches_and_orders_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="act")
    samples = simulation.samples(simulation.parse("xid,after=0"), "n1", 1.0, -1.0, time.time())
    assert node.health.look(samples, 0, -1) == []
    age(node, 300.0)
    found = node.health.look(samples, 1, 200)
    assert [one.do for one in found] == [Do.SAVE, Do.DRAIN]


def test_the_cost_of_a_save_is_what_was_measured(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="act", save_cost=1e9)
    age(node, 300.0)
    assert [one.do for one in node.see("xid,device=3", 60)] == [Do.DRAIN]
    node.health.saved(100, 0.2)
    assert node.health._cost == 0.2


def test_a_spare_says_that_it_is_at_risk_if_it_may_act(tmp_path: Path) -> None:
    for mode in ("act", "observe"):
        node = Node(tmp_path / mode, mode=mode)
        assert node.health.at_risk == ""
        samples = simulation.samples(simulation.parse("xid,device=3,after=0"), "n1", 1.0, -1.0, time.time())
        assert node.health.look(samples, 0, -1) == []
        assert ("GPU 3: XID 79" in node.health.at_risk) is (mode == "act")


def test_a_save_that_another_node_tells_of_counts(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="act")
    age(node, 300.0)
    node.health.saved(450, 0.0)
    assert [one.do for one in node.see("xid,device=3", 60)] == [Do.DRAIN], "hardly any work would be lost"
    age(node, 300.0)
    node.health.saved(100, 0.0)
    assert [one.do for one in node.see("xid,device=3", 60)] == [Do.SAVE], "it was told again, not saved again"
    node.health.saved(90, 0.0)
    assert node.health._saved[0] == 90, "the job went back to an older step"


def test_signs_go_into_the_ledger(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.see("xid,device=2,xid=63", 60)
    (entry,) = node.ledger()
    assert (entry["what"], entry["kind"], entry["device"]) == ("sign", "xid_failing", "GPU-simulated-2")


@pytest.mark.parametrize(
    ("fault", "written"),
    [
        (Fault(FaultKind.LOST, "n2", -1, 1, 5, "silent", "n2 is lost"), ["lost"]),
        (Fault(FaultKind.LOST, "n2", -1, 1, 5, "goodbye", "n2 stopped it"), []),
        (Fault(FaultKind.FAILING, "n2", -1, 1, 5, "XID 79", "n2 is failing"), ["failing"]),
        (Fault(FaultKind.REFUSED, "n2", 3, 1, 5, "GPU", "x", exit_code=ExitCode.NODE_UNFIT), ["refused"]),
        (Fault(FaultKind.REFUSED, "n2", 3, 1, 5, "no copy", "x", exit_code=65), []),
        (Fault(FaultKind.ERROR, "n2", 3, 1, 5, "boom", "boom"), []),
        (None, []),
    ],
)
def test_faults_that_speak_of_a_node_go_into_the_ledger(
    tmp_path: Path, fault: Fault | None, written: list[str]
) -> None:
    node = Node(tmp_path)
    node.health.faulted(fault)
    assert [one["kind"] for one in node.ledger()] == written


def test_a_node_that_comes_back_is_in_burn_in_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    lost = Entry(time.time() - 7200, "n1", What.FAULT, "lost")
    (tmp_path / "ledger" / "n2.jsonl").write_text(lost.to_line() + "\n")
    node = Node(tmp_path)
    assert "lost" in node.health.last_choice
    node.health.start()
    assert node.health.last_choice in node.notes[0]
    assert [one["what"] for one in node.ledger()].count("repair") == 1


@pytest.mark.parametrize(
    ("ago", "kind", "withdrawn"), [(0.0, "lost", 1), (7200.0, "lost", 0), (0.0, "corrupt", 0)]
)
def test_a_node_that_read_how_the_job_ended_withdraws_a_loss_of_this_job_only(
    tmp_path: Path, ago: float, kind: str, withdrawn: int
) -> None:
    node = Node(tmp_path)
    (tmp_path / "ledger").mkdir()
    fault = Entry(time.time() - ago, "n1", What.FAULT, kind)
    (tmp_path / "ledger" / "n2.jsonl").write_text(fault.to_line() + "\n")
    node.health.lived("n1")
    assert [one["what"] for one in node.ledger()].count("lived") == withdrawn


def test_the_weighted_score_saves_and_never_drains(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="act", model="weighted", risk_threshold=0.1, threshold_frac=0.25)
    age(node, 300.0)
    hot = [replace(one, temperature=90.0) for one in _devices(node.begun)]
    assert node.health.look(hot, 1, 110) == []  # a quarter of the interval is not over
    hot = [replace(one, time=node.begun + 10) for one in hot]
    (found,) = node.health.look(hot, 1, 125)
    assert found.do is Do.SAVE
    node.settle()
    metrics, detailed = (
        list(csv.DictReader((tmp_path / "own" / "gpu_logs" / name).read_text().splitlines()))
        for name in ("gpu_metrics.csv", "gpu_detailed_metrics.csv")
    )
    assert len(metrics) == len(detailed) == 16
    assert metrics[0]["temperature"] == "90"
    assert 0.25 < float(metrics[0]["failure_risk"]) < 0.35
    assert detailed[0]["gpu_name"] == "simulated H100"


def test_the_weighted_score_takes_samples_as_often_as_they_are_read(tmp_path: Path) -> None:
    node = Node(tmp_path, model="weighted", telemetry_interval=2.0)
    for number in range(5):
        node.health.look(_devices(node.begun + 2.0 * number), 1, 110)
        node.settle()
    metrics = (tmp_path / "own" / "gpu_logs" / "gpu_metrics.csv").read_text().splitlines()
    assert len(metrics) == 1 + 5 * 8


def _devices(at: float) -> list[Sample]:
    samples = simulation.samples(simulation.parse("healthy"), "n1", 0.0, -1.0, at)
    return [one for one in samples if isinstance(one, DeviceSample)]


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}'])
def test_a_parameters_file_that_is_wrong_ends_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UsageError, match=r"model\.json"):
        Node(tmp_path, model_file=str(tmp_path / "model.json"))
