"""Rank 0 destroys a group in which a collective waits for rank 1; told to the test's store.

argument: port of the test's store
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from outlast.inprocess.worker.abort import abort_process_groups, destroy_process_groups, devices_left

PATIENCE = timedelta(seconds=120)
rank = int(os.environ["RANK"])
told = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=PATIENCE)


def tell(key: str) -> None:
    left = devices_left()
    told.set(f"{key}-{rank}", f"{left.devices} devices, {left.waiting} waiting")


dist.init_process_group("gloo", store=told, rank=rank, world_size=2, timeout=PATIENCE)
told.set(f"pending-{rank}", "yes")
if rank == 0:
    dist.all_reduce(torch.ones(1000), async_op=True)
    destroy_process_groups()
    tell("left")
    told.wait(["abort-1"])
    while (found := abort_process_groups("a test")).failed:  # a busy host seldom shows gloo's thread
        print(found, flush=True)
    while devices_left().devices:  # the test waits no longer than its deadline
        time.sleep(0.001)
    tell("left-then")
told.wait(["end"])
