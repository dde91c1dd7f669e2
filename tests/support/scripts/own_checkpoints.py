"""Trains without a session, with checkpoints of its own; each life ends after some steps of its own.

arguments: folder of the checkpoints, steps in all, steps of a life before it kills itself (0: it lives on),
           "announce", "steps" (announced without checkpoints), "quiet" or "late" (announced when it saves)
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import outlast

folder, total, incarnation, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = folder / f"rank-{rank}.pt"
step = 0
if kept.exists():
    found = torch.load(kept)
    model.load_state_dict(found["model"])
    step = found["step"]
began = step
while step < total:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if how in ("announce", "steps"):
        outlast.progress(step)
    if step % 20 == 0:
        torch.save({"model": model.state_dict(), "step": step}, folder / f"{rank}.part")
        os.replace(folder / f"{rank}.part", kept)
        if how in ("announce", "late"):
            outlast.progress(step, saved=True)
    if incarnation and rank == 0 and step - began == incarnation:
        os.kill(os.getpid(), signal.SIGKILL)
(folder / f"done-{rank}").write_text(str(step))
