from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from outlast.errors import DeviceUnusable
from outlast.inprocess.worker.abort import to_outlive_watchdog
from outlast.inprocess.worker.device import require_usable


def test_a_process_without_a_device_and_one_whose_device_works_go_on() -> None:
    require_usable()
    require_usable(lambda: None)


def test_the_device_in_use_is_checked_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        used.append(device)
        yield

    doubles = {
        "is_initialized": lambda: True,
        "current_device": lambda: 5,
        "device": on,
        "synchronize": lambda: used.append("synchronised"),
        "empty_cache": lambda: used.append("emptied"),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda count, device: (used.append(device), ones(count))[1])
    require_usable()
    assert used == [5, "synchronised", "cuda", "emptied"]


def test_an_error_of_the_device_is_named() -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceUnusable, match="RuntimeError: CUDA error: an illegal memory access"):
        require_usable(fails)


def test_a_device_that_does_not_answer_is_unusable() -> None:
    answer = threading.Event()
    with pytest.raises(DeviceUnusable, match=r"0\.05 s"):
        require_usable(lambda: answer.wait() and None, within=0.05)
    answer.set()


def test_nccls_watchdog_does_not_end_a_process_that_is_to_enter_again() -> None:
    assert to_outlive_watchdog({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}) == {  # torchrun's
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
        "NCCL_NVLS_ENABLE": "0",
    }


def test_what_the_user_has_set_stays() -> None:
    users = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_NVLS_ENABLE": "1"}
    assert not users.keys() & to_outlive_watchdog(users).keys()
