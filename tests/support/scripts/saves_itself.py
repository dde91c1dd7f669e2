"""Trains twelve steps with checkpoints of the script's own, as tutorials do: each third step, by rank 0.

arguments: folder of results, "torch" or "accelerate" and perhaps ",announced", the step at which rank 0 of
           the first generation is killed (0: none), the seconds that a step takes at least
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import outlast

folder, ways, fatal, pace = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4])
rank, kept = int(os.environ["RANK"]), folder / "kept"
accelerated, announced = "accelerate" in ways, "announced" in ways
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
torch.manual_seed(7)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
done = 0


class Alone:
    """Nobody asks for anything."""

    should_save = should_stop = False


asks: Any = contextlib.nullcontext(Alone())
if accelerated:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if announced:
        from outlast.integrations.accelerate import announce

        asks = announce(accelerator, optimizer)
    newest = max(kept.glob("step-*/done"), default=None)
    if newest:
        accelerator.load_state(newest.parent)
        done = int(newest.parent.name.partition("-")[2])
else:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    if (kept / "last.pt").exists():
        found = torch.load(kept / "last.pt")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["step"]


def save() -> None:
    if accelerated:
        accelerator.save_state(kept / f"step-{done:03}")
        accelerator.wait_for_everyone()
        (kept / f"step-{done:03}" / "done").touch()
    elif rank == 0:
        kept.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state, kept / "part.pt")
        os.replace(kept / "part.pt", kept / "last.pt")


with asks as job:
    while done < 12 and not job.should_stop:
        if fatal == done > 0 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * done + rank))
        loss = model(batch).square().mean()
        accelerator.backward(loss) if accelerated else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        with open(folder / f"steps-{rank}", "a") as file:
            print(json.dumps({"step": done}), file=file, flush=True)
        if done % 3 == 0 or job.should_save:
            save()
        if announced and not accelerated:
            outlast.progress(done, saved=done % 3 == 0)
        time.sleep(pace)
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
(folder / f"done-{rank}").write_text(json.dumps({"weights": digest.hexdigest(), "step": done}))
