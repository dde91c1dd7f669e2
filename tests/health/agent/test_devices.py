"""How many ranks "gpu", "cpu" and "auto" are, counted as torch counts, without torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.health.agent.devices import rank_count, visible


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name in (*(f"nvidia{at}" for at in range(8)), "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (None, 8),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("4,5", 2),
        (" 4, 5 ", 2),
        ("0,1,9,2", 2),
        ("3,3", 0),
        ("1gpu2,2ampere", 2),
        ("none", 0),
        ("GPU-5a,GPU-77,3", 2),
        ("GPU-5a,GPU-5a", 0),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(names: str | None, count: int) -> None:
    assert visible(names, 8) == count


def test_what_the_words_mean(host: Path) -> None:
    processors = len(os.sched_getaffinity(0))
    assert rank_count("3", {}, host) == 3
    assert rank_count("cpu", {}, host) == processors
    assert rank_count("gpu", {}, host) == rank_count("auto", {}, host) == 8
    assert rank_count("gpu", {"CUDA_VISIBLE_DEVICES": "4,5"}, host) == 2
    assert rank_count("auto", {"CUDA_VISIBLE_DEVICES": "-1"}, host) == processors


def test_processors_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert rank_count("cpu", {}) == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("names", ["", "-1", "9"])
def test_no_gpu_is_an_error_that_says_where_it_looked(host: Path, names: str) -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        rank_count("gpu", {"CUDA_VISIBLE_DEVICES": names}, host)


def test_a_host_without_device_files_is_asked_through_nvidia_smi(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: A (UUID: GPU-1)\\nGPU 1: A (UUID: GPU-2)\\n'\n")
    tool.chmod(0o755)
    assert rank_count("gpu", {"PATH": f"{tmp_path}:/usr/bin:/bin"}, tmp_path) == 2


@pytest.mark.parametrize("text", ["0", "-2", "many", "", "²", "1.5", "xpu"])
def test_what_is_no_count(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected|XPU"):
        rank_count(text, {"PATH": ""}, tmp_path)
