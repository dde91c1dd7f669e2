"""A loop as a framework has one, which calls the session after each step; own_loop.py TRACE RUN STEPS.

More words: ``kill@RANK@STEP`` and ``stop@RANK@STEP``, both in the first generation only; ``poison@STEP``:
the loss is NaN once, and a guard goes back; ``pace=SECONDS``. RUN is "-" where a launcher names the folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.config import NumericsOptions

trace, run_dir, total = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
words = sys.argv[4:]
pace = next((float(word[5:]) for word in words if word.startswith("pace=")), 0.0)
rank, generation = int(os.environ.get("RANK", "0")), int(os.environ.get("OUTLAST_GENERATION", "0"))
torch.set_num_threads(1)
trace.mkdir(parents=True, exist_ok=True)
log = open(trace / f"rank-{rank}", "a", buffering=1)  # noqa: SIM115


def write(**line: object) -> None:
    log.write(json.dumps({**line, "generation": generation}) + "\n")


class Loop:
    """What owns the loop; it knows the session by three calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
        self.model = DistributedDataParallel(inner, find_unused_parameters=True) if several else inner
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.guard = outlast.Guard(self.model, self.optimizer, NumericsOptions(nan_in_loss_action="rollback"))
        self.poison = next((int(word[7:]) for word in words if word.startswith("poison@")), -1)
        torch.manual_seed(rank)

    def run(self, session: outlast.Session) -> None:
        session.register(model=self.model, optimizer=self.optimizer)
        if self.poison >= 0:
            session.register(guard=self.guard)
        done = session.restore()
        write(restored=done)
        while done < total and not session.should_stop:
            self.train(done, session)
            write(step=done)
            for what in ("kill", "stop"):
                if f"{what}@{rank}@{done}" in words and generation < 2:
                    (os.kill(os.getpid(), signal.SIGKILL) if what == "kill" else session.stop_soon())
            time.sleep(pace)
            done = session.step_done(done + 1)

    def train(self, step: int, session: outlast.Session) -> None:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        if self.poison < 0:
            self.model(batch).square().mean().backward()
        while self.poison >= 0 and self.guard.should_run_forward_backward():
            loss = self.model(batch).square().mean()
            if step == self.poison and not (trace / "poisoned").exists():
                (trace / "poisoned").touch()
                loss = loss * float("nan")
            self.guard.validate(loss)
            loss.backward()
        if self.poison < 0 or self.guard.accepted:
            self.optimizer.step()
        self.optimizer.zero_grad()
        assert session.completed_steps == step


several = int(os.environ.get("WORLD_SIZE", "1")) > 1
with outlast.start(None if run_dir == "-" else run_dir, save_interval=4) as session:
    if several:
        dist.init_process_group("gloo")
    loop = Loop()
    loop.run(session)
    content = [value.double().sum().item().hex() for value in loop.model.state_dict().values()]
    write(ended=session.completed_steps, preempted=session.preempted, content=content)
if several:
    dist.destroy_process_group()
