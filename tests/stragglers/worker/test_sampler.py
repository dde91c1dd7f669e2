"""What the training thread does, by its frames and by how long it ran."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage
from outlast.stragglers.policy.measuring import Doing
from outlast.stragglers.worker.sampler import Frames, Sampler
from tests.support.jobs import DEADLINE


class Here:
    """Looks at its caller, from where a script would be."""

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.found: list[tuple[Doing, Doing]] = []

    def look(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        self.found.append(Frames().doing(frame, self.cuda))

    def wait(self) -> None:
        """A method named wait that, as a collective's, is no frame of Python: its caller is looked at."""
        frame: FrameType | None = sys._getframe(1)
        self.found.append(Frames().doing(frame, self.cuda))


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
    sampler.begin()
    seconds, deadline = 0.0, time.monotonic() + DEADLINE
    while seconds < 0.1 and time.monotonic() < deadline:
        with section:
            time.sleep(0.02)
        seconds += sampler.take().get(section.slot, {}).get(Doing.COMPUTING, 0.0)
    sampler.close()
    assert seconds >= 0.1
    assert not sampler.failure


def test_a_sampler_that_fails_ends_without_harm() -> None:
    sampler = Sampler(HeartbeatPage(bytearray(PAGE_BYTES)))
    sampler._frames = None  # type: ignore[assignment]  # a fault of our own
    sampler.begin()
    sampler.join(DEADLINE)
    assert "NoneType" in sampler.failure
