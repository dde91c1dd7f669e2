"""Train a small job in runs of their own, one after the other, and say in lines of JSON what each holds.

saves_steps.py RUN... [save=STEP,STEP...] [step=SECONDS] [die=STEP] [OPTION=JSON...]

It restores, says so, and trains up to the last of the steps at which it saves; without them it only restores.
die: it ends itself with SIGKILL after that step. An OPTION is one of outlast.CheckpointOptions.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch

import outlast


class Job:
    """A model, its optimizer and its scheduler; two that took the same steps are equal in every bit."""

    def __init__(self, seed: int, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, width)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self) -> None:
        self.model(torch.randn(4, self.width)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def content(self) -> str:
        """Return a digest of every bit of the model and of the optimizer's moments."""
        found = hashlib.sha256()
        moments = (one for each in self.optimizer.state.values() for one in each.values())
        for one in (*self.model.state_dict().values(), *moments):
            found.update(one.detach().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def say(run: str, **what: object) -> None:
    print(json.dumps({"run": run, **what}), flush=True)


def train(run: str, steps: list[int], pause: float, dies: int, options: dict[str, object]) -> None:
    job = Job(len(steps))
    before = job.content()
    checkpoints = outlast.CheckpointOptions(**{"async_save": False, "timeout": 60.0, **options})
    try:
        with outlast.start(run, save_interval=10**6, checkpoints=checkpoints) as session:
            done = session.restore(**job.state)
            say(run, restored=done, content=job.content())
            while done < max(steps, default=0):
                job.train()
                done = session.step_done(done + 1)
                if done in steps:
                    say(run, step=done, saved=session.save(wait=True), content=job.content())
                if done == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(pause)
    except outlast.OutlastError as error:
        code = int(error.exit_code)
        unchanged = job.content() == before
        say(run, error=type(error).__name__, text=str(error), code=code, unchanged=unchanged)


def main() -> None:
    torch.set_num_threads(1)
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    steps = [int(one) for one in given.pop("save", "").split(",") if one]
    pause, dies = float(given.pop("step", 0.0)), int(given.pop("die", -1))
    options = {name: json.loads(value) for name, value in given.items()}
    for run in (word for word in sys.argv[1:] if "=" not in word):
        train(run, steps, pause, dies, options)


if __name__ == "__main__":
    main()
