"""Copies from devices: what arrives, with tensors of the host; how many, with tensors without content."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.checkpoint.content import transfers
from outlast.checkpoint.content.transfers import CopyPlan, copy_tensors, octets_of

_TYPES = (torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2, torch.complex64, torch.int64)


class Transferred(TorchDispatchMode):
    """Counts copies from a device to the host, and the largest tensor that is made on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        if func is torch.ops.aten.copy_.default and args[1].device.type == "cuda" != args[0].device.type:
            self.counts["placed"] += 1
        elif isinstance(found, torch.Tensor) and found.device.type == "cuda" and not func.is_view:
            self.largest = max(self.largest, found.numel() * found.element_size())
        return found


def _begins(tensors: list[torch.Tensor]) -> list[int]:
    sizes = (one.numel() * one.element_size() for one in tensors)
    return list(itertools.accumulate(sizes, initial=0))


def _sent(tensors: list[torch.Tensor]) -> Transferred:
    """Send tensors to an image in which they follow each other."""
    *begins, nbytes = _begins(tensors)
    plan, image = CopyPlan.of(tensors, begins), torch.empty(nbytes, dtype=torch.uint8)
    with Transferred() as seen:
        plan.send(tensors, image)
    return seen


def test_a_save_of_40_000_tensors_has_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        small, large = torch.empty(100, device="cuda"), torch.empty(1 << 20, device="cuda")
        assert _sent([small] * 390 + [large] * 10).counts == {"placed": 11}
    monkeypatch.setattr(transfers, "_is_here", lambda _: False)  # tensors of the host, treated alike
    seen = _sent([torch.ones(100)] * 39_990 + [torch.ones(1 << 18)] * 10)
    assert (seen.calls["cat"], seen.calls["copy_"]) == (1, 11)


@pytest.mark.parametrize(("count", "runs"), [(400, 1), (40_000, 1), (200_000, 2)])
def test_a_plan_sends_small_tensors_that_follow_each_other_in_one_copy(count: int, runs: int) -> None:
    """Of a device; 80 MB are two parts of at most 64 MiB."""
    with FakeTensorMode():
        tensors = [torch.empty(100, device="cuda")] * count + [torch.empty(1 << 20, device="cuda")]
        plan = CopyPlan.of(tensors, _begins(tensors)[:-1])
        seen = _sent(tensors)
    assert (plan.rest, plan.moves, len(plan.runs)) == ([count], [], runs)
    assert seen.counts == {"placed": runs + 1}
    assert seen.largest <= transfers.GATHERED


def test_small_tensors_are_gathered_in_parts() -> None:
    with FakeTensorMode():
        seen = _sent([torch.empty(1 << 17, device="cuda")] * 384)  # of 512 KiB, 192 MiB in all
    assert seen.counts == {"placed": 3}
    assert seen.largest == transfers.GATHERED


