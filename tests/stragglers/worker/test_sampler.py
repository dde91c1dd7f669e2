"""What the training thread does, by its frames and by how long it ran."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage
from outlast.stragglers.policy.measuring import Doing
from outlast.stragglers.worker.sampler import EVERY, SHARE, SLOWEST, Frames, Sampler, pause_of
from tests.support.jobs import DEADLINE


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    one = Sampler(HeartbeatPage(bytearray(PAGE_BYTES)))
    one.begin()
    yield one
    one.close()
    one.join(DEADLINE)
    assert not one.failure


def looked(sampler: Sampler, more: int) -> bool:
    """Say whether the sampler has not looked so often yet; within a deadline."""
    sampler.looks, deadline = 0, time.monotonic() + DEADLINE
    while sampler.looks < more and time.monotonic() < deadline:
        time.sleep(0.01)
    return sampler.looks >= more


class Here:
    """Looks at its caller, from where a script would be."""

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.found: list[tuple[Doing, Doing]] = []

    def look(self) -> None:
        self.found.append(Frames().doing(sys._getframe(1), lambda: self.cuda))

    wait = look
    """A method named wait that, as a collective's, is no frame of Python: its caller is looked at."""


class Samples(Dataset[torch.Tensor]):
    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: int) -> torch.Tensor:
        self.here.look()
        return torch.ones(1)


class Looking(torch.autograd.Function):
    here: Here

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        Looking.here.look()
        return value


def test_the_script_itself_computes_also_while_it_sleeps() -> None:
    here = Here()
    here.look()
    assert here.found == [(Doing.COMPUTING, Doing.COMPUTING)]


def test_a_dataset_in_a_loader_is_loading() -> None:
    here = Here()
    next(iter(DataLoader(Samples(here))))
    assert here.found == [(Doing.LOADING, Doing.LOADING)]


def test_a_method_wait_is_waiting_while_it_is_blocked() -> None:
    here = Here()
    here.wait()
    assert here.found == [(Doing.COMPUTING, Doing.WAITING)]


def test_a_function_within_backward_computes() -> None:
    Looking.here = Here()
    Looking.apply(torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert Looking.here.found == [(Doing.COMPUTING, Doing.COMPUTING)]


def test_a_communication_hook_is_busy_for_a_collective() -> None:
    here = Here()

    def hook(state: object, bucket: object) -> None:
        here.look()

    hook(None, None)
    assert here.found == [(Doing.COMMUNICATING, Doing.COMMUNICATING)]


@pytest.mark.parametrize(
    ("path", "name", "cuda", "blocked"),
    [
        ("/x/torch/autograd/graph.py", "_engine_run_backward", False, Doing.WAITING),
        ("/x/torch/autograd/graph.py", "_engine_run_backward", True, Doing.COMPUTING),
        ("/x/torch/distributed/distributed_c10d.py", "all_reduce", True, Doing.WAITING),
        ("/x/torch/nn/parallel/distributed.py", "_sync_buffers", True, Doing.WAITING),
        ("/x/torch/distributed/fsdp/_unshard.py", "_wait_unshard", False, Doing.WAITING),
    ],
)
def test_a_thread_that_is_blocked_in_torch_waits_for_ranks(
    path: str, name: str, cuda: bool, blocked: Doing
) -> None:
    here = Here(cuda)
    source = f"def {name}(look):\n    look()\n"
    scope: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile(source, path, "exec"), scope)
    scope[name](here.look)
    assert here.found[0][1] is blocked


def test_samples_say_how_long_a_thread_computed_in_a_section() -> None:
    page = HeartbeatPage(bytearray(PAGE_BYTES))
    section = page.section("forward")
    sampler = Sampler(page)
    number = sampler._running._descriptor
    sampler.begin()
    seconds, deadline = 0.0, time.monotonic() + DEADLINE
    while seconds < 0.1 and time.monotonic() < deadline:
        with section:
            time.sleep(0.02)
        seconds += sampler.take().get(section.slot, {}).get(Doing.COMPUTING, 0.0)
    sampler.close()
    sampler.join(DEADLINE)
    assert number < 0 or not Path(f"/proc/self/fd/{number}").exists()
    assert seconds >= 0.1
    assert not sampler.failure


def test_a_sampler_that_fails_ends_without_harm() -> None:
    sampler = Sampler(HeartbeatPage(bytearray(PAGE_BYTES)))
    sampler._frames = None  # type: ignore[assignment]  # a fault of our own
    sampler.begin()
    sampler.join(DEADLINE)
    assert "NoneType" in sampler.failure


def test_the_low_descriptors_are_the_scripts_alone(sampler: Sampler) -> None:
    """A script that counts on the number of the next descriptor gets it: no look opens a file."""
    opened: list[object] = []
    watched = sampler.native_id

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and threading.get_native_id() == watched:
            opened.append(arguments[0])

    sys.addaudithook(hook)  # for good; afterwards it hears nothing
    assert looked(sampler, 20)
    watched = None
    assert not opened
    assert sampler._running._descriptor == -1 or sampler._running._descriptor >= 900


def test_a_script_that_takes_the_samplers_descriptor_keeps_it(sampler: Sampler, tmp_path: Path) -> None:
    number = sampler._running._descriptor
    if number < 0:
        pytest.skip("this kernel has no scheduler statistics")
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    os.write(mine, b"1 2 3")
    os.lseek(mine, 1, os.SEEK_SET)
    os.dup2(mine, number)
    os.close(mine)
    assert looked(sampler, 5)
    sampler.close()
    sampler.join(DEADLINE)
    assert os.lseek(number, 0, os.SEEK_CUR) == 1
    os.close(number)
    assert sampler.take()[-1]


def test_a_script_that_closes_all_descriptors_is_still_sampled(sampler: Sampler) -> None:
    if sampler._running._descriptor >= 0:
        os.close(sampler._running._descriptor)
    assert looked(sampler, 5)


@pytest.mark.parametrize("step", [0.02, 0.1, 0.107, 0.3, 0.55, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.00005, 0.0002, 0.001])
def test_looks_stay_within_their_share_and_fall_on_all_parts_of_a_step(step: float, cost: float) -> None:
    pause = pause_of(step, cost)
    assert pause >= max(EVERY, cost / SHARE)
    if pause >= 2.5 * step:  # the jitter is a quarter of a step and more
        return
    parts = sorted(at * pause / step % 1 for at in range(21))
    assert max(after - before for before, after in zip(parts, [*parts[1:], parts[0] + 1], strict=True)) < 0.2


def test_the_pause_where_nothing_is_known() -> None:
    assert pause_of(0.0, 0.0) == EVERY
    assert pause_of(1000.0, 0.0) <= SLOWEST * 1.01
