"""Train with reruns under a launcher; three steps after a load of a certain checkpoint the loss is no number.

suspecting.py STEPS INTERVAL [STEP@GENERATION of a bad checkpoint] [batch@STEP]
"""

from __future__ import annotations

import os
import sys

import torch

import outlast
from outlast.config import NumericsOptions
from outlast.rerun import RerunStateMachine

steps, interval, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
generation = int(os.environ["OUTLAST_GENERATION"])


class Origin:
    """Knows which generation has saved what was loaded."""

    saved_by = 0

    def state_dict(self) -> dict[str, int]:
        return {"saved_by": generation}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.saved_by = state["saved_by"]


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checks = NumericsOptions(nan_in_loss_action="rerun", nan_in_grad_action="rerun")
guard = outlast.Guard(model, optimizer, checks, RerunStateMachine(model, optimizer))
origin = Origin()
with outlast.start(save_interval=interval) as session:
    began = session.restore(model=model, optimizer=optimizer, guard=guard, origin=origin)
    poisoned = f"{began}@{origin.saved_by}" in words
    for step in session.steps(steps):
        if not began and step == 2 * interval + 5 and f"{2 * interval}@1" in words:
            raise RuntimeError("an accident")
        while guard.should_run_forward_backward():
            loss = model(torch.ones(2, 4)).square().mean()
            if (poisoned and step == began + 3) or f"batch@{step}" in words:
                loss = loss * float("nan")
            loss.backward()
            guard.validate(loss)
        if guard.accepted:
            optimizer.step()
        optimizer.zero_grad()
