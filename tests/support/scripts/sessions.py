"""Open one session after the other on one run folder; sessions.py RUN_DIR."""

from __future__ import annotations

import contextlib
import sys

import torch

import outlast

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(total: int, fails: bool = False) -> int:
    with outlast.start(sys.argv[1], save_interval=2) as session:
        session.restore(model=model, optimizer=optimizer)
        began = session.completed_steps
        for _ in session.steps(total):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fails:
                raise RuntimeError("in a session")
    return began


print("began at", train(4))
with contextlib.suppress(RuntimeError):
    train(8, fails=True)
print("began at", train(8))
left_open = outlast.start(sys.argv[1])
left_open.restore(model=model, optimizer=optimizer)
try:
    train(12)
except outlast.errors.RunFolderBusy as error:
    print(error)
