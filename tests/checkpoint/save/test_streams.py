"""The order of what a save asks of a device, on doubles of streams and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outlast.checkpoint.content.state import capture
from outlast.checkpoint.save.staging import DeviceMoment, _of_optimizers


@dataclass(frozen=True)
class Stream:
    name: str
    log: list[str]

    def record_event(self) -> str:
        self.log.append(f"record on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name} is done")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        found.append(f"use {stream.name}")
        yield
        found.append(f"leave {stream.name}")

    doubles: dict[str, Any] = {
        "current_stream": lambda device: Stream(f"training's {device}", found),
        "Stream": lambda device: Stream(f"ours {device}", found),
        "stream": use,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    return found


def test_a_copy_follows_what_was_enqueued_before_on_a_stream_of_its_own(log: list[str]) -> None:
    with FakeTensorMode():
        tensors = [torch.empty(2, device="cuda:0"), torch.empty(2, device="cuda:0"), torch.empty(2)]
    moment = DeviceMoment(tensors)
    log.append("the call returns")
    with moment.awaited():
        log.append("copy")
    assert log == [
        "record on training's cuda:0",
        "the call returns",
        "ours cuda:0 waits for event of training's cuda:0",
        "use ours cuda:0",
        "copy",
        "ours cuda:0 is done",
        "leave ours cuda:0",
    ]


def test_tensors_on_the_host_need_no_stream(log: list[str]) -> None:
    with DeviceMoment([torch.empty(2)]).awaited():
        pass
    assert log == []


@pytest.mark.parametrize("capturable", [False, True])
def test_what_a_graph_may_replay_is_copied_before_the_call_returns(capturable: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = capturable
    state = {"model": model, "optimizer": optimizer}
    late = _of_optimizers(state, capture(state))
    assert bool(late) is not capturable
