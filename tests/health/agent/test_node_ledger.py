"""The node ledger on disk, and the commands that read and write it."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import ExitCode
from outlast.health.agent.node_ledger import NodeLedger
from outlast.health.policy.hazard import DAY, DEFAULT, NodeHistory, model_of, probability
from outlast.health.policy.ledger import Entry, State, What

NOW = 1_800_000_000.0
TRACE = Path(__file__).parents[1] / "data" / "fault_trace.json.gz"


def test_what_one_node_writes_all_read(tmp_path: Path) -> None:
    notes: list[str] = []
    one, other = (NodeLedger(tmp_path / "ledger", name, notes.append) for name in ("n1", "n2"))
    one.append(Entry(NOW - 2 * DAY, "n3", What.FAULT, "lost"))
    other.append(Entry(NOW - 1 * DAY, "n3", What.FAULT, "lost"))
    assert one.read(3).standing("n3", NOW).state is State.QUARANTINE
    assert one.read(3).entries("n3") == other.read(3).entries("n3")
    assert notes == []


def test_a_torn_line_costs_one_entry_and_is_said_once(tmp_path: Path) -> None:
    notes: list[str] = []
    ledger = NodeLedger(tmp_path, "n1", notes.append)
    (tmp_path / "n1.jsonl").write_text('{"time": 1, "no')
    ledger.append(Entry(NOW, "n3", What.FAULT))
    assert len(ledger.read(3).entries("n3")) == 1
    ledger.read(3)
    assert [str(tmp_path) in note for note in notes] == [True]


def test_a_ledger_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "file").touch()
    ledger = NodeLedger(tmp_path / "file" / "ledger", "n1", notes.append)
    for _ in range(3):
        ledger.append(Entry(NOW, "n3", What.FAULT))
    assert len(notes) == 1


def test_a_link_or_a_pipe_is_not_followed(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "victim").touch()
    (tmp_path / "n1.jsonl").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "n2.jsonl")
    ledger = NodeLedger(tmp_path, "n1", notes.append)
    ledger.append(Entry(NOW, "n3", What.FAULT))
    assert ledger.read(3).nodes == ()
    assert (tmp_path / "victim").read_text() == ""
    assert len(notes) == 3


class TestCommands:
    def test_a_person_puts_a_node_into_quarantine_and_releases_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = str(tmp_path / "ledger")
        assert cli.main(["health", "ledger", folder, "--quarantine", "n3", "--reason", "cable"]) == 0
        assert re.match("n3: quarantine.*cable", capsys.readouterr().out)
        assert cli.main(["health", "ledger", folder, "--release", "n3"]) == 0
        assert re.match("n3: good", capsys.readouterr().out)

    def test_a_reason_alone_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["health", "ledger", str(tmp_path), "--reason", "x"]) == ExitCode.USAGE
        assert "--reason" in capsys.readouterr().err

    def test_the_built_in_numbers_are_those_of_the_trace(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trace, out = tmp_path / "faults.json", tmp_path / "model.json"
        trace.write_bytes(gzip.decompress(TRACE.read_bytes()))
        assert cli.main(["health", "fit", str(trace), "--nodes", "400", "--out", str(out)]) == 0
        assert re.search("400.*349.*584", capsys.readouterr().out)
        found = model_of(json.loads(out.read_text()))
        assert found.base == pytest.approx(DEFAULT.base, rel=0.01)
        for name, kinds in DEFAULT.factors.items():
            for kind, factor in kinds.items():
                assert found.factors[name][kind] == pytest.approx(factor, rel=0.01), (name, kind)
        back = probability(found.history_within(NodeHistory(0.0, "GPU", 1), DAY))
        assert 0.10 < back < 0.25  # 22 % in the trace

    @pytest.mark.parametrize(
        ("content", "options", "named"),
        [(b"hello", (), "log"), (b"[]", (), "hour"), (b"[]", ("--prior", "0"), "--prior")],
    )
    def test_a_bad_log_is_refused(
        self,
        content: bytes,
        options: tuple[str, ...],
        named: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        log, out = tmp_path / "log", tmp_path / "model.json"
        log.write_bytes(content)
        assert cli.main(["health", "fit", str(log), "--out", str(out), *options]) == ExitCode.USAGE
        assert named in capsys.readouterr().err
        assert not out.exists()
