"""Train one rank with a guard, in a torch without torch.distributed; raise once at step 6.

alone.py RUN_DIR|- [OUT]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import outlast
from outlast.config import NumericsOptions

assert not dist.is_available()
run_dir, out = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
with outlast.start(None if run_dir == "-" else run_dir, save_interval=4) as session:
    guard = outlast.Guard(model, optimizer, NumericsOptions())
    session.restore(model=model, optimizer=optimizer, guard=guard)
    for step in session.steps(12):
        while guard.should_run_forward_backward():
            loss = model(torch.full((3, 4), float(step))).square().mean()
            loss.backward()
            guard.validate(loss)
        if guard.accepted:
            optimizer.step()
        optimizer.zero_grad()
        if (step, os.environ.get("OUTLAST_GENERATION")) == (6, "1"):
            raise RuntimeError("boom")
out.write_text(" ".join(one.double().sum().item().hex() for one in model.parameters()))
