"""Train the head, from step 10 on the body too; unfreezing.py RUN_DIR [MARK].

With MARK it kills itself once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import outlast

run_dir, mark = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None
torch.manual_seed(0)
body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
model = torch.nn.Sequential(body, torch.nn.ReLU(), head)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
with outlast.start(run_dir, save_interval=4) as session:
    restored = session.restore(model=model, optimizer=optimizer)
    for step in session.steps(24):
        if step == 10:
            optimizer.add_param_group({"params": body.parameters(), "lr": 1e-3})
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 17 and mark is not None and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
rates = [group["lr"] for group in optimizer.param_groups]
print("end", restored > 10, *rates, *(one.double().sum().item().hex() for one in model.parameters()))
