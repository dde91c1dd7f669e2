"""Train with DDP over gloo and save every so many steps; print what was restored, then each loss.

saving.py RANK PORT WORLD GENERATION FOLDER STEPS INTERVAL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast import _torch_compat
from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import StoreExchange, SystemClock


def main() -> None:
    rank, port, world, generation = map(int, sys.argv[1:5])
    folder, steps, interval = Path(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 16)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    torch.manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    inner = _torch_compat.default_store()
    assert inner is not None
    saver = Checkpointer(
        folder,
        Identity("run-a", generation, rank, world),
        StoreExchange(inner, rank, world, generation),
        CheckpointOptions(timeout=60.0),
        SystemClock(),
        lambda _: None,
    )
    restored = saver.restore(state)
    start = 0 if restored is None else restored.step
    print(json.dumps(["restored", start]), flush=True)
    for step in range(start + 1, steps + 1):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % interval == 0:
            assert saver.save(step, state, "a test")
        print(json.dumps(["loss", step, loss.item().hex()]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
