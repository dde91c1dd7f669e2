"""Count steps under a session: gloo all-reduce each step, a trace, and a fault on demand.

arguments: trace folder, steps, save interval, [what@rank@step@generation] [file to fill the disk with]
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import outlast

trace, steps, interval = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
faults = [entry.split("@") for entry in sys.argv[4:] if "@" in entry]
rank, generation = int(os.environ["RANK"]), int(os.environ.get("OUTLAST_GENERATION", "0"))
torch.set_num_threads(1)
trace.mkdir(parents=True, exist_ok=True)
log = open(trace / f"rank-{rank}", "a", buffering=1)  # noqa: SIM115


class Sum:
    def __init__(self) -> None:
        self.value = torch.zeros(1000)

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value.copy_(state["value"])


def fault(what: str) -> None:
    if what == "raise":
        raise RuntimeError(f"boom on rank {rank}")
    if what == "late":  # the end of the interpreter takes its time, as on a busy machine
        atexit.register(time.sleep, 6.0)
        raise RuntimeError(f"boom on rank {rank}")
    if what == "parting":  # as "late"; its peers lose their connection before
        atexit.register(time.sleep, 2.0)
        atexit.register(dist.destroy_process_group)
        raise RuntimeError(f"boom on rank {rank}")
    if what == "exit":  # its peers lose their connection long before the interpreter has ended
        atexit.register(time.sleep, 2.0)
        atexit.register(dist.destroy_process_group)
        sys.exit(7)
    if what == "sleep":
        time.sleep(3600)
    if what == "fill":
        with contextlib.suppress(OSError), open(sys.argv[-1], "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        return
    os.kill(os.getpid(), getattr(signal, what))


with outlast.start(save_interval=interval) as session:
    for what, at, _, when in faults:
        if what == "early" and int(at) == rank and int(when) in (0, generation):
            time.sleep(3600)
    dist.init_process_group("gloo")
    total = Sum()
    session.restore(sum=total)
    for step in session.steps(steps):
        for what, at, when, which in faults:
            if what != "early" and (int(at), int(when)) == (rank, step) and int(which) in (0, generation):
                fault(what)
        one = torch.full((1000,), float(step + rank))
        dist.all_reduce(one)
        total.value += one
        line = {
            "step": step,
            "sum": float(total.value[0]),
            "generation": generation,
            "world": dist.get_world_size(),
            "clock": time.monotonic(),
        }
        log.write(json.dumps(line) + "\n")
    dist.destroy_process_group()
