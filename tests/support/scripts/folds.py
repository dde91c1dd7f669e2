"""Train one model after the other, each in a session of its own; folds.py NAMED|PLAIN [MARK].

With MARK rank 0 kills itself once in the second training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import outlast

named = sys.argv[1] == "NAMED"
mark = Path(sys.argv[2]) if len(sys.argv) > 2 else None
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
if world > 1:
    dist.init_process_group("gloo")
for fold in range(3):
    torch.manual_seed(fold)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = 0
    name = f"fold-{fold}" if named else ""
    with outlast.start(name=name, save_interval=3) as session:
        restored = session.restore(model=model, optimizer=optimizer)
        for step in session.steps(10 - fold):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * fold + 10 * rank + step))
            model(batch).square().mean().backward()
            for one in model.parameters():
                if world > 1:
                    dist.all_reduce(one.grad)
            optimizer.step()
            optimizer.zero_grad()
            trained += 1
            if (fold, step, rank) == (1, 6, 0) and mark is not None and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    state = model.weight.double().sum().item().hex()
    print(f"fold {fold} {restored} {trained} {state}", flush=True)
if world > 1:
    dist.destroy_process_group()
