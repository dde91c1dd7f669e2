"""Whether the device of this process still works, before its function is entered again.

An error of CUDA such as an illegal memory access stays with the process: every later call fails, too. Such a
process is replaced, as NVRx's CudaHealthCheck does.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable

from outlast.errors import DeviceUnusable

_WITHIN = 30.0  # seconds; kernels that were enqueued before have to end, too


def require_usable(use: Callable[[], None] | None = None, within: float = _WITHIN) -> None:
    """Use the device that this process has used before; a process without one has nothing to check.

    Args:
        use: uses it, and raises if that fails; None: synchronise, allocate, compute, read back.
        within: seconds.

    Raises:
        DeviceUnusable: it fails, or does not answer.
    """
    if use is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        use = functools.partial(_use, torch.cuda.current_device())  # a thread begins with the first device
    errors: list[Exception] = []

    def tried() -> None:
        try:
            use()
        except Exception as error:  # noqa: BLE001 - raised on the thread that waits
            errors.append(error)

    thread = threading.Thread(target=tried, name="device check", daemon=True)
    thread.start()
    thread.join(within)
    if thread.is_alive():
        raise DeviceUnusable(f"the device did not answer within {within:g} s; this process is replaced")
    if errors:
        raise DeviceUnusable(
            f"the device is unusable: {type(errors[0]).__name__}: {errors[0]}; this process is replaced"
        ) from errors[0]


def _use(device: int) -> None:
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        found = float((torch.ones(64, device="cuda") * 2).sum())
        torch.cuda.empty_cache()  # what the call before has left
    if found != 128:
        raise ArithmeticError(f"found {found} as the sum of 64 twos, expected 128")
