from __future__ import annotations

from outlast.inprocess.worker.abort import to_outlive_watchdog


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
