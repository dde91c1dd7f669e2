"""Looks at kernels by torch's profiler, at operators of the CPU here; the script's profilers go first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import ProfilerActivity, profile, schedule

from outlast import _torch_compat
from outlast.stragglers.worker import kernels
from outlast.stragglers.worker.kernels import EMPTY, MOST_KERNELS, NAME, Kernels

MATRIX = torch.ones(8, 8)


def work() -> None:
    torch.add(MATRIX, MATRIX)
    torch.add(MATRIX, MATRIX)


def looked(one: Kernels, do: Callable[[], None] = work) -> dict[str, int]:
    one.begin()
    do()
    return {name: len(taken) for name, taken in one.end().items()}


def events(of: profile) -> dict[str, int]:
    return {one.key: one.count for one in of.key_averages()}


def ours(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("[outlast]")]


@pytest.fixture(autouse=True)
def nothing_runs_afterwards() -> Iterator[None]:
    yield
    KinetoStepTracker.erase_step_count("ProfilerStep")  # of profilers that were stopped and not left
    assert not _torch_compat.profiler_runs()


def test_each_call_of_an_operator_within_a_look_has_its_time() -> None:
    one = Kernels(on_device=False)
    for _ in range(2):
        assert one.begin()
        work()
        found = one.end()
        assert (list(found), len(found["aten::add"])) == (["aten::add"], 2)
        assert all(0 < taken < 60 for taken in found["aten::add"])
        work()
        assert one.end() == {}


def test_a_look_within_a_look_is_not_begun() -> None:
    outer, inner = Kernels(on_device=False), Kernels(on_device=False)
    assert outer.begin()
    assert not outer.begin()
    assert not inner.begin()
    assert inner.end() == {}
    work()
    assert len(outer.end()["aten::add"]) == 2


def test_no_look_is_begun_while_a_profiler_of_the_script_runs_which_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = Kernels(on_device=False)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as theirs:
            assert looked(one) == {}
        assert events(theirs)["aten::add"] == 2
    assert len(ours(capsys)) == 1
    assert looked(one) == {"aten::add": 2}


def test_nor_while_one_waits_or_warms_up() -> None:
    one = Kernels(on_device=False)
    seen: list[dict[str, int]] = []
    stages = schedule(wait=1, warmup=1, active=2, repeat=1)
    done: list[dict[str, int]] = []
    with profile(schedule=stages, on_trace_ready=lambda found: done.append(events(found))) as theirs:
        for _ in range(5):
            seen.append(looked(one))
            theirs.step()
    assert seen == [{}] * 5
    assert [found["aten::add"] for found in done] == [4]


def test_a_profiler_that_the_script_begins_and_ends_within_a_look_is_whole() -> None:
    one = Kernels(on_device=False)
    assert one.begin()
    work()
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        work()
    assert one.end() == {}
    assert events(theirs)["aten::add"] == 2
    assert looked(one) == {"aten::add": 2}


def test_so_is_one_that_goes_on_after_the_look() -> None:
    one = Kernels(on_device=False)
    assert one.begin()
    theirs = profile(activities=[ProfilerActivity.CPU])
    theirs.start()
    work()
    assert one.end() == {}
    work()
    assert not one.begin()
    theirs.stop()
    assert events(theirs)["aten::add"] == 4


@pytest.mark.parametrize("wait", [0, 1])
def test_so_is_one_with_a_schedule_that_starts_within_a_look(wait: int) -> None:
    one = Kernels(on_device=False)
    assert one.begin()
    theirs = profile(schedule=schedule(wait=wait, warmup=1, active=1, repeat=1))
    theirs.start()
    work()
    one.end()
    for _ in range(wait + 2):
        work()
        theirs.step()
    assert events(theirs)["aten::add"] == 2
    theirs.stop()
    assert looked(one) == {}  # torch does not tell that a profiler is over that was only stopped


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("pretends", [False, True])
def test_without_cuda_or_a_profiler_of_it_no_look_is_taken_which_is_told_once(
    pretends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch refuses to record CUDA where there is none."""
    if pretends:
        monkeypatch.setattr(Kernels, "_device_works", lambda _: True)
    one = Kernels()
    assert [looked(one) for _ in range(3)] == [{}] * 3
    (line,) = ours(capsys)
    assert ("CUDA" in line) or pretends


def test_looks_that_find_nothing_end(capsys: pytest.CaptureFixture[str]) -> None:
    one = Kernels(on_device=False)
    for _ in range(EMPTY - 1):
        assert looked(one, lambda: None) == {}
    assert looked(one) == {"aten::add": 2}  # counts anew
    for _ in range(EMPTY):
        assert looked(one, lambda: None) == {}
    assert not one.begin()
    (line,) = ours(capsys)
    assert "CUPTI" in line


def test_names_and_their_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ncclDevKernel_AllReduce", "Memcpy HtoD", "Memset (Device)", "x" * 500 + "1", "x" * 500 + "2"]
    names += [f"kernel-{number}" for number in range(2 * MOST_KERNELS)]
    monkeypatch.setattr(_torch_compat, "begin_profile", lambda _: None)
    monkeypatch.setattr(_torch_compat, "end_profile", lambda _, most: [(name, 1e-6) for name in names][:most])
    found = looked(Kernels(on_device=False), lambda: None)
    assert len(found) == MOST_KERNELS
    assert not any(name.startswith(("nccl", "Mem")) for name in found)
    long = [name for name in found if name.startswith("x")]
    assert [len(name) for name in long] == [NAME] * 2
    monkeypatch.setattr(kernels, "MOST_EVENTS", 4)
    assert len(looked(Kernels(on_device=False), lambda: None)) == 1


def test_a_fork_takes_no_looks() -> None:
    one = Kernels(on_device=False)
    one._pid = os.getpid() + 1
    assert not one.begin()
