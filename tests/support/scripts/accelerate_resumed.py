"""Trains with accelerate in a loop of its own; a session keeps the state.

arguments: folder of results, way, the step at which rank 0 of the first generation is killed (0: none),
           the seconds that a step takes at least
ways: words with a comma between: "seedable" for accelerate's own sampler, "workers" for a loader with
      workers, "larger" for larger batches, "asked" to be preempted before the first step
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

from outlast.config import CheckpointOptions
from outlast.integrations.accelerate import resume

folder, ways, fatal, pace = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4])
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
set_seed(7)  # of all ranks the same, so that nothing but the place says how many there were


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 44

    def __getitem__(self, at: int) -> torch.Tensor:
        noise = torch.rand(4) if "workers" in ways else torch.zeros(4)
        return torch.arange(4.0) * 0.01 * at + noise


accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler="seedable" in ways),
)
model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
loader = torch.utils.data.DataLoader(
    Rows(), batch_size=4 if "larger" in ways else 2, shuffle=True, num_workers=2 if "workers" in ways else 0
)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
trace = folder / f"steps-{accelerator.process_index}"
with resume(accelerator, checkpoints=CheckpointOptions(save_interval=4)) as job:
    if "asked" in ways and not trace.exists() and accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGTERM)
    for epoch in job.epochs(3):
        for batch in job.batches(loader):
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            with open(trace, "a") as file:
                print(epoch, job.completed_steps, loss.item().hex(), file=file, flush=True)
            if fatal and fatal <= job.completed_steps and first and accelerator.is_main_process:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pace)
if not job.should_stop:
    octets = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    text = f"{job.completed_steps} {hashlib.sha256(octets).hexdigest()} {scheduler.get_last_lr()}"
    (folder / f"done-{accelerator.process_index}").write_text(text)
