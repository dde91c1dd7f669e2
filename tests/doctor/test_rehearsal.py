"""The rehearsal, with real jobs: a script that survives, one that does not start again, one that fails."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from outlast import settings
from outlast.chaos import faults
from outlast.config import CheckpointOptions, Config, FaultToleranceOptions
from outlast.doctor import policy, rehearsal
from outlast.doctor.rehearsal import Wish
from outlast.errors import OutlastError
from outlast.ipc.processes import is_alive
from outlast.stragglers.policy.options import StragglerAction, StragglerOptions
from tests.support.launching import until

pytestmark = pytest.mark.launched

WITHIN = 240.0  # seconds
SESSION = """\
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import outlast

{first}
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
with outlast.start(save_interval=1000) as session:
    session.restore(model=model)
    for step in session.steps(1_000_000):
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.02)
"""


def rehearse(folder: Path, text: str, *arguments: str) -> dict[str, policy.Diagnosis]:
    script, place = folder / "train.py", folder / "place"
    script.write_text(textwrap.dedent(text))
    place.mkdir()
    found, measured = rehearsal.carry_out(
        Wish(script, arguments, 2, Config(), place), time.monotonic() + WITHIN
    )
    assert list(place.iterdir()) == []
    assert {one.check for one in found} == {*policy.PATHS, "leftovers"}
    assert found[-1].ok, found[-1]
    if found[0].ok:
        assert measured.start > 0
    return {one.check: one for one in found}


@pytest.mark.long
def test_every_path_of_a_script_with_a_session_goes_on(tmp_path: Path) -> None:
    found = rehearse(tmp_path, SESSION.format(first=""))
    assert {name: one.found for name, one in found.items() if not one.ok} == {}


@pytest.mark.long
def test_a_script_that_cannot_start_a_second_time_is_found(tmp_path: Path) -> None:
    first = "Path(sys.argv[1], f\"was-here-{os.environ['RANK']}\").mkdir()  # a folder that must not exist"
    text = SESSION.format(first=first).replace("import sys", "import os, sys")
    found = rehearse(tmp_path, text, str(tmp_path))
    broken = [name for name, one in found.items() if one.fails]
    assert broken == ["damaged-copy"]  # the first path on which the script starts again
    assert not found["crash"].ok


FINISHES = SESSION.format(first="").replace("1_000_000", "12")


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "failing"),
    [
        ("raise SystemExit('no data at /data')\n", ["start"]),
        ("print('done')\n", []),
        (FINISHES, []),
    ],
    ids=["fails", "no session", "finishes"],
)
def test_a_script_that_fails_does_and_one_that_finishes_meanwhile_has_not(
    tmp_path: Path, text: str, failing: list[str]
) -> None:
    found = rehearse(tmp_path, text)
    assert [name for name, one in found.items() if one.fails] == failing


@pytest.mark.long
def test_a_script_that_has_saved_its_last_step_before_the_signal_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_LOOK", 0.5)  # the second copy, of the last step, is seen late
    text = SESSION.format(first="").replace("1_000_000", "10") + "time.sleep(3)\n"
    found = rehearse(tmp_path, text)
    assert found["preemption"].ok, found["preemption"]


@pytest.mark.long
def test_a_script_is_not_started_unless_it_is_asked_for(tmp_path: Path) -> None:
    """What it would write stays as it is, whatever path it names."""
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "latest.pt").write_bytes(b"a long training")
    names = "'latest.pt', 'trained', sys.argv[1]"
    (folder / "train.py").write_text(
        f"import sys\nfor name in ({names}):\n    open(name, 'wb').write(b'step 17')\n"
    )

    def state() -> dict[str, tuple[bytes, int]]:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = state()

    def doctor(*words: object) -> int:
        command = [sys.executable, "-m", "outlast", "doctor", *map(str, words)]
        return subprocess.run(
            command, cwd=folder, capture_output=True, timeout=WITHIN, check=False
        ).returncode

    script = ("--timeout", "60", "train.py", elsewhere / "latest.pt")
    assert doctor(*script) in (0, 69)
    assert state() == before
    assert doctor("--train") == 2
    doctor("--train", "--check", "start", *script)
    assert (elsewhere / "latest.pt").read_bytes() == b"step 17"


def test_a_rehearsal_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    words = ["doctor", "--check", "crash", "--timeout", str(WITHIN), "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen([sys.executable, "-m", "outlast", *words], cwd=tmp_path) as doctor:
        pids = until(lambda: _started(tmp_path), lambda: "no rank was started")
        doctor.terminate()
        assert doctor.wait(WITHIN) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert not any(is_alive(pid) for pid in pids)


def _started(folder: Path) -> list[int]:
    """Return the pids of the ranks and of the launcher of a rehearsal, if there are any."""
    for path in folder.glob(".doctor-*/run/events.jsonl"):
        with contextlib.suppress(OutlastError):
            run = faults.find(path.parent)
            return [run.launch.pid, *run.generation.pids] if run.generation else []
    return []


def test_the_options_of_a_rehearsal_leave_the_folder_alone() -> None:
    config = Config(
        fault_tolerance=FaultToleranceOptions(rank_heartbeat_timeout=0.1, max_restarts=0, safety_factor=7.0),
        checkpoints=CheckpointOptions(
            global_url="s3://bucket/x",
            global_every=2,
            keep_ancestors=7,
            global_options={"allow_http": "true"},
            save_interval_seconds=900.0,
        ),
    )
    fixed = {"fault_tolerance": {"rank_section_timeouts": {"step": 5.0}}}
    assert {name: table for name, table in rehearsal._options(config, fixed).items() if table} == {
        "fault_tolerance": {"safety_factor": 7.0, "rank_section_timeouts": {"step": 5.0}},
        "checkpoints": {"save_interval": 5},
    }


def test_what_is_written_is_read_as_the_same_configuration(tmp_path: Path) -> None:
    config = Config(
        fault_tolerance=FaultToleranceOptions(
            workers_stop_timeout=float("inf"), rank_section_timeouts={"a b": 5.0}
        ),
        checkpoints=CheckpointOptions(global_url="s3://b/x", global_options={"allow_http": "true"}),
        stragglers=StragglerOptions(action=StragglerAction.STOP),
    )
    tables = {table: settings.changed(getattr(config, table)) for table in settings.TABLES}
    (tmp_path / "config.toml").write_text(rehearsal._toml(tables))
    assert settings.load_config(tmp_path / "config.toml", {}) == config


def test_a_place_that_cannot_be_written_is_a_warning() -> None:
    wish = Wish(None, (), 1, Config(), Path("/proc"))
    [one], _ = rehearsal.carry_out(wish, time.monotonic() + WITHIN)
    assert (one.ok, one.fails, one.check) == (False, False, "start")
