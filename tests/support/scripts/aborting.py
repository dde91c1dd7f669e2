"""Wait in a collective for a rank that never comes, be aborted, and go on in the same process.

arguments: port of the test's store, port of the next store, what to wait in, and "hosts" if rank 0 has a
store, "twice" if each rank aborts a second time

Told to the test's store: ``pending-R`` (the rank waits) and ``result-R`` (JSON). The last rank only waits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from outlast.inprocess.worker.abort import Aborted, abort_process_groups, destroy_process_groups
from tests.support.bystanders import Bystanders

PATIENCE = timedelta(seconds=120)
own_port, next_port, wait_in, hosts = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "hosts"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last = world - 1
torch.set_num_threads(1)
told = TCPStore("127.0.0.1", own_port, timeout=PATIENCE)
again = TCPStore("127.0.0.1", next_port, timeout=PATIENCE)


def first_store() -> TCPStore:
    """The store of the first groups: served by the test, or by rank 0."""
    if not hosts:
        return told
    if rank == 0:
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        told.set("port", str(served.port))
        return served
    return TCPStore("127.0.0.1", int(told.get("port")), timeout=PATIENCE)


def call(group: dist.ProcessGroup | None) -> None:
    """Wait for the last rank."""
    tensor = torch.ones(1000)
    match wait_in:
        case "all_reduce":
            dist.all_reduce(tensor, group=group)
        case "barrier":
            dist.barrier(group=group)
        case "recv":
            dist.recv(tensor, src=last, group=group)
        case "monitored_barrier":
            dist.monitored_barrier(group=group, timeout=PATIENCE)
        case "work":
            dist.all_reduce(tensor, group=group, async_op=True).wait()


def asleep(thread: int) -> bool:
    """Whether a thread waits in the kernel for another: it is in the collective, not on its way there."""
    return "futex" in Path(f"/proc/self/task/{thread}/wchan").read_text()


def abort_when_told(main: int, found: list[Aborted]) -> None:
    own = told.clone()
    while not asleep(main):
        time.sleep(0.001)
    own.set(f"pending-{rank}", "yes")
    own.wait([f"abort-{rank}"])
    found.append(abort_process_groups("a test"))
    if sys.argv[4] == "twice":
        abort_process_groups("a test, again")


def wait_and_be_woken(group: dist.ProcessGroup | None) -> dict[str, object]:
    """What was raised where the rank waited, and what the abort said."""
    found: list[Aborted] = []
    thread = threading.Thread(target=abort_when_told, args=(threading.get_native_id(), found))
    thread.start()
    raised = "nothing"
    try:
        call(group)
    except RuntimeError as error:
        raised = str(error).splitlines()[0]
    told.set(f"raised-{rank}", raised)
    thread.join()
    return {"raised": raised, "groups": found[0].groups, "failed": found[0].failed}


def go_on(survivors: int) -> float:
    """Destroy everything and add something up in a new group of those that are left."""
    destroy_process_groups()
    dist.init_process_group("gloo", store=again, rank=rank, world_size=survivors, timeout=PATIENCE)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


bystanders = Bystanders()
bystanders.connect("before")
store = first_store()
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
bystanders.connect("between")
later = dist.new_group(backend="gloo", timeout=PATIENCE)
bystanders.connect("after")
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1), group=later)
if rank == last:
    told.set(f"pending-{rank}", "yes")
    told.wait(["end"])
    sys.exit()
result = wait_and_be_woken(None if wait_in == "monitored_barrier" else later)
store.set(f"still-{rank}", "here")
result["store"] = store.get(f"still-{rank}").decode()
result["bystanders"] = bystanders.alive()
result["sum"] = go_on(last)
told.set(f"result-{rank}", json.dumps(result))
told.wait(["end"])
