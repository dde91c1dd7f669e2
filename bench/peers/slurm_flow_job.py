"""A training job for bench/slurm_flow.py: slurm_flow_job.py theirs|ours FOLDER SAVE_SECONDS.

theirs: KempnerForge's documented pattern, rewritten: SIGTERM and SIGUSR1 set a flag, a timer of 600 s
exits hard. After each step the flag is checked, an emergency checkpoint is saved, the loop ends and the
script exits with 0. A start resumes from the newest complete checkpoint. ours: a session. Collecting the
state takes SAVE_SECONDS once there are steps to save. A resumed process makes five more steps and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

KIND, FOLDER, SECONDS = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
FURTHER = 5
STEPS = 100_000


def write(**line: object) -> None:
    with open(FOLDER / f"steps-{RANK}.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), **line}) + "\n")


class Counter:
    """A state whose collection takes time."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        if self.steps:
            write(saving=self.steps)
            time.sleep(SECONDS)
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def train_step(model: torch.nn.Module) -> None:
    model(torch.randn(4, 4)).sum().backward()
    time.sleep(0.1)


def theirs() -> None:
    stop: list[int] = []

    def handle(number: int, _: object) -> None:
        if not stop:
            timer = threading.Timer(600.0, os._exit, (1,))
            timer.daemon = True
            timer.start()
        stop.append(number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, handle)
    model, counter = torch.nn.Linear(4, 4), Counter()
    found = sorted(FOLDER.glob(f"step_*-{RANK}.pt"), key=lambda path: int(path.name[5:].partition("-")[0]))
    if found:
        counter.load_state_dict(torch.load(found[-1])["counter"])
    write(restored=counter.steps)
    end = counter.steps + FURTHER if counter.steps else STEPS
    while counter.steps < end:
        train_step(model)
        counter.steps += 1
        write(step=counter.steps)
        if stop:
            state = {"model": model.state_dict(), "counter": counter.state_dict()}
            path = FOLDER / f"step_{counter.steps}-{RANK}.pt"
            torch.save(state, f"{path}.part")
            os.replace(f"{path}.part", path)
            write(saved=counter.steps)
            break
    write(exits=0)


def ours() -> None:
    import outlast

    model, counter = torch.nn.Linear(4, 4), Counter()
    at_the_end = outlast.CheckpointOptions(save_interval=STEPS, non_persistent_save_interval=STEPS)
    with outlast.start(checkpoints=at_the_end) as session:
        torch.distributed.init_process_group("gloo")
        counter.steps = session.restore(model=model, counter=counter)
        write(restored=counter.steps)
        for step in session.steps(counter.steps + FURTHER if counter.steps else STEPS):
            train_step(model)
            counter.steps = step + 1
            write(step=counter.steps)
        if session.preempted:
            write(saved=session.completed_steps)
    write(exits=0)


if __name__ == "__main__":
    {"theirs": theirs, "ours": ours}[KIND]()
