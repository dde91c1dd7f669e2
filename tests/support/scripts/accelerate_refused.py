"""Uses accelerate's resumed loop wrongly. arguments: folder, way, unused, unused"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator

from outlast.errors import UsageError
from outlast.integrations.accelerate import resume

way = sys.argv[2]


def train(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)
    loader = data
    if way != "nothing":
        model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    with resume(accelerator, name=name) as job:
        for _ in job.epochs(1):
            for batch in job.batches(data if way == "unprepared" else loader):
                model(batch).sum().backward()
                optimizer.step()
                if way == "two-steps":
                    optimizer.step()
                if way == "twice":
                    next(iter(job.batches(loader)))
    print(f"trained {job.completed_steps}")


try:
    for number in range(2):
        train(f"training-{number}" if way == "named" else "")
except UsageError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
