"""Random states of devices, on a double of torch.cuda: its generators are numbers in bytes."""

from __future__ import annotations

import pytest
import torch

from outlast.checkpoint.content.random_states import capture_random, restore_random
from outlast.checkpoint.load.reshard import derived_random
from outlast.rerun.worker.data import capture_generators, restore_generators


class Devices:
    """Stands in for the CUDA devices that a process sees."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
        self.states = list(range(10, 10 + count))
        self.ready, self.current = True, current
        doubles = {
            "is_initialized": lambda: self.ready,
            "is_available": lambda: True,
            "device_count": lambda: len(self.states),
            "current_device": lambda: self.current,
            "get_rng_state_all": lambda: [torch.tensor([one], dtype=torch.uint8) for one in self.states],
            "set_rng_state": self.set_one,
            "set_rng_state_all": lambda every: [self.set_one(one, at) for at, one in enumerate(every)],
            "manual_seed_all": self.seed,
        }
        for name, double in doubles.items():
            patch.setattr(torch.cuda, name, double)

    def set_one(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = int(state[0])

    def seed(self, seed: int) -> None:
        self.states = [seed] * len(self.states)


def test_the_generators_of_all_devices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, 3)
    kept = capture_random()
    devices.states = [0, 0, 0]
    assert restore_random(kept) == ""
    assert devices.states == [10, 11, 12]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rank_with_another_device_goes_on_with_its_own_state(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    Devices(monkeypatch, 3, current=2)
    kept = capture_random()
    devices = Devices(monkeypatch, count, current=0)
    assert restore_random(kept) == ""
    assert devices.states == [12, 10, 11, 13][:count]


def test_states_that_are_derived_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, 2, current=1)
    made = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda _device="cpu": made())
    states = derived_random("a checkpoint and a rank", capture_random())
    assert restore_random(states) == ""
    assert len(set(devices.states)) == 1


def test_ranks_with_equal_generators_have_saved_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for current in (0, 1):
        devices = Devices(monkeypatch, 3, current=current)
        devices.states = [8, 8, 8]
        devices.states[current] = 9
        found.append(capture_random()["cuda"])
    assert found[0] == found[1]


def test_a_generator_that_began_after_the_capture_begins_again_with_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(monkeypatch, 2)
    devices.ready = False
    torch.manual_seed(7)
    kept = capture_generators()
    devices.ready = True
    restore_generators(kept)
    assert devices.states == [7, 7]