def test_no_copy_crosses_a_seam_of_registered_memory() -> None:
    with FakeTensorMode():
        image = torch.empty(3 * transfers.WINDOW, dtype=torch.uint8)
        one = torch.empty(transfers.WINDOW + 2, dtype=torch.uint8, device="cuda")
        with Transferred() as seen:
            CopyPlan.of([one], [transfers.WINDOW - 1]).send([one], image)
    assert seen.counts == {"placed": 3}


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    kind = draw(st.sampled_from(_TYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    octets = torch.randint(0, 2, (*shape, kind.itemsize), dtype=torch.uint8)
    one = octets.view(kind).squeeze(-1) if shape or kind.itemsize else octets.view(kind)
    if len(shape) > 1 and draw(st.booleans()):
        one = one.transpose(0, 1)
    return one.conj() if kind.is_complex and draw(st.booleans()) else one


@contextlib.contextmanager
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SMALL": 64, "GATHERED": 100, "WINDOW": 128}.items():
            patch.setattr(transfers, name, value)
        patch.setattr(
            transfers, "_is_here", lambda _: False
        )  # a tensor of the host stands for one of a device
        yield


def test_a_permuted_tensor_is_made_contiguous_in_parts() -> None:
    one = torch.arange(1 << 12, dtype=torch.int16).view(1, 64, 64).transpose(1, 2)
    image = torch.empty(1 << 13, dtype=torch.uint8)
    with _small_limits(), Transferred() as seen:
        copy_tensors([(one, 0)], image, 1)
    assert torch.equal(image.view(torch.int16), one.reshape(-1))
    assert seen.calls["clone"] == 128  # 64 rows of 128 bytes, and 100 at a time


@given(tensors=st.lists(_tensors(), max_size=12), gap=st.integers(0, 1))
def test_a_plan_brings_every_byte_to_its_place(tensors: list[torch.Tensor], gap: int) -> None:
    """Tiny tensors of one type that follow each other go together; the plan serves others of the form."""
    begins, at = [], 0
    for one in tensors:
        begins.append(at)
        at += one.numel() * one.element_size() + gap
    expected, image = (torch.full((at + 1,), 255, dtype=torch.uint8) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_TINY": 64, "_RUN": 100}.items():
            patch.setattr(transfers, name, value)
        plan = CopyPlan.of(tensors, begins)
        for _ in range(2):
            for one, begin in zip(tensors, begins, strict=True):
                torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()).random_(0, 2)  # type: ignore[call-overload]
                octets = octets_of(one)
                expected[begin : begin + octets.numel()] = octets
            plan.copy(tensors, image, 2)
            assert torch.equal(image, expected)


def test_a_context_of_autocast_does_not_reach_a_copy() -> None:
    tensors = [torch.full((3,), number, dtype=torch.float16) for number in range(4)]
    image = torch.zeros(24, dtype=torch.uint8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        copy_tensors(zip(tensors, range(0, 24, 6), strict=True), image, 1)
    assert torch.equal(image.view(torch.float16), torch.cat(tensors))


def test_a_tensor_of_one_element_may_have_any_stride() -> None:
    one, image = torch.arange(4.0)[1::2][:1], torch.zeros(4, dtype=torch.uint8)
    copy_tensors([(one, 0)], image, 1)
    assert image.view(torch.float32).tolist() == [1.0]


def test_40_000_tensors_of_the_host_are_copied_in_few_calls() -> None:
    tensors = [torch.full((100,), number) for number in range(40_000)]
    plan = CopyPlan.of(tensors, range(0, 800 * len(tensors), 800))
    image = torch.zeros(800 * len(tensors), dtype=torch.uint8)
    with Transferred() as seen:
        plan.copy(tensors, image, 1)
    assert seen.calls["cat"] == 8  # of 4 MiB each
    assert torch.equal(image.view(torch.int64), torch.arange(40_000).repeat_interleave(100))


@given(tensors=st.lists(_tensors(), max_size=12))
def test_every_byte_arrives_in_its_place(tensors: list[torch.Tensor]) -> None:
    expected = torch.cat([octets_of(one) for one in tensors] + [torch.zeros(1, dtype=torch.uint8)])
    image = torch.full_like(expected, 255)
    image[-1] = 0
    pairs, at = [], 0
    for one in tensors:
        pairs.append((one, at))
        at += one.numel() * one.element_size()
    with _small_limits():
        copy_tensors(pairs, image, 1)
    assert torch.equal(image, expected)


def test_each_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []

    class Stream:
        def __init__(self, device: object) -> None:
            self._device = device

        def synchronize(self) -> None:
            waited.append(str(self._device))

    with FakeTensorMode():
        tensors = [torch.empty(1 << number, device=f"cuda:{number % 2}") for number in range(6)]
        *begins, nbytes = _begins(tensors)
        devices = CopyPlan.of(tensors, begins).send(tensors, torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(CopyPlan, "send", lambda *_: devices)
    copy_tensors([], torch.empty(1, dtype=torch.uint8), 1)
    assert sorted(waited) == ["cuda:0", "cuda:1"]
