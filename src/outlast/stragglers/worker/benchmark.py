"""The product that every rank computes between two steps, where a slow rank's node may be sick."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

from outlast.stragglers.policy.rows import BENCHMARK

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.ipc.heartbeat_page import HeartbeatPage

ENTRIES = 20  # of whose durations the median is told
LONGEST = 2.0  # seconds for all of them
_BEFORE = 3  # products in the first entry, which also makes the matrices and loads kernels
_REPEATS = {"cpu": 2, "cuda": 8}  # matrices of 512 x 512, and of 2048 x 2048: 256 tiles for the SMs of a GPU
_EACH = {"cpu": 8, "cuda": 50}  # products in an entry: tens of milliseconds, so that short stops show in each


def compute(page: HeartbeatPage) -> None:
    """Compute the product again and again, each time in a section of the page; nothing is raised.

    It runs on the device that this process uses, else on the CPU.

    Args:
        page: of this process.
    """
    import torch

    from outlast.health.worker import mixed_factors

    cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    section = page.section(BENCHMARK)
    end = monotonic() + LONGEST
    try:
        with section:
            where = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
            repeats = _REPEATS[where.type]
            left, right = (one.repeat(repeats, repeats).to(where) for one in mixed_factors())
            _multiply(left, right, _BEFORE)
        for _ in range(ENTRIES):
            if monotonic() > end:
                break
            with section:
                _multiply(left, right, _EACH[where.type])
    except RuntimeError as error:  # no memory is left, or the script has chosen what torch may not do
        sys.stderr.write(f"[outlast] this rank was not compared by a product: {error}\n")


def _multiply(left: Tensor, right: Tensor, times: int) -> None:
    """Multiply, and wait until it is done: an entry begins and ends with an idle device."""
    import torch

    for _ in range(times):
        torch.matmul(left, right)
    if left.is_cuda:
        torch.cuda.synchronize()
