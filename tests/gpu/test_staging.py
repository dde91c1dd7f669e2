"""What a save stages of a GPU, and what a digest says of it, against a copy that waits for everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outlast.checkpoint.content.tensor_digest import digest_of_copy, digests_of
from outlast.checkpoint.content.transfers import copy_tensors, octets_of
from outlast.checkpoint.save.buffers import Mapping
from outlast.config import CheckpointOptions
from tests.checkpoint.jobs.test_staging import Staging, expected, same
from tests.support.jobs import checkpointer

_STEPS = 6


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2048, 2048), torch.nn.LayerNorm(2048), torch.nn.Linear(2048, 8)
    )
    model.cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, times: int = 20) -> None:
    for _ in range(times):  # many kernels are enqueued when the save begins
        optimizer.zero_grad()
        model(torch.randn(256, 2048, device="cuda")).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("stream", ["default stream", "side stream"])
def test_the_bytes_are_those_of_the_step(tmp_path: Path, lazily: bool, stream: str) -> None:
    staging = Staging(tmp_path / "memory")
    model, optimizer = _training()
    optimizer.register_step_pre_hook(lambda *_: staging.stager.until_copied())
    side = torch.cuda.Stream() if stream == "side stream" else torch.cuda.current_stream()
    with torch.cuda.stream(side):
        for step in range(1, _STEPS):
            _train(model, optimizer)
            state: dict[str, object] = {"model": model, "optimizer": optimizer}
            found = staging.content(step, state, lazily)
            torch.cuda.synchronize()
            reference = {name: _on_host(one) for name, one in expected(state).items()}
            assert same(dict(found["model"]), reference["model"])
            assert same(found["optimizer"]["state"], reference["optimizer"]["state"])


def _on_host(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    return value


def test_a_graph_that_steps_the_optimizer_is_not_staged_while_it_is_replayed(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "memory")
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: staging.stager.until_copied())
    inputs = torch.randn(64, 4096, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(1, _STEPS):
        graph.replay()
        before = model.weight.detach().clone()
        found = staging.content(number, {"model": model, "optimizer": optimizer}, lazily=True)
        graph.replay()
        assert torch.equal(found["model"]["weight"], before.cpu())


def test_registered_memory_takes_every_byte_of_40_000_tensors() -> None:
    tensors = [torch.randn(100 + number % 7, device="cuda") for number in range(39_990)]
    tensors += [torch.randn(3, 1 << 20, device="cuda").t() for _ in range(10)]
    begins, at = [], 0
    for one in tensors:
        begins.append(at)
        at += one.numel() * one.element_size()
    memory = Mapping(-1, at)
    memory.register(torch.cuda.current_device())
    assert memory.registered
    image = torch.frombuffer(memory, dtype=torch.uint8)
    assert image.is_pinned()
    copy_tensors(zip(tensors, begins, strict=True), image, 4)
    for one, begin in zip(tensors, begins, strict=True):
        octets = octets_of(one).cpu()
        assert torch.equal(image[begin : begin + octets.numel()], octets)


def test_one_bit_changes_a_digest_and_the_order_of_adding_does_not() -> None:
    one = torch.randn(40 << 20, device="cuda")
    (first,) = digests_of([one])
    assert [digests_of([one.clone()]) for _ in range(5)] == [[first]] * 5
    for tensor in (one, one[:999]):
        assert digest_of_copy(octets_of(tensor).cpu(), tensor) == digests_of([tensor])[0]
    other = one.clone()
    other.view(torch.int32)[12_345_678] ^= 1
    assert digests_of([other]) != [first]


def test_random_states_of_a_gpu_come_back() -> None:
    from outlast.checkpoint.content.random_states import capture_random, restore_random

    torch.randn(9, device="cuda")
    kept = capture_random()
    first = torch.randn(9, device="cuda")
    restore_random(kept)
    assert torch.equal(torch.randn(9, device="cuda"), first)


def test_a_captured_graph_sees_the_restored_learning_rate(tmp_path: Path) -> None:
    """The rate stays the tensor that the graph reads, on its device."""

    def made(rate: float) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
        lr = torch.tensor(rate, device="cuda")
        return torch.optim.Adam([weight], lr=lr, capturable=True)

    options = CheckpointOptions(async_save=False)
    saved, resumed = made(0.5), made(0.1)
    assert checkpointer(tmp_path, settings=options).save(1, {"optimizer": saved}, "a test")
    rate = resumed.param_groups[0]["lr"]
    read = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read.copy_(rate)
    loader = checkpointer(tmp_path, generation=2, settings=options)
    assert loader.restore({"optimizer": resumed}) is not None
    assert resumed.param_groups[0]["lr"] is rate
    graph.replay()
    assert read.item() == 0.5
