"""One of two ranks of bench/gpu.py: rank 1 is killed in a collective, rank 0 aborts and lives on, if it can.

gpu_rank.py with|without FILE cuda|cpu SECONDS RANK: with or without the variables of an in-process restart.
The last line says "lived".
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from outlast.inprocess.worker.abort import abort_process_groups, destroy_process_groups, to_outlive_watchdog
from outlast.inprocess.worker.device import require_usable

MET = 2.0  # seconds after which the survivor has seen that its peer is gone, and aborts


def main() -> None:
    how, file, device, seconds, rank = *sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5])
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL refuses two ranks on one GPU otherwise
    if how == "with":
        os.environ.update(to_outlive_watchdog(os.environ))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=2)
    one = torch.ones(1 << 20, device=device)
    dist.all_reduce(one)
    print(f"the ranks have met: {float(one[0])}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):  # gloo says at once that the peer is gone
        dist.all_reduce(one, async_op=True)
    time.sleep(MET)
    began = time.monotonic()
    failed = abort_process_groups("a benchmark").failed
    destroy_process_groups()
    print(f"aborted in {time.monotonic() - began:.2f} s; failed: {failed}", flush=True)
    require_usable()
    time.sleep(seconds)
    print("lived", flush=True)


if __name__ == "__main__":
    main()
