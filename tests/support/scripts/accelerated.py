"""Trains with accelerate and its own checkpoints.

arguments: folder of results, way, the step at which rank 0 of the first generation is killed (0: none),
           the seconds that a step takes at least
ways: "fails" for a save at step 6 that raises on every rank
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from outlast.integrations.accelerate import announce

folder, fatal, pace = Path(sys.argv[1]), int(sys.argv[3]), float(sys.argv[4])
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
kept = sorted(folder.glob("step-*"))
done = 0


class Kept:
    """An object that accelerate saves, too."""

    def state_dict(self) -> dict[str, int]:
        if "fails" in sys.argv[2] and done == 6:
            raise OSError("no space left")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


accelerator.register_for_checkpointing(Kept())
with announce(accelerator, optimizer) as job:
    if kept:
        accelerator.load_state(kept[-1])
        done = int(kept[-1].name.partition("-")[2])
    while done < 12 and not job.should_stop:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
        done += 1
        with open(folder / f"steps-{accelerator.process_index}", "a") as file:
            print(done, file=file, flush=True)
        if done % 3 == 0 or job.should_save:
            with contextlib.suppress(OSError):
                accelerator.save_state(folder / f"step-{done:03}")
        if fatal == done and first and accelerator.is_main_process:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pace)
(folder / f"done-{accelerator.process_index}").write_text(str(done))
