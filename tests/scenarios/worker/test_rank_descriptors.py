"""What a rank inherits: descriptors, standard streams and secrets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, Run, running

pytestmark = pytest.mark.timeout(420)

FIRST = """
import os, sys
print("first", os.open(sys.argv[1], os.O_RDONLY), "of", sorted(map(int, os.listdir("/proc/self/fd")))[:4])
"""
CLOSES = """
import os, sys, time
os.closerange(3, 4096)
data = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(3, 1024):
    os.dup2(data, number)
os.write(data, b"mine")
time.sleep(600)
"""
CLOSES_IN_A_SESSION = """
import os, sys, torch, outlast
with outlast.start(save_interval=5) as session:
    if sys.argv[2] == "early":
        os.closerange(3, 4096)
    session.restore(model=torch.nn.Linear(3, 3))
    for step in session.steps(10):
        if step == 3 and sys.argv[2] == "late":
            os.closerange(3, 4096)
            data = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in range(3, 1024):
                os.dup2(data, number)
            os.write(data, b"mine")
"""
SECRETS = """
import json, os, sys
from pathlib import Path
agent = os.getppid()
found = {}
for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        continue
    for name, mark in (("saver", b"outlast.checkpoint.writer"), ("zygote", b"zygote.py")):
        if mark in words and int(pid) != os.getpid():
            found[name] = b"very-secret" in environment
found["rank"] = "OUTLAST_TOKEN" in os.environ
Path(sys.argv[1]).write_text(json.dumps(found))
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("start", ["zygote", pytest.param("cold", marks=pytest.mark.long)])
def test_the_first_file_that_a_script_opens_has_number_3(tmp_path: Path, start: str) -> None:
    more = ("--no-zygote",) if start == "cold" else ()
    with running(
        Run(tmp_path / "run", script(tmp_path, FIRST), str(tmp_path), options=more, cold=True)
    ) as run:
        assert run.finish() == 0, run.console()
    assert "first 3 of [0, 1, 2, 3]" in run.console()


@pytest.mark.long
def test_stacks_of_a_hang_are_never_written_to_a_file_of_the_script(tmp_path: Path) -> None:
    data = tmp_path / "data"
    options = ("--max-restarts=0", "--ft-initial-rank-heartbeat-timeout=10")
    with running(Run(tmp_path / "run", script(tmp_path, CLOSES), str(data), options=options)) as run:
        assert run.finish() != 0
    assert [one["fault"] for one in run.records("fault_seen")] == ["hang"]
    assert data.read_bytes() == b"mine"


@pytest.mark.parametrize("when", [pytest.param("early", marks=pytest.mark.long), "late"])
def test_a_script_that_closes_all_descriptors_ends_as_any_other(tmp_path: Path, when: str) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"")
    arguments = (script(tmp_path, CLOSES_IN_A_SESSION), str(data), when)
    with running(Run(tmp_path / "run", *arguments)) as run:
        assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []
    assert data.read_bytes() == (b"mine" if when == "late" else b"")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_a_launcher_may_have_closed_streams(tmp_path: Path, closed: str) -> None:
    run = Run(tmp_path / "run", script(tmp_path, FIRST), str(tmp_path))
    done = subprocess.run(
        ["sh", "-c", f"exec {shlex.join(run.command)} {closed}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    logs = [path.read_text() for path in (tmp_path / "run").rglob("stdout.log")]
    assert done.returncode == 0, (done.stderr, logs)
    assert logs == ["first 3 of [0, 1, 2, 3]\n"]


def test_the_token_of_a_job_is_known_to_its_agents_only(tmp_path: Path) -> None:
    found = tmp_path / "found"
    with running(
        Run(tmp_path / "run", script(tmp_path, SECRETS), str(found), cold=True), OUTLAST_TOKEN="very-secret"
    ) as run:
        assert run.finish() == 0, run.console()
    assert json.loads(found.read_text()) == {"saver": False, "zygote": False, "rank": False}
    assert "OUTLAST_TOKEN" not in os.environ
