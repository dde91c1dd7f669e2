"""Uses the resumed loop of a DeepSpeed engine wrongly. arguments: folder, way, unused, unused"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.dataloader import RepeatingLoader

from outlast.errors import UsageError
from outlast.integrations.deepspeed import resume

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each start looks for a compiler
way = sys.argv[2]
os.environ["LOCAL_RANK"] = "0"
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
deepspeed.init_distributed(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, auto_mpi_discovery=False
)
model = torch.nn.Linear(1, 1)
zero: dict[str, Any] = {"stage": 1, "elastic_checkpoint": True} if way == "elastic" else {"stage": 0}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": zero,
}
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=list(torch.ones(3, 1))
)
given: tuple[Any, ...] = {
    "none": (),
    "repeating": (RepeatingLoader(loader),),
    "unknown": (torch.utils.data.DataLoader(torch.ones(1, 1)),),
}.get(way, (loader,))


def train(epochs: int) -> None:
    with resume(model if way == "model" else engine, *given) as job:
        for _ in job.epochs(epochs):
            for batch in job.batches(loader):
                engine.backward(engine(batch).sum())
                engine.step()


try:
    train(1)  # three micro-batches, one step
    train(1)  # has nothing to do
    train(2)
except UsageError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
