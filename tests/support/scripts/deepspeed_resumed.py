"""Trains a DeepSpeed engine in a loop of its own; a session keeps the state.

arguments: folder of results, way, the step at which rank 0 of the first generation is killed (0: none),
           the seconds that a step takes at least
ways: words with a comma between: "zero0" to "zero3", "bf16", "torch" for torch's own loader with a generator,
      "frozen" for a layer that is not trained
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch

from outlast.config import CheckpointOptions
from outlast.integrations.deepspeed import resume

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each start looks for a compiler
folder, ways, fatal, pace = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4])
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
rank = int(os.environ["RANK"])
torch.manual_seed(7)
norm = torch.nn.LayerNorm(16) if "bf16" in ways else torch.nn.BatchNorm1d(16)  # with buffers
model = torch.nn.Sequential(torch.nn.Linear(4, 16), norm, torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
if "frozen" in ways:
    model[3].requires_grad_(False)
rows = [torch.arange(4.0) * 0.01 * at for at in range(44)]
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": int(ways[0].removeprefix("zero"))},
    "bf16": {"enabled": "bf16" in ways},
}
engine, _, loader, scheduler = deepspeed.initialize(
    model=model, model_parameters=[one for one in model.parameters() if one.requires_grad], config=config,
    training_data=rows,
)  # fmt: skip
if "torch" in ways:
    loader = torch.utils.data.DataLoader(
        rows[rank::2], batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
trace = folder / f"steps-{rank}"
with resume(engine, loader, checkpoints=CheckpointOptions(save_interval=4)) as job:
    for epoch in job.epochs(3):
        for batch in job.batches(loader):
            loss = engine(batch.to(engine.module[0].weight.dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            with open(trace, "a") as file:
                print(epoch, engine.micro_steps, loss.item().hex(), file=file, flush=True)
            if fatal and fatal <= engine.global_steps and first and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pace)
    if not job.should_stop:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=ways[0] == "zero3"):
            weights = [*engine.module.parameters(), *engine.module.buffers()]
            octets = b"".join(one.detach().float().numpy().tobytes() for one in weights)
        text = f"{job.completed_steps} {hashlib.sha256(octets).hexdigest()} {scheduler.get_last_lr()}"
        (folder / f"done-{rank}").write_text(text)
