"""A rank that writes rubbish into all that its agent reads: it ends its own generations, not the job."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, running


def test_a_hostile_rank_ends_no_job(tmp_path: Path) -> None:
    timeouts = ("--ft-rank-heartbeat-timeout=5", "--ft-initial-rank-heartbeat-timeout=30")
    options = ("--nproc-per-node=2", "--max-restarts=8", *timeouts)
    with running(Run(tmp_path / "run", "hostile.py", "30", options=options)) as run:
        assert run.finish() == 0, run.console()
        faults = {one["generation"]: one for one in run.records("fault_seen")}
        kinds = {number: one["fault"] for number, one in faults.items()}
        assert kinds == {1: "error", 2: "hang", 3: kinds[3], 4: "hang", 5: "error", 6: "error"}, run.console()
        assert kinds[3] in ("crash", "hang")
        assert {one["rank"] for one in faults.values()} == {1}
        assert "told all the same" in faults[1]["reason"]
        assert "Traceback" not in run.console()
        assert 900 < sum(one["reason"].startswith("no ") for one in run.records("note")) < 2900


def test_what_a_rank_sends_to_others_runs_no_code_there(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "0")
    with running(Run(tmp_path / "run", "sends_objects.py", str(tmp_path), options=options)) as run:
        assert run.finish(60) == 0, run.console()
    assert not (tmp_path / "ran").exists()
    assert "" not in {(tmp_path / f"raised-{rank}").read_text() for rank in (0, 1)}
