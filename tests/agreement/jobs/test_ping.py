"""Whether all ranks are there: real ranks over a real store, one of them stopped or late."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
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
    told = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    assert told, run.stdout + run.stderr
    return told


def test_a_stopped_rank_is_missed_by_all_others_and_named(tmp_path: Path) -> None:
    told = ask(tmp_path, 3, "stopped=1", "timeout=2")
    assert {rank: one["answers"] for rank, one in told.items()} == {0: [True, False], 2: [True, False]}
    for one in told.values():
        assert any("rank 1" in line for line in one["log"])


def test_a_rank_that_comes_late_gets_the_answer_of_the_others(tmp_path: Path) -> None:
    """KempnerForge's collective answers True on the late rank and False on the others."""
    told = ask(tmp_path, 3, "late=2", "rounds=3", "timeout=0.5")
    assert [one["answers"] for one in told.values()] == [[True, False, True]] * 3


def in_threads(world: int, part: Callable[[int], Any]) -> list[Any]:
    """Return what each rank answers."""
    answers: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda at=at: answers.update({at: part(at)})) for at in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return [answers[rank] for rank in range(world)]


@pytest.mark.parametrize("patience", [0.0, 0.001, 0.003, 0.01])
def test_answers_are_equal_however_close_the_race_is(patience: float) -> None:
    """Every rank's patience ends just when the last one comes."""
    store, world = dist.HashStore(), 4
    barrier = threading.Barrier(world)

    def part(rank: int) -> list[bool]:
        ping, found = Ping(store, rank, world), []
        for number in range(25):
            barrier.wait(DEADLINE)
            found.append(ping.all_there(patience * (1 + (rank + number) % world)))
        return found

    answers = in_threads(world, part)
    assert answers == [answers[0]] * world


def fails() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("done", "patience", "logged"),
    [(lambda: False, 0.05, "rank 1"), (fails, DEADLINE, "CUDA error: an illegal memory access")],
    ids=["busy", "fails"],
)
def test_a_rank_whose_device_is_busy_or_fails_does_not_arrive_and_the_others_learn_it(
    done: Callable[[], bool], patience: float, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()

    def part(rank: int) -> bool:
        if rank == 0:
            return Ping(store, 0, 2).all_there(2 * DEADLINE)  # longer than it is waited for here
        return Ping(store, 1, 2, device_done=lambda: done).all_there(patience)

    assert in_threads(2, part) == [False, False]
    assert logged in caplog.text
