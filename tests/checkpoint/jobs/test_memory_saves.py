"""How often the state is saved in memory where the user has not said it."""

from __future__ import annotations

import pytest
import torch

from outlast.checkpoint.policy.cadence import FIRST_STEPS
from outlast.checkpoint.save.memory_saves import MemorySaves
from outlast.ipc.exchange import SoloExchange


def measured(restarts: int, uptime: float, ran: float = 60.0, cost: float = 0.05) -> MemorySaves:
    """Return what a rank knows that has made one save, on a host that has been up for so long."""
    saves = MemorySaves(None, restarts, 10.0, began=uptime)
    for _ in range(10):
        saves.trained(0.1)
    saves.saved(cost, SoloExchange(), uptime + ran)
    return saves


@pytest.mark.parametrize("restarts", [0, 3, 20])
def test_the_interval_does_not_depend_on_how_long_the_host_has_been_up(restarts: int) -> None:
    found = {measured(restarts, uptime).steps for uptime in (0.0, 600.0, 86_400.0, 60 * 86_400.0)}
    assert len(found) == 1


def test_restarts_make_saves_more_frequent_and_time_without_one_makes_them_rarer() -> None:
    assert measured(3, 0.0).steps < measured(0, 0.0).steps
    assert measured(3, 0.0, ran=60.0).steps < measured(3, 0.0, ran=36_000.0).steps


def test_the_first_save_comes_early_and_the_interval_is_changed_after_some_saves_only() -> None:
    saves = MemorySaves(None, 0, 10.0, began=0.0)
    assert [step for step in range(25) if saves.due(step)] == [FIRST_STEPS, 2 * FIRST_STEPS]
    found = []
    for count in range(1, 9):
        saves.trained(0.1)
        saves.saved(0.05 * count, SoloExchange(), 1000.0 * count)
        found.append(saves.steps)
    assert found[0] != FIRST_STEPS
    assert found[1] != found[0]
    assert found[2] == found[1]
    assert found[3] != found[2]
    assert found[4] == found[5] == found[6] == found[3]
    assert f"every {saves.steps} steps" in saves.due(saves.steps)


def test_an_interval_that_the_user_has_fixed_stays() -> None:
    saves = MemorySaves(7, 3, 10.0, began=0.0)
    saves.trained(0.1)
    saves.saved(5.0, SoloExchange(), 1000.0)
    assert [step for step in range(22) if saves.due(step)] == [7, 14, 21]


def test_what_a_device_has_still_to_do_is_no_cost_of_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def wait() -> None:
        now[0] += 8.0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    saves = MemorySaves(None, 0, 10.0, began=0.0)
    began = []
    for _ in range(9):
        began.append(saves.settle(lambda: now[0]))
        saves.saved(0.05, SoloExchange(), now[0])
    waits = [100 + 8 * count for count in range(1, 5)]
    first, second, fourth, eighth = waits
    assert began == [first, second, second, fourth, fourth, fourth, fourth, eighth, eighth]
    fixed = MemorySaves(5, 0, 10.0, began=0.0)
    assert fixed.settle(lambda: now[0]) == now[0] == eighth
