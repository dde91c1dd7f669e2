"""In-process restart on a GPU: the device check, and NCCL's abort. One process, one rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from outlast._torch_compat import forks_lack_cuda, gpu_sleep
from outlast.errors import DeviceUnusable
from outlast.inprocess.worker.abort import (
    abort_process_groups,
    destroy_process_groups,
    to_outlive_watchdog,
)
from outlast.inprocess.worker.device import require_usable


def test_a_device_that_works_is_usable() -> None:
    torch.ones(1, device="cuda")
    require_usable()


def test_an_illegal_access_makes_the_process_unusable() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError):
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()
    with pytest.raises(DeviceUnusable, match="unusable"):
        require_usable()


def test_a_question_for_cuda_poisons_forks() -> None:
    asked = "import torch; torch.cuda.is_available(); from outlast._torch_compat import forks_lack_cuda"
    line = [sys.executable, "-c", f"{asked}; raise SystemExit(int(forks_lack_cuda()))"]
    assert subprocess.run(line, timeout=120, check=False).returncode == 1
    torch.ones(1, device="cuda")
    assert forks_lack_cuda()


def test_a_group_of_nccl_is_aborted_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in to_outlive_watchdog(os.environ).items():
        monkeypatch.setenv(name, value)
    torch.cuda.set_device(0)
    used = []
    for number in range(10):
        dist.init_process_group("nccl", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1)
        dist.all_reduce(torch.ones(1 << 20, device="cuda"))
        if number % 2:
            gpu_sleep(1 << 30)
            dist.all_reduce(torch.ones(1 << 20, device="cuda"))
        began = time.monotonic()
        aborted = abort_process_groups("a test")
        destroy_process_groups()
        print(f"abort {number}: {time.monotonic() - began:.2f} s, {aborted}")
        assert not aborted.failed
        require_usable()
        used.append(torch.cuda.memory_reserved())
    assert used[-1] <= 2 * max(used[:2])
