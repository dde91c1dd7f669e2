"""Train with reruns as in docs/how-to/rerun.md, on data that the global generators make when it is drawn.

lazy_data.py RUN_DIR STEPS [ray@STEP] [mode=MODE]

ray: in that step the loss is no number, once.
"""

from __future__ import annotations

import json
import random
import sys

import torch

import outlast
from outlast.config import NumericsOptions, RerunOptions
from outlast.rerun import RerunDataIterator, RerunStateMachine

run_dir, steps, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
rays = [int(word.split("@")[1]) for word in words if word.startswith("ray@")]
mode = next((word.split("=")[1] for word in words if word.startswith("mode=")), "validate_results")

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())


def batches():
    while True:
        yield torch.randn(4, 8) * random.random()


data = RerunDataIterator(batches())
reruns = RerunStateMachine(model, optimizer, RerunOptions(rerun_mode=mode))
checks = NumericsOptions(nan_in_loss_action="rerun", nan_in_grad_action="rerun")
guard = outlast.Guard(model, optimizer, checks, reruns)
with outlast.start(run_dir, checkpoints=outlast.CheckpointOptions(async_save=False)) as session:
    session.restore(model=model, optimizer=optimizer, guard=guard)
    for step in session.steps(steps):
        while guard.should_run_forward_backward(data):
            loss = sum(model(next(data)).square().mean() for _ in range(2))
            if step in rays:
                rays.remove(step)
                loss = loss * float("nan")
            loss.backward()
            guard.validate(loss)
        assert guard.accepted
        optimizer.step()
        optimizer.zero_grad()
stats = {name: [found.p50, found.p99] for name, found in reruns.stats.items()}
weights = [value.double().sum().item().hex() for value in model.state_dict().values()]
print(json.dumps({"weights": weights, "stats": stats, "next": torch.rand(1).item().hex()}))
