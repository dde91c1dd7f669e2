"""Abort, destroy and make groups anew many times in one process; print what it had open after some rounds.

arguments: port of the store, rounds
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast.inprocess.worker.abort import abort_process_groups, destroy_process_groups, devices_left

PATIENCE = timedelta(seconds=120)
rank, world, rounds = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[2])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=PATIENCE)
aside = store.clone()


def fail_in(number: int) -> None:
    """Train a little, then wait for the last rank, which fails instead."""
    place = dist.PrefixStore(f"round-{number}", store)
    dist.init_process_group("gloo", store=place, rank=rank, world_size=world, timeout=PATIENCE)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    later = dist.new_group(backend="gloo", timeout=PATIENCE)
    model(torch.ones(4, 64)).sum().backward()
    if rank == world - 1:
        store.set(f"abort-{number}", "now")
        raise RuntimeError("this rank fails")
    dist.all_reduce(torch.ones(3), group=later)


def abort(number: int) -> None:
    aside.wait([f"abort-{number}"])
    found = abort_process_groups("a test")
    assert not found.failed, found


def measure(number: int) -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return {"round": number, "files": files, "threads": threads, "resident": resident}


measured = []
for number in range(rounds):
    thread = threading.Thread(target=abort, args=(number,))
    thread.start()
    failed = False
    try:
        fail_in(number)
    except RuntimeError:
        failed = True
    assert failed
    thread.join()
    destroy_process_groups()
    if number % 10 == 9:
        measured.append({**measure(number), "held": devices_left().devices})
    store.set(f"done-{number}-{rank}", "yes")
    store.wait([f"done-{number}-{other}" for other in range(world)])
print(json.dumps(measured), flush=True)
