"""Whether all ranks are there: real ranks over a real store, one of them stopped or late."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from outlast.agreement.worker.ping import Ping
from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS
from tests.support.ports import free_port


def ask(folder: Path, world: int, *words: str) -> dict[int, Any]:
    command = [SCRIPTS / "pinging.py", folder, str(world), *words]
    run = warm.run(command, DEADLINE, {"MASTER_PORT": str(free_port())})
    found = {rank: folder / f"rank-{rank}" for rank in range(world)}
    said = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    assert said, run.stdout + run.stderr
    return said


def test_ranks_that_are_there_all_say_so(tmp_path: Path) -> None:
    said = ask(tmp_path, 3, "rounds=4")
    assert [one["answers"] for one in said.values()] == [[True] * 4] * 3


def test_a_stopped_rank_is_missed_by_all_others_and_named(tmp_path: Path) -> None:
    said = ask(tmp_path, 3, "stopped=1", "timeout=5")
    assert {rank: one["answers"] for rank, one in said.items()} == {0: [True, False], 2: [True, False]}
    for one in said.values():
        assert any("not there within 5 s: rank 1" in line for line in one["log"])


def test_a_rank_that_comes_late_gets_the_answer_of_the_others(tmp_path: Path) -> None:
    """KempnerForge's collective answers True on the late rank and False on the others."""
    said = ask(tmp_path, 3, "late=2", "rounds=3", "timeout=0.5")
    assert [one["answers"] for one in said.values()] == [[True, False, True]] * 3


@pytest.mark.parametrize("patience", [0.0, 0.001, 0.003, 0.01])
def test_answers_are_equal_however_close_the_race_is(patience: float) -> None:
    """Every rank's patience ends just when the last one comes."""
    store, world, rounds = dist.HashStore(), 4, 25
    answers: dict[int, list[bool]] = {}
    barrier = threading.Barrier(world)

    def part(rank: int) -> None:
        ping = Ping(store, rank, world)
        answers[rank] = []
        for number in range(rounds):
            barrier.wait(DEADLINE)
            answers[rank].append(ping.all_there(patience * (1 + (rank + number) % world)))

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(answers) == world
    assert all(own == answers[0] for own in answers.values())


def test_a_rank_whose_device_is_busy_does_not_arrive(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    answers: list[bool] = []
    busy = Ping(store, 1, 2, device_done=lambda: lambda: False)
    thread = threading.Thread(target=lambda: answers.append(busy.all_there(0.05)))
    thread.start()
    answers.append(Ping(store, 0, 2).all_there(DEADLINE))
    thread.join(DEADLINE)
    assert answers == [False, False]
    assert "its device has not done its work" in caplog.text


def test_a_rank_whose_device_fails_says_so_and_the_others_learn_it(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    store = dist.HashStore()
    answers: dict[int, bool] = {}
    sick = Ping(store, 1, 2, device_done=lambda: fails)
    other = threading.Thread(target=lambda: answers.update({0: Ping(store, 0, 2).all_there(DEADLINE)}))
    other.start()
    assert not sick.all_there(DEADLINE)
    other.join(DEADLINE)
    assert answers == {0: False}
    assert "rank 1: its device has failed (CUDA error: an illegal memory access" in caplog.text
    assert "store" not in caplog.text
