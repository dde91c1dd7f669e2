"""Count steps; after a load of a certain checkpoint the loss is no number three steps later.

arguments: steps, save interval, names of bad checkpoints: step@generation (generation 0: any)
"""

from __future__ import annotations

import os
import sys

import torch

import outlast

steps, interval = int(sys.argv[1]), int(sys.argv[2])
bad = [tuple(map(int, word.split("@"))) for word in sys.argv[3:]]
generation = int(os.environ["OUTLAST_GENERATION"])


class State:
    def __init__(self) -> None:
        self.content = {"value": torch.zeros(8), "saved_by": torch.zeros(1)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**self.content, "saved_by": torch.full((1,), float(generation))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.content = state


with outlast.start(save_interval=interval) as session:
    state = State()
    began = session.restore(state=state)
    by = int(state.content["saved_by"])
    poisoned = any(began == step and by in (by if one == 0 else one, one) for step, one in bad)
    for step in session.steps(steps):
        if not began and step == 2 * interval + 5:
            raise RuntimeError("an accident")
        if poisoned and step == began + 3:
            raise outlast.NonFinite("loss", float("nan"), step)
        state.content["value"] += 1
