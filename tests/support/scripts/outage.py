"""Train under a session; the start-ups of some generations fail.

The first generation is killed at half of the steps.

arguments: steps, and the exception of each later generation's start; "-" for none, the last one is repeated
"""

from __future__ import annotations

import builtins
import os
import signal
import sys

import torch

import outlast

steps, fails = int(sys.argv[1]), sys.argv[2:]
generation = int(os.environ["OUTLAST_GENERATION"])
how = fails[min(generation, len(fails) + 1) - 2] if generation > 1 else "-"
if how != "-":
    raise getattr(builtins, how)("Temporary failure in name resolution: hub.example.com")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with outlast.start(save_interval=5) as session:
    session.restore(model=model, optimizer=optimizer)
    for step in session.steps(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if generation == 1 and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
