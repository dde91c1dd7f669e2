"""Train a few steps with DDP, and end at once: destroy the groups, then free the model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
