"""A rank sees under ``outlast run`` what it sees under torchrun: variable by variable, started in four ways.

What is checked is what PyTorch's tests of its launcher check of a user's script.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.parity import LAUNCHERS, SCRIPTS, launch, torchrun_has
from tests.support.ports import free_port

pytestmark = [pytest.mark.timeout(420), pytest.mark.long]
SCRIPT = str(SCRIPTS / "parity_note.py")
ARGUMENTS = ["--mine=${local_rank}", "--text", "a b"]
COMMON = ["--nnodes=1", "--nproc-per-node=2", "--role=trainer", "--max-restarts=2", "--monitor-interval=0.1"]


WAYS: dict[str, Callable[[], tuple[list[str], dict[str, str]]]] = {
    "file": lambda: ([*COMMON, "--standalone", SCRIPT, *ARGUMENTS], {}),
    "module": lambda: (
        [*COMMON, "--rdzv-id=job7", "-m", "parity_note", *ARGUMENTS],
        {"PYTHONPATH": str(SCRIPTS)},
    ),
    "static": lambda: (
        [
            *COMMON,
            "--master-addr=127.0.0.1",
            f"--master-port={free_port()}",
            "--node-rank=0",
            "--rdzv-id=job7",
            SCRIPT,
            *ARGUMENTS,
        ],
        {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    ),
    "variables": lambda: (
        [SCRIPT, *ARGUMENTS],
        {
            "PET_NNODES": "1:1",
            "PET_NPROC_PER_NODE": "2",
            "PET_ROLE": "trainer",
            "PET_MAX_RESTARTS": "2",
            "PET_MONITOR_INTERVAL": "0.1",
            "PET_STANDALONE": "1",
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1",
        },
    ),
}


RANKS: dict[str, Callable[[int], str]] = {
    "RANK": str,
    "LOCAL_RANK": str,
    "ROLE_RANK": str,
    "GROUP_RANK": lambda rank: "0",
    "ROLE_NAME": lambda rank: "trainer",
    "LOCAL_WORLD_SIZE": lambda rank: "2",
    "WORLD_SIZE": lambda rank: "2",
    "ROLE_WORLD_SIZE": lambda rank: "2",
    "GROUP_WORLD_SIZE": lambda rank: "1",
    "TORCHELASTIC_RESTART_COUNT": lambda rank: "0",
    "TORCHELASTIC_MAX_RESTARTS": lambda rank: "2",
    "PARITY_SENTINEL": lambda rank: "of the launcher",
}


@LAUNCHERS
@pytest.mark.parametrize("way", list(WAYS))
def test_what_ranks_see(launcher: str, way: str, tmp_path: Path) -> None:
    words, variables = WAYS[way]()
    done = launch(launcher, tmp_path, *words, variables=variables)
    assert done.code == 0, done.stdout + done.stderr
    notes = done.notes()
    assert len(notes) == 2, done.stderr
    here, static = str(tmp_path.resolve()), way == "static"
    for rank, note in enumerate(notes):
        seen = note["environment"]
        assert {name: seen.get(name) for name in RANKS} == {
            name: value(rank) for name, value in RANKS.items()
        }
        assert note["argv"][1:] == [f"--mine={rank}", "--text", "a b"], "the local rank is filled in"
        assert (note["name"], note["leads_session"], note["unbuffered"]) == ("__main__", True, True)
        assert (note["cwd"], note["path"]) == (here, here if way == "module" else str(SCRIPTS))
        assert seen["TORCHELASTIC_ERROR_FILE"].startswith("/")
        assert seen["TORCHELASTIC_USE_AGENT_STORE"] in ("True", "False")
        assert seen["OMP_NUM_THREADS"] == ("3" if static else "1")
        assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == ("0" if static else "1")
        assert "TORCHELASTIC_TIMER_FILE" not in seen
        if launcher == "outlast" or torchrun_has("--signals-to-handle"):
            signals = "SIGTERM,SIGUSR1" if way == "variables" else "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
            assert seen["TORCHELASTIC_SIGNALS_TO_HANDLE"] == signals

    def of_all(name: str) -> set[str]:
        return {note["environment"][name] for note in notes}

    assert len({note["pid"] for note in notes}) == len(of_all("TORCHELASTIC_ERROR_FILE")) == 2
    (host,), (port,), (name,) = map(of_all, ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    assert socket.getaddrinfo(host, int(port))
    assert name == "job7" or not static  # torchrun draws a name in the other ways
