"""Logs of failed ranks: found by the incident, and never outside of the run folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.observe.dashboard import logs
from outlast.observe.policy.goodput import Incident

INCIDENT = Incident("crash", 1.0, "n01", 2, 3, 5, "rank 2 died", "restart-in-job", "attempt 1 of 3")


def put(root: Path, path: str, content: bytes = b"boom\n") -> Path:
    found = root / path
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_bytes(content)
    return found


def test_the_log_is_that_of_the_rank_in_the_generation_of_the_fault(tmp_path: Path) -> None:
    put(tmp_path, "logs/gen-0002/rank-00002/stderr.log", b"old\n")
    put(tmp_path, "logs/gen-0003/rank-00002/stderr.log")
    put(tmp_path, "logs/gen-0003/rank-00002/stdout.log", b"")
    put(tmp_path, "logs/gen-0004/rank-00002/stderr.log", b"new\n")
    found = logs.place(tmp_path, INCIDENT)
    assert found == ("logs", "gen-0003", "rank-00002")
    assert logs.files(tmp_path, found) == {"stderr": "stderr.log"}
    assert logs.end(tmp_path, (*found, "stderr.log")) == b"boom\n"


def test_a_process_that_outlived_a_restart_has_the_log_of_an_older_generation(tmp_path: Path) -> None:
    put(tmp_path, "logs/gen-0001/rank-00002/stderr.log")
    put(tmp_path, "logs/gen-0003/rank-00001/stderr.log")
    assert logs.place(tmp_path, INCIDENT) == ("logs", "gen-0001", "rank-00002")


def test_a_node_of_several_has_its_own_logs(tmp_path: Path) -> None:
    put(tmp_path, "nodes/n01/logs/gen-0003/rank-00002/stderr.log")
    assert logs.place(tmp_path, INCIDENT)[:2] == ("nodes", "n01")
    assert logs.place(tmp_path, replace(INCIDENT, node="n02")) == ()
    assert logs.place(tmp_path, replace(INCIDENT, rank=-1)) == ()


def test_of_a_long_log_the_end_is_shown_from_a_whole_line_on(tmp_path: Path) -> None:
    lines = b"".join(b"line %06d\n" % at for at in range(200_000))
    put(tmp_path, "logs/x", lines)
    found = logs.end(tmp_path, ("logs", "x"))
    assert logs.MOST_BYTES - 20 < len(found) <= logs.MOST_BYTES
    assert found.startswith(b"line ")
    assert found.endswith(b"line 199999\n")


@pytest.mark.parametrize("node", ["..", "../outside", "/etc", "a/../../outside", "", ".", "n\0", "x" * 5000])
def test_a_name_in_the_log_leads_nowhere_else(tmp_path: Path, node: str) -> None:
    put(tmp_path, "outside/logs/gen-0003/rank-00002/stderr.log", b"secret\n")
    run = tmp_path / "run"
    (run / "nodes").mkdir(parents=True)
    assert logs.place(run, replace(INCIDENT, node=node)) == ()


@pytest.mark.parametrize("at", ["nodes", "nodes/n01", "nodes/n01/logs", "nodes/n01/logs/gen-0003"])
def test_a_folder_that_is_a_symbolic_link_is_not_entered(tmp_path: Path, at: str) -> None:
    whole = "nodes/n01/logs/gen-0003/rank-00002/stderr.log"
    put(tmp_path / "outside", whole, b"secret\n")
    run = tmp_path / "run"
    (run / at).parent.mkdir(parents=True)
    (run / at).symlink_to(tmp_path / "outside" / at)
    assert (run / whole).read_bytes() == b"secret\n"
    assert logs.place(run, INCIDENT) == ()
    with pytest.raises(OSError, match=r"symbolic|directory"):
        logs.end(run, tuple(whole.split("/")))


def test_a_log_that_is_a_link_or_a_fifo_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "secret")
    folder = tmp_path / "run/logs/gen-0003/rank-00002"
    folder.mkdir(parents=True)
    (folder / "stderr.log").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "stdout.log")
    found = logs.place(tmp_path / "run", INCIDENT)
    assert logs.files(tmp_path / "run", found) == {}
    for name in ("stderr.log", "stdout.log", "../../../../secret", "error.json"):
        with pytest.raises(OSError, match=r"regular file|symbolic|path below|No such"):
            logs.end(tmp_path / "run", (*found, name))
