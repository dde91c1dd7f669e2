"""Trains as Megatron-LM does with fault tolerance on: sections and timeouts of NVRx, checkpoints of its own.

arguments: folder, steps, warm-up steps, [what@rank@step@restarts] (``kill`` or ``stop``, in the step),
           [``learn``: at the end it waits until the timeout of a step is known], [pace@seconds of a step]

It knows nothing of outlast. The client is called as megatron/training/ft_integration.py calls it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch.nn.parallel import DistributedDataParallel

folder, total, warmup = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rank, launch = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state_path, kept = folder / "ft_state.json", folder / "checkpoint.pt"
torch.set_num_threads(1)

client = RankMonitorClient()
client.init_workload_monitoring(num_warmup_iters=warmup)
if state_path.exists():
    client.load_state_dict(json.loads(state_path.read_text()))
client.start_section("setup")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0
if kept.exists():
    found = torch.load(kept)
    model.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    done = found["done"]
with open(folder / f"starts-{rank}", "a") as starts:
    starts.write(f"{done} {os.getpid()}\n")


def update_timeouts(sections: list[str]) -> bool:
    known = client.calculate_and_set_section_timeouts(selected_sections=sections, calc_out_of_section=False)
    if rank == 0:
        state_path.write_text(json.dumps(client.state_dict()))
    return known


def save() -> None:
    client.start_section("checkpointing")
    if rank == 0:
        whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        torch.save(whole, folder / "part")
        os.replace(folder / "part", kept)
    dist.barrier()
    client.end_section("checkpointing")


pace = float(next((word.partition("@")[2] for word in sys.argv if word.startswith("pace@")), 0))
seen = 0
while done < total:
    if seen == 0:
        client.end_section("setup")
    if seen >= warmup:
        client.start_section("step")
    for what in ("kill", "stop"):
        if f"{what}@{rank}@{done}@{launch}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * done + rank))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(pace)
    if seen >= warmup:
        client.end_section("step")
    seen += 1
    done += 1
    if done % 5 == 0:
        save()

end = time.monotonic() + 60
while "learn" in sys.argv and not update_timeouts(["step"]) and time.monotonic() < end:
    time.sleep(0.1)
client.shutdown_workload_monitoring()
content = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
(folder / f"ended-{rank}").write_text(hashlib.sha256(content).hexdigest())
dist.destroy_process_group()
