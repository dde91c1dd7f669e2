"""Meet the other ranks with torch alone, and write down what this rank sees.

arguments: folder, init method, generations in which rank 0 dies, anything

The folder gets ``rank-R.gG.json`` with the environment, the sum over all ranks and the arguments. A key that
an older generation left in the store at MASTER_ADDR and MASTER_PORT ends the rank with 7.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

folder, method, dying = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
dist.init_process_group("gloo", method, rank=rank, world_size=world, timeout=timedelta(seconds=150))
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 0 and store.check(["left by a generation"]):
    sys.exit(7)
dist.barrier()
store.set("left by a generation", str(generation))
said = {"environment": dict(os.environ), "sum": total.item(), "arguments": sys.argv[4:]}
(folder / f"rank-{rank}.g{generation}.json").write_text(json.dumps(said))
dist.barrier()
if rank == 0 and generation <= dying:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
