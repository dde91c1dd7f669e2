"""Train and save each step with all ranks of several nodes until a file appears.

allocated_nodes.py FINISH
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import outlast

FINISH = Path(sys.argv[1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    finish = torch.zeros(1)
    with outlast.start(save_interval=5) as session:
        done = session.restore(model=model)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} restored {done}", flush=True)
        for step in session.steps(100_000):
            finish[0] = FINISH.exists()
            dist.all_reduce(finish, dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                print(f"step {step}", flush=True)
            time.sleep(0.05)
            if finish.item():
                break
    print("finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
