"""A rank sees under ``outlast run`` what it sees under torchrun: variable by variable, started in four ways.

What is checked is what PyTorch's tests of its launcher check of a user's script.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.parity import LAUNCHERS, SCRIPTS, Launched, launch, skip_without
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


@pytest.fixture(scope="module")
def launched(
    launcher: str, way: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Launched, list[dict[str, Any]]]:
    words, variables = WAYS[way]()
    done = launch(launcher, tmp_path_factory.mktemp(f"{launcher}-{way}"), *words, variables=variables)
    assert done.code == 0, done.stdout + done.stderr
    notes = done.notes()
    assert len(notes) == 2, done.stderr
    return done, notes


EACH_WAY = pytest.mark.parametrize("way", list(WAYS), scope="module")
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
@EACH_WAY
@pytest.mark.parametrize("name", list(RANKS))
def test_a_variable(launched: tuple[Launched, list[dict[str, Any]]], name: str) -> None:
    _, notes = launched
    assert [note["environment"].get(name) for note in notes] == [RANKS[name](rank) for rank in range(2)]


@LAUNCHERS
@EACH_WAY
class TestOneLaunch:
    def test_arguments_arrive_as_they_are_with_the_local_rank_filled_in(
        self, launched: tuple[Launched, list[dict[str, Any]]]
    ) -> None:
        for rank, note in enumerate(launched[1]):
            assert note["argv"][1:] == [f"--mine={rank}", "--text", "a b"]

    def test_the_script_is_main_in_a_session_of_its_own(
        self, launched: tuple[Launched, list[dict[str, Any]]]
    ) -> None:
        for note in launched[1]:
            assert (note["name"], note["leads_session"], note["unbuffered"]) == ("__main__", True, True)
        assert len({note["pid"] for note in launched[1]}) == 2

    def test_the_folder_is_the_launchers(self, launched: tuple[Launched, list[dict[str, Any]]]) -> None:
        done, notes = launched
        assert {note["cwd"] for note in notes} == {str(done.folder.resolve())}

    def test_modules_are_found_as_python_finds_them(
        self, launched: tuple[Launched, list[dict[str, Any]]], way: str
    ) -> None:
        done, notes = launched
        expected = str(done.folder.resolve()) if way == "module" else str(SCRIPTS)
        assert {note["path"] for note in notes} == {expected}

    def test_ranks_are_told_one_place_to_meet(self, launched: tuple[Launched, list[dict[str, Any]]]) -> None:
        places = {
            (note["environment"]["MASTER_ADDR"], note["environment"]["MASTER_PORT"]) for note in launched[1]
        }
        ((host, port),) = places
        assert 0 < int(port) < 65536
        assert socket.getaddrinfo(host, int(port))

    def test_a_run_is_named_and_the_same_for_all(
        self, launched: tuple[Launched, list[dict[str, Any]]], way: str
    ) -> None:
        names = {note["environment"]["TORCHELASTIC_RUN_ID"] for note in launched[1]}
        assert len(names) == 1
        if way == "static":  # torchrun draws a name in the other ways
            assert names == {"job7"}

    def test_each_rank_has_an_error_file_of_its_own(
        self, launched: tuple[Launched, list[dict[str, Any]]]
    ) -> None:
        files = [note["environment"]["TORCHELASTIC_ERROR_FILE"] for note in launched[1]]
        assert len(set(files)) == 2
        assert all(file.startswith("/") for file in files)

    def test_who_serves_the_store_is_told(self, launched: tuple[Launched, list[dict[str, Any]]]) -> None:
        assert {note["environment"]["TORCHELASTIC_USE_AGENT_STORE"] for note in launched[1]} <= {
            "True",
            "False",
        }

    def test_signals_are_told(
        self, launched: tuple[Launched, list[dict[str, Any]]], launcher: str, way: str
    ) -> None:
        skip_without(launcher, "--signals-to-handle")
        expected = "SIGTERM,SIGUSR1" if way == "variables" else "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        assert {note["environment"]["TORCHELASTIC_SIGNALS_TO_HANDLE"] for note in launched[1]} == {expected}

    def test_threads_are_one_a_rank_unless_somebody_said_otherwise(
        self, launched: tuple[Launched, list[dict[str, Any]]], way: str
    ) -> None:
        expected = "3" if way == "static" else "1"
        assert {note["environment"]["OMP_NUM_THREADS"] for note in launched[1]} == {expected}

    def test_errors_of_nccl_are_heeded_unless_somebody_said_otherwise(
        self, launched: tuple[Launched, list[dict[str, Any]]], way: str
    ) -> None:
        expected = "0" if way == "static" else "1"
        assert {note["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for note in launched[1]} == {expected}

    def test_there_is_no_timer_that_nobody_asked_for(
        self, launched: tuple[Launched, list[dict[str, Any]]]
    ) -> None:
        assert all("TORCHELASTIC_TIMER_FILE" not in note["environment"] for note in launched[1])
