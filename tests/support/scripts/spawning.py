"""The tutorial's script: it starts its ranks itself; argument "cured": without the launcher's store."""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int, world: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    one = torch.ones(3)
    dist.all_reduce(one)
    print(f"rank {rank}: {one.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "cured" in sys.argv:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(train, args=(2, port), nprocs=2)
