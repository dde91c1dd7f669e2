"""Train a small byte-level GPT with tensor, pipeline and data parallelism, on whatever ranks there are.

    python train_gpt_3d.py                                              one process, no launcher
    outlast run --nproc-per-node 8 train_gpt_3d.py --tp 2 --pp 2        eight ranks: tp 2, pp 2, dp 2
    outlast run --nnodes 1:4 --nproc-per-node 2 --config job.toml ...   the layout that [parallelism] has

A checkpoint of one layout loads into every other one. Three things make that work:

* parameters are named by the number of their layer in the whole model, whatever stage has it;
* the optimizer's state has the names of the parameters, because numbers differ from stage to stage;
* a batch depends on the step only, and its size is the same for all layouts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics  # half a megabyte of English that every CPython carries
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import outlast

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 32, 64, 4, 4
BATCH = 16  # windows of CONTEXT bytes of a step, for all layouts
MICROBATCHES = 2  # parts into which a dp rank cuts its windows where there are stages, or one for each stage


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))  # tp divides each by heads
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


TENSOR_PARALLEL = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel),
    **dict.fromkeys(("out", "down"), RowwiseParallel),
}


class Stage(nn.Module):
    """One stage of the model: its layers have the numbers that they have in the whole model."""

    def __init__(self, seed: int, index: int, stages: int) -> None:
        super().__init__()

        def seeded(place: int) -> None:  # a layer begins alike, whatever stage has it
            torch.manual_seed(seed + place)

        first, last = (LAYERS * each // stages for each in (index, index + 1))
        self.embedding = self.places = self.norm = self.head = None
        if index == 0:
            seeded(0)
            self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict()
        for layer in range(first, last):
            seeded(1 + layer)
            self.blocks[str(layer)] = Block()
        if index == stages - 1:
            seeded(1 + LAYERS)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x).flatten(0, 1))


class NamedOptimizer:
    """An optimizer whose saved state has the names of the parameters, so that layers can change stages."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        new = not self.optimizer.state
        state = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
        if new:  # torch has counted a step in which nothing was learned, to find out what the state will be
            self.optimizer.state.clear()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


class Windows:
    """Windows of the text, shuffled in each epoch; which ones a step has depends on seed and step only.

    So the global cursor into the data is the step, under any layout.
    """

    def __init__(self, seed: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.count = (len(text) - 1) // CONTEXT
        self.seed = seed
        self.order = lru_cache(maxsize=1)(self.draw)

    def draw(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + 7919 * epoch))

    def batch(self, step: int, part: int, parts: int) -> tuple[list[int], Tensor, Tensor]:
        """Return the ids of one dp rank's windows, their bytes, and the bytes that follow."""
        epoch, place = divmod(step, self.count // BATCH)
        first, last = (place * BATCH + BATCH * each // parts for each in (part, part + 1))
        ids = self.order(epoch)[first:last]
        bytes_ = self.text[ids[:, None] * CONTEXT + torch.arange(CONTEXT + 1)]
        return ids.tolist(), bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()


def microbatches(stages: int) -> int:
    return 1 if stages == 1 else max(MICROBATCHES, stages)


class Trainer:
    """The part of the model that this rank has, and how it does a step.

    Args:
        mesh: of pp, dp and tp; a dimension may be 1.
    """

    def __init__(self, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        pipeline, data, tensor = (mesh[name] for name in ("pp", "dp", "tp"))
        self.device, self.mesh = device, mesh
        self.stages, self.index = pipeline.size(), pipeline.get_local_rank()
        self.model = Stage(options.seed, self.index, self.stages).to(device)
        for block in self.model.blocks.values():
            if tensor.size() > 1:
                parallelize_module(block, tensor, {name: kind() for name, kind in TENSOR_PARALLEL.items()})
            fully_shard(block, mesh=data)
        fully_shard(self.model, mesh=data)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        stage = PipelineStage(self.model, self.index, self.stages, device, group=pipeline.get_group())
        parts = microbatches(self.stages)
        self.schedule = Schedule1F1B(stage, n_microbatches=parts, loss_fn=self.loss_of)
        # The schedule divides gradients by its parts, FSDP by the dp ranks, which may have unequal shares.
        self.scale = parts * data.size() / (BATCH * CONTEXT)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum") * self.scale

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch; return its loss, the same on every rank."""
        given = (inputs.to(self.device),) if self.index == 0 else ()
        losses: list[Tensor] = []
        if self.index == self.stages - 1:
            self.schedule.step(*given, target=targets.to(self.device), losses=losses)
        else:
            self.schedule.step(*given)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        dist.all_reduce(loss, group=self.mesh["pp"].get_group())  # the last stage has it, others add 0
        dist.all_reduce(loss, group=self.mesh["dp"].get_group())
        return loss / self.mesh["dp"].size()


class Trace:
    """One JSON line a step and dp rank, for those who compare runs; nothing without --trace."""

    def __init__(self, folder: Path | None, rank: int, layout: str) -> None:
        self.file, self.layout = None, layout
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / f"rank-{rank:05d}.jsonl").open("a", buffering=1)

    def write(self, step: int, loss: float, ids: list[int]) -> None:
        if self.file is not None:
            line = {"step": step, "loss": loss.hex(), "ids": ids, "layout": self.layout, "pid": os.getpid()}
            self.file.write(json.dumps({**line, "clock": time.monotonic()}) + "\n")


def mesh_of(options: argparse.Namespace, session: outlast.Session, device: torch.device) -> DeviceMesh:
    """Return the ranks as a mesh; tp is the innermost dimension, because its ranks talk most."""
    world, given = dist.get_world_size(), session.parallelism  # of [parallelism], for this number of ranks
    tp, pp = (options.tp, options.pp) if given is None else (given.tp, given.pp)
    if world % (tp * pp):
        raise SystemExit(f"tp {tp}, pp {pp}: found {world} ranks, expected a multiple of {tp * pp}")
    dp = world // (tp * pp)
    if HEADS % tp or pp > LAYERS or dp > BATCH or (pp > 1 and BATCH % (dp * microbatches(pp))):
        raise SystemExit(
            f"tp {tp}, pp {pp}, dp {dp}: expected a tp that divides {HEADS} heads, at most {LAYERS} stages"
            f" and {BATCH} dp ranks; with stages, {BATCH} windows in equal parts"
        )
    return init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def train(options: argparse.Namespace, session: outlast.Session, device: torch.device) -> None:
    mesh = mesh_of(options, session, device)
    data = mesh["dp"]
    layout = ", ".join(f"{name} {mesh[name].size()}" for name in ("tp", "pp", "dp"))
    trainer, windows = Trainer(options, mesh, device), Windows(options.seed)
    speaks = mesh["tp"].get_local_rank() == 0 and mesh["pp"].get_local_rank() == 0
    trace = Trace(options.trace if speaks else None, data.get_local_rank(), layout)

    session.restore(model=trainer.model, optimizer=NamedOptimizer(trainer.model, trainer.optimizer))
    if dist.get_rank() == 0:
        print(f"{layout}: step {session.completed_steps} of {options.steps}", flush=True)
    for step in session.steps(options.steps):
        ids, inputs, targets = windows.batch(step, data.get_local_rank(), data.size())
        loss = trainer.step(inputs, targets)
        trace.write(step, loss.item(), ids)
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT with 3D parallelism under outlast.")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, without a [parallelism]")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages; dp is what is left of the ranks")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-interval", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--trace", type=Path, help="folder for steps, losses and windows of each dp rank")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with outlast.start(save_interval=options.save_interval) as session:
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        train(options, session, device)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
