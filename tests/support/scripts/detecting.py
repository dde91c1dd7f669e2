"""Check losses and gradients with a NaNDetector; rank 1's loss is bad in step 3, its gradient in step 5."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from outlast.compat import NaNDetector

trace, rank = Path(sys.argv[1]), int(os.environ["RANK"])
trace.mkdir(parents=True, exist_ok=True)
dist.init_process_group("gloo")
detector = NaNDetector(action="skip")
model = torch.nn.Linear(2, 2)
with open(trace / f"rank-{rank}", "a") as log:
    for step in range(int(sys.argv[3])):
        loss = float("nan") if (rank, step) == (1, 3) else 1.0
        log.write(json.dumps({"loss": detector.check_loss(loss, step)}) + "\n")
        for one in model.parameters():
            one.grad = torch.full_like(one, float("inf") if (rank, step) == (1, 5) else 1.0)
        log.write(json.dumps({"gradients": detector.check_gradients(model, step)}) + "\n")
dist.destroy_process_group()
