"""Train a small byte-level GPT on English text, with recovery from faults.

    python train_gpt.py                                        one process, no launcher
    outlast run --nproc-per-node 4 train_gpt.py --steps 500    four ranks, restarted after faults

Four lines make an ordinary DDP script fault tolerant; they are marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics  # half a megabyte of English that every CPython carries

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import outlast

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 256, 64, 128, 4, 2, 0.1
BATCH = 2  # windows of CONTEXT bytes, per rank and step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))


class Windows:
    """Windows of the text, shuffled in each epoch; they depend only on seed, step and rank.

    So the cursor into the data is the step itself: nothing else has to be saved, and no
    window is seen twice or left out after a restart.
    """

    def __init__(self, seed: int, rank: int, world: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.count = (len(text) - 1) // CONTEXT
        self.seed, self.rank, self.world = seed, rank, world
        self.order = lru_cache(maxsize=1)(self.draw)

    def draw(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + 7919 * epoch))

    def batch(self, step: int) -> tuple[list[int], Tensor, Tensor]:
        """Return the ids of this rank's windows at a step, their bytes, and the bytes that follow."""
        epoch, place = divmod(step, self.count // (BATCH * self.world))
        first = (place * self.world + self.rank) * BATCH
        ids = self.order(epoch)[first : first + BATCH]
        bytes_ = self.text[ids[:, None] * CONTEXT + torch.arange(CONTEXT + 1)]
        return ids.tolist(), bytes_[:, :-1], bytes_[:, 1:]


def build(options: argparse.Namespace, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    """Return model, optimizer and scheduler, equal on every rank."""
    torch.manual_seed(options.seed)
    # By default DDP rebuilds its buckets after the first step, so a model that is built again
    # after a restart sums gradients in another order and differs in the last bit. With
    # find_unused_parameters the first buckets stay: a resumed run is bitwise equal.
    model = DistributedDataParallel(GPT(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    torch.manual_seed(options.seed + 1 + rank)  # each rank drops out other units
    return model, optimizer, scheduler


class Trace:
    """One JSON line a step and rank, for those who compare runs; nothing without --trace."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / f"rank-{rank:05d}.jsonl").open("a", buffering=1)

    def write(self, step: int, loss: float, ids: list[int]) -> None:
        if self.file is not None:
            line = {
                "step": step,
                "loss": loss.hex(),
                "ids": ids,
                "clock": time.monotonic(),
                "pid": os.getpid(),
            }
            self.file.write(json.dumps(line) + "\n")


def train(options: argparse.Namespace, session: outlast.Session) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    windows, trace = Windows(options.seed, rank, world), Trace(options.trace, rank)
    model, optimizer, scheduler = build(options, rank)

    session.restore(model=model, optimizer=optimizer, scheduler=scheduler)  # (2) loads the newest checkpoint
    for step in session.steps(options.steps):  # (3) counts, writes heartbeats, saves when due
        ids, inputs, targets = windows.batch(step)
        with session.section("forward"):  # (4) optional: a hang names its section
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        with session.section("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        trace.write(step, loss.item(), ids)
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    if rank == 0 and options.final is not None:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(bytes(parameter.detach().flatten().view(torch.uint8).tolist()))
        options.final.write_text(digest.hexdigest() + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT under outlast.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-interval", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument(
        "--trace", type=Path, help="folder for one file of steps, losses and windows per rank"
    )
    parser.add_argument("--final", type=Path, help="file for the digest of the final parameters")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # four ranks share a laptop's cores
    with outlast.start(save_interval=options.save_interval) as session:  # (1)
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        train(options, session)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
