"""How many ranks "gpu", "cpu" and "auto" are, counted as torch counts, without torch."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outlast._torch_compat import device_uuid
from outlast.health.agent.devices import rank_count, virtual_gpus, visible


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


@pytest.mark.parametrize("text", ["0", "-2", "many", "", "²", "1.5", "xpu", "4097", "9" * 5000])
def test_what_is_no_count(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected|XPU"):
        rank_count(text, {"PATH": ""}, tmp_path)


def test_an_amd_gpu_is_not_counted_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    for word in ("gpu", "auto"):
        with pytest.raises(ValueError, match="AMD"):
            rank_count(word, {"PATH": ""}, tmp_path)
    assert rank_count("8", {"PATH": ""}, tmp_path) == 8


def test_virtual_ranks_are_refused_where_hip_would_not_read_their_variable(tmp_path: Path) -> None:
    both = {"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "6,7"}
    assert virtual_gpus(2, both, tmp_path) == ("6", "7")  # no AMD GPU here: nobody reads it
    (tmp_path / "kfd").touch()
    assert virtual_gpus(2, {"ROCR_VISIBLE_DEVICES": "4,5"}, tmp_path) == (
        "0",
        "1",
    )  # numbers of what it leaves
    assert virtual_gpus(2, {"HIP_VISIBLE_DEVICES": ""}, tmp_path) == ("0", "1")
    with pytest.raises(ValueError, match="HIP_VISIBLE_DEVICES=4,5"):
        virtual_gpus(2, both, tmp_path)


@pytest.mark.parametrize(
    ("name", "uuid", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "5a-77", "GPU-5a-77"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "90-44", "MIG-90-44"),
        ("AMD Instinct MI300X", None, "AMD Instinct MI300X number 3"),
    ],
)
def test_a_device_is_called_what_nvml_calls_it(
    monkeypatch: pytest.MonkeyPatch, name: str, uuid: str | None, expected: str
) -> None:
    properties = SimpleNamespace(name=name, **({} if uuid is None else {"uuid": uuid}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert device_uuid(3) == expected
