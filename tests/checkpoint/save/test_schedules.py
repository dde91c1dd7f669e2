"""No order in which a device may run what it was given stages a torn state: a device that takes any order."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from outlast.checkpoint.save.staging import DeviceMoment

_STEPS = 5
with FakeTensorMode():
    _TENSOR = torch.empty(2, device="cuda:0")
Operation = Callable[[], bool]  # False: what it waits for is not there yet


class Device:
    """Streams whose operations run in any order that streams and events allow, and no sooner than drawn."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.weights = [0, 0]

    def advance(self, done: Callable[[], bool]) -> None:
        """Run operations until a condition holds."""
        while not done():
            ready = [one for one in self.streams if one.queue]
            self._order.shuffle(ready)
            for stream in ready:
                if stream.queue[0]():
                    stream.queue.popleft()
                    break
            else:
                raise AssertionError("the streams wait for each other")

    def some(self) -> None:
        """Run a few operations, if there are any."""
        left = self._order.randrange(4)
        for _ in range(left):
            before = sum(len(one.queue) for one in self.streams)
            if before:
                self.advance(lambda before=before: sum(len(one.queue) for one in self.streams) < before)  # type: ignore[misc]


class Stream:
    """A queue of a device."""

    def __init__(self, device: Device) -> None:
        self.queue: deque[Operation] = deque()
        self._device = device
        device.streams.append(self)

    def put(self, do: Callable[[], None]) -> None:
        """Give it something to do."""
        self.queue.append(lambda: do() is None)

    def record_event(self) -> list[bool]:
        """Return what holds true once all before it is done."""
        event: list[bool] = []
        self.put(lambda: event.append(True))
        return event

    def wait_event(self, event: list[bool]) -> None:
        """Hold back what comes after, until then."""
        self.queue.append(lambda: bool(event))

    def synchronize(self) -> None:
        """Wait until all is done."""
        self._device.advance(lambda: not self.queue)


def _train(device: Device, order: random.Random) -> list[tuple[int, list[int]]]:
    """Train, and save lazily after some steps; return what was staged, with the step."""
    staged: list[tuple[int, list[int]]] = []
    training = device.current
    for step in range(1, _STEPS + 1):
        for _ in range(order.randrange(3)):
            training.put(lambda: None)  # forward and backward
        for half in (0, 1):  # the optimizer's step
            training.put(lambda half=half, step=step: device.weights.__setitem__(half, step))  # type: ignore[misc]
        device.some()
        if order.random() < 0.6:
            found: list[int] = []
            staged.append((step, found))
            moment = DeviceMoment([_TENSOR])
            for _ in range(order.randrange(3)):
                training.put(lambda: None)
            device.some()
            with moment.awaited():  # the thread; the hook before the next step waits for its end
                for half in (0, 1):
                    device.current.put(
                        lambda half=half, found=found: found.append(device.weights[half])  # type: ignore[misc]
                    )
    device.advance(lambda: not any(one.queue for one in device.streams))
    return staged


def _torn(seed: int, patch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    order = random.Random(seed)
    device = Device(order)

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        yield
        device.current = before

    patch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    patch.setattr(torch.cuda, "Stream", lambda _: Stream(device))
    patch.setattr(torch.cuda, "stream", use)
    return [(step, found) for step, found in _train(device, order) if found != [step, step]]


@given(seed=st.integers(0, 2**32))
def test_what_is_staged_is_the_state_after_the_step(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert not _torn(seed, patch)


@pytest.mark.parametrize("forgotten", ["wait_event", "synchronize"])
def test_a_wait_that_is_forgotten_is_found(forgotten: str, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, forgotten, lambda *_: None)
        assert any(_torn(seed + number, patch) for number in range(100))
