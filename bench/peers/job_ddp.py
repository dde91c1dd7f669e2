"""A job without a framework for bench/frameworks.py: DDP, and torch.save every 20 steps."""

import os
import sys
import time

import torch
import torch.distributed as dist

FOLDER, RANK = sys.argv[1], os.environ["RANK"]
CHECKPOINT = f"{FOLDER}/checkpoint.pt"

dist.init_process_group("gloo")
layers = [torch.nn.Linear(16, 16) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
done = 0
if os.path.exists(CHECKPOINT):
    found = torch.load(CHECKPOINT)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    done = found["done"]
while done < 100_000:
    batch = torch.randn(2, 16, generator=torch.Generator().manual_seed(done))
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    if done % 20 == 0 and RANK == "0":
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done},
            f"{CHECKPOINT}.part",
        )
        os.replace(f"{CHECKPOINT}.part", CHECKPOINT)
    with open(f"{FOLDER}/trace-{RANK}", "a") as file:
        file.write(f"{os.getpid()} {done} {time.monotonic()}\n")
