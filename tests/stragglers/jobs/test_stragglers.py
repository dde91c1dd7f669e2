"""A rank that becomes slow in the middle of a real job is named, with what it is slow at."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.observe import recorder
from outlast.recovery.policy.events import Record, StepTimes, StragglerSeen

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "slowing.py"
SLOW = 2
PATIENCE = 240.0


def command(folder: Path, *words: str, config: str = "") -> list[str]:
    """Return the command that runs four ranks."""
    options = ["--nproc-per-node=4", "--run-dir", str(folder / "run")]
    if config:
        (folder / "outlast.toml").write_text(config)
        options += ["--config", str(folder / "outlast.toml")]
    return [sys.executable, "-m", "outlast", "run", *options, str(SCRIPT), *words]


def ran(folder: Path, *words: str, expected: int = 0, config: str = "") -> tuple[Record, ...]:
    """Run four ranks to their end, and return the event log."""
    line = command(folder, *words, config=config)
    done = subprocess.run(line, timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stdout + done.stderr
    return recorder.read(folder / "run" / "events.jsonl").records


def named(folder: Path) -> list[StragglerSeen]:
    """Return the ranks that the event log names as slow."""
    log = folder / "run" / "events.jsonl"
    records = recorder.read(log).records if log.exists() else ()
    return [one for one in records if isinstance(one, StragglerSeen) and one.state == "on"]


@pytest.mark.parametrize("how", ["session", "plain"])
@pytest.mark.parametrize("part", ["compute", "communication", "data"])
def test_a_rank_that_becomes_slow_is_named(tmp_path: Path, how: str, part: str) -> None:
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            command(tmp_path, how, str(SLOW), "50", "1000000", part), stdout=output, stderr=output
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while not (found := named(tmp_path)) and time.monotonic() < deadline and job.poll() is None:
                time.sleep(0.2)
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(PATIENCE)
    assert found, (tmp_path / "output").read_text()
    assert (found[0].rank, found[0].activity) == (SLOW, part), found[0].reason
    assert found[0].step > 50
    told = subprocess.run(
        [sys.executable, "-m", "outlast", "stragglers", str(tmp_path / "run"), "--json"],
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=True,
    )
    (slow, *_) = json.loads(told.stdout)["stragglers"]
    assert (slow["rank"], slow["activity"]) == (SLOW, part)


def test_a_job_that_is_to_stop_for_a_slow_rank_stops_after_a_save(tmp_path: Path) -> None:
    config = '[stragglers]\naction = "stop"\n[checkpoints]\nsave_interval = 20\n'
    records = ran(tmp_path, "session", str(SLOW), "50", "2000", "compute", expected=69, config=config)
    assert any(isinstance(one, StragglerSeen) and one.rank == SLOW for one in records)


def test_nothing_is_timed_where_that_is_off(tmp_path: Path) -> None:
    records = ran(tmp_path, "plain", "-1", "0", "40", "none", config="[stragglers]\nenabled = false\n")
    assert not [one for one in records if isinstance(one, (StragglerSeen, StepTimes))]
