"""A campaign on real runs: faults are made when they are due, and what is left behind is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.chaos import campaign
from outlast.chaos.campaign import Plan
from outlast.chaos.policy import Injection
from outlast.ipc.processes import is_alive
from outlast.recovery.policy.events import FaultSeen, GenerationStarted, RunStarted

PATIENCE = 120.0
SCRIPT = """
import json
import os
import sys
import time

import outlast

rank, last = int(os.environ["RANK"]), int(os.environ["OUTLAST_GENERATION"]) > int(sys.argv[2])
with outlast.start() as session, open(f"{sys.argv[1]}/rank-{rank:05d}.jsonl", "a", 1) as trace:
    for step in session.steps(40):
        while step == 20 and not last:
            time.sleep(0.01)
        time.sleep(0.01)
        trace.write(json.dumps({"step": step, "loss": "0x0p+0", "ids": []}) + "\\n")
"""


def plan(tmp_path: Path, faulty: int, *injections: Injection) -> Plan:
    """Return a plan; the script waits for its fault in the first so many generations."""
    script, traces, run_dir = tmp_path / "script.py", tmp_path / "trace", tmp_path / "run"
    script.write_text(SCRIPT)
    traces.mkdir()
    launch = [sys.executable, "-m", "outlast", "run", "--nproc-per-node", "2", "--run-dir", str(run_dir)]
    return Plan(
        [*launch, str(script), str(traces), str(faulty)],
        run_dir,
        traces,
        tmp_path / "output.txt",
        injections,
        PATIENCE,
    )


def test_a_rank_and_then_the_agent_are_killed_and_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "_LEFT_PATIENCE", PATIENCE)
    wanted = plan(tmp_path, 2, Injection("rank_killed", 1, 5), Injection("agent_killed", -1, 10))
    conduct = campaign.carry_out(wanted)
    assert conduct.problems == [], wanted.output.read_text()
    assert conduct.exit_code == 0
    assert [made.fault for made in conduct.made] == ["rank_killed", "agent_killed"]
    assert [seen.rank for seen in conduct.records if isinstance(seen, FaultSeen)] == [1]
    assert sum(isinstance(record, RunStarted) for record in conduct.records) == 2
    generations = [record.generation for record in conduct.records if isinstance(record, GenerationStarted)]
    assert generations == sorted(set(generations))
    assert len(conduct.outlived) == 1
    assert conduct.leftovers == []
    workers = [
        pid for record in conduct.records if isinstance(record, GenerationStarted) for pid in record.pids
    ]
    assert not any(map(is_alive, workers))


def test_an_injection_that_never_was_due_is_a_problem(tmp_path: Path) -> None:
    conduct = campaign.carry_out(plan(tmp_path, 0, Injection("rank_killed", 0, 10**6)))
    assert conduct.exit_code == 0
    assert ["rank_killed" in one for one in conduct.problems] == [True]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)", ["sleep 60"]),
        ("raise SystemExit(3)", []),
    ],
)
def test_what_a_command_leaves_behind_is_named_and_removed(
    tmp_path: Path, program: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "_LEFT_PATIENCE", 0.5)
    conduct = campaign.carry_out(Plan([sys.executable, "-c", program], tmp_path, None, tmp_path / "out.txt"))
    assert [line.partition("(")[2].rstrip(")") for line in conduct.leftovers] == expected
    for line in conduct.leftovers:
        assert not is_alive(int(line.split()[1]))
    assert bool(conduct.exit_code) == bool(conduct.problems)


def test_a_process_with_the_number_of_an_earlier_child_is_found_and_a_later_one_is_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "_LEFT_PATIENCE", 0.0)
    observer = campaign.Observer(tmp_path / "events.jsonl", None)
    with subprocess.Popen(["sleep", "60"]) as left:
        known = campaign.children()
        assert campaign.leftovers(observer, known, set()) == []
        earlier = {(pid, began - 1 if pid == left.pid else began) for pid, began in known}
        assert campaign._wait_until_gone(earlier - known, 0.0) < float("inf")
        (found,) = campaign.leftovers(observer, earlier, set())
        assert found == f"process {left.pid} (sleep 60)"
    assert not is_alive(left.pid)


def test_a_file_of_a_process_that_had_the_pid_before_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    old = shared / "launcher-4711.socket"
    old.touch()
    monkeypatch.setattr(campaign, "_SHARED_MEMORY", (shared,))
    monkeypatch.setattr(campaign, "_LEFT_PATIENCE", 0.5)
    observer = campaign.Observer(tmp_path / "events.jsonl", None)
    observer.agents = [4711]
    before = frozenset(shared.iterdir())
    assert campaign._files(observer, before) == []
    new = shared / "outlast-4711-x"
    new.touch()
    assert campaign._files(observer, before) == [f"file {new}"]
