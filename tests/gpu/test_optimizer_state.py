"""An optimizer's state on a GPU comes back in the memory order and on the device that its kernels rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import checkpointer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW capturable": (torch.optim.AdamW, {"capturable": True}),
    "SGD fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop capturable": (torch.optim.RMSprop, {"capturable": True, "momentum": 0.9}),
}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Training:
    def __init__(self, kind: str, memory_format: torch.memory_format, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        self.model = model.to(device="cuda", dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        cls, options = OPTIMIZERS[kind]
        lr: Any = torch.tensor(1e-2, device="cuda") if options.get("capturable") else 1e-2
        self.optimizer = cls(self.model.parameters(), lr=lr, **options)  # type: ignore[call-arg]
        self.dtype = dtype

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator("cuda").manual_seed(step)
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.grad = torch.empty_like(parameter).copy_(noise)
            self.optimizer.step()

    def content(self) -> list[tuple[torch.Tensor, tuple[int, ...], str]]:
        tensors = list(self.model.state_dict().values())
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [one for one in state.values() if isinstance(one, torch.Tensor)]
        lr = self.optimizer.param_groups[0]["lr"]
        tensors += [lr] if isinstance(lr, torch.Tensor) else []
        return [(one.detach().clone(), one.stride(), one.device.type) for one in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_resumed_optimizers_go_on_bit_for_bit(tmp_path: Path, memory_format: str, dtype: torch.dtype) -> None:
    for kind in OPTIMIZERS:
        resume(tmp_path / kind, kind, memory_format, dtype)


def resume(folder: Path, kind: str, memory_format: str, dtype: torch.dtype) -> None:
    calm = Training(kind, FORMATS[memory_format], dtype)
    calm.train(0, 3)
    assert checkpointer(folder).save(3, calm.state, "a test")
    calm.train(3, 6)
    resumed = Training(kind, FORMATS[memory_format], dtype)
    found = checkpointer(folder, generation=2).restore(resumed.state, ())
    assert found is not None
    assert found.step == 3
    resumed.train(3, 6)
    for (one, stride, device), (other, its_stride, its_device) in zip(
        calm.content(), resumed.content(), strict=True
    ):
        assert (stride, device) == (its_stride, its_device), kind
        assert torch.equal(one, other), kind


def test_a_graph_sees_the_learning_rate_that_a_rollback_brings_back(tmp_path: Path) -> None:
    training = Training("AdamW capturable", torch.channels_last, torch.float32)
    training.train(0, 1)
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training.optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.optimizer.step()
    saver = checkpointer(tmp_path)
    assert saver.save(3, training.state, "a test")
    passes = []
    for _ in range(2):
        training.optimizer.param_groups[0]["lr"].mul_(0.5)
        for _ in range(3):
            graph.replay()
        passes.append(training.content())
        assert saver.restore(training.state, ()) is not None
    for (one, *_), (other, *_) in zip(*passes, strict=True):
        assert torch.equal(one, other)
