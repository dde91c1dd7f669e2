"""A script sees under ``outlast run`` what it sees under torchrun: both are started, and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS
from tests.support.parity import torchrun_has

# Three launches, of which two import torch three times.
pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]
# What may differ, and why.
DIFFERENT = {
    "MASTER_PORT": "a free port of each launcher",
    "TORCHELASTIC_RUN_ID": "torchrun draws one for --standalone; ours is the run folder's",
    "TORCHELASTIC_ERROR_FILE": "a path of each launcher",
    "TORCHELASTIC_MAX_RESTARTS": "3 by default, torchrun has 0",
    "MASTER_ADDR": "torchrun --standalone names this host, ours the loopback address",
    "TORCH_FR_BUFFER_SIZE": "2000 entries of torch's flight recorder, from which a hang's culprit is told",
    "TORCHINDUCTOR_CACHE_DIR": "left behind by what torchrun itself imports",
    "WANDB_RUN_ID": "one run of W&B over all restarts; set where the user has not set it",
    "WANDB_RESUME": "the same",
    "PYTEST_CURRENT_TEST": "the reference is made in a fixture",
    "_": "set by the shell",
}


def start(launcher: list[str], folder: Path, script: list[str], **environment: str) -> list[dict[str, Any]]:
    folder.mkdir()
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the launchers differ in it
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *script, str(folder), "--flag", "a b"],
        cwd=SCRIPTS,
        input="",
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
        env={**os.environ, "TORCHELASTIC_MARK": "kept", **environment},
    )
    signal.signal(signal.SIGHUP, hangup)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((folder / f"exit-{rank}").read_text() == "atexit ran" for rank in range(2))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


Seen = tuple[str, str]
WAYS = {"file": ["surroundings.py"], "module": ["-m", "surroundings"]}


@pytest.fixture(scope="module", params=["file", "module"])
def under_torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Return a way to name a script, and what its ranks see under torchrun, as JSON."""
    folder = tmp_path_factory.mktemp(request.param) / "ranks"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found = start(launcher, folder, WAYS[request.param], PYTHONPATH=str(SCRIPTS))
    return request.param, json.dumps(found).replace(str(folder), "FOLDER")


@pytest.mark.parametrize("mode", ["zygote", "cold"])
def test_a_rank_sees_what_it_sees_under_torchrun(tmp_path: Path, under_torchrun: Seen, mode: str) -> None:
    (how, seen), folder = under_torchrun, tmp_path / "ours"
    ours = [sys.executable, "-m", "outlast", "run", "--standalone", "--run-dir", str(tmp_path / "run")]
    ours += ["--no-zygote"] if mode == "cold" else []
    mine = start(ours, folder, WAYS[how], PYTHONPATH=str(SCRIPTS))
    theirs = json.loads(seen.replace("FOLDER", str(folder)))
    assert mine[0].pop("seed") != mine[1].pop("seed"), "an unseeded torch draws apart on each rank"
    for rank in range(2):
        theirs[rank].pop("seed", None)
        compare(theirs[rank], mine[rank], how, mode)


def compare(theirs: dict[str, Any], mine: dict[str, Any], how: str, mode: str) -> None:
    expected, found = theirs.pop("environment"), mine.pop("environment")
    for name in {*expected, *found} - set(DIFFERENT):
        if name.startswith("OUTLAST_"):
            continue
        if name == "TORCHELASTIC_USE_AGENT_STORE":  # torch 2.4's torchrun serves none
            assert found[name] == str(mode == "zygote")  # without one, nobody but rank 0 can serve the store
            continue
        if name == "TORCHELASTIC_SIGNALS_TO_HANDLE" and not torchrun_has("--signals-to-handle"):
            continue
        assert found.get(name) == expected.get(name), name
    for name, value in theirs.items():
        assert mine[name] == value, name
