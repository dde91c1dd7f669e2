"""Train with DDP over gloo until told otherwise; write each step's loss, and at the end sums of the model.

preempted.py TRACE RUN_DIR STEPS [early] [loader] [memory] [hang|save|stop|lose@RANK@STEP] [size=N]
    [pace=SECONDS] [interval=STEPS] [slow=SECONDS] [drag=SECONDS] [config=JSON] [checkpoints=JSON]

early: heed signals before torch is imported, which is when TRACE/go is there. loader: read the data with two
worker processes. memory: save every step in memory. hang: sleep in that step, after the collectives.
lose: fail in that step as where a worker of a DataLoader was killed: this rank's own notice comes later, and
every child's end raises. slow: so long takes a save once TRACE/slow is there; TRACE/saving-RANK shows that it
has begun. pace: so long takes a step until TRACE/hurry is there. drag: so long takes a step once
TRACE/drag-RANK is there.
config, checkpoints: options.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import outlast
from outlast.compat import ShutdownHandler
from outlast.config import PreemptionOptions

trace, run_dir, steps, words = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
named = dict(word.split("=", 1) for word in words if "=" in word)
hangs = [tuple(map(int, word.split("@")[1:])) for word in words if word.startswith("hang@")]
rank = int(os.environ["RANK"])
trace.mkdir(parents=True, exist_ok=True)
handler = ShutdownHandler(options=PreemptionOptions(**json.loads(named.get("config", "{}"))))
handler.register()
if "early" in words:
    (trace / f"early-{rank}").touch()
    while not (trace / "go").exists():
        time.sleep(0.01)

import torch  # noqa: E402 - after the handlers
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

log = open(trace / f"rank-{rank}", "a", buffering=1)  # noqa: SIM115


class Numbers(Dataset[torch.Tensor]):
    """Data that depends on the step and the rank alone."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return steps - self.first

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() != MAIN:
            (trace / f"worker-{rank}-{os.getpid()}").touch()
        generator = torch.Generator().manual_seed(1000 * (self.first + index) + rank)
        return torch.randn(4, 16, generator=generator)


MAIN = os.getpid()


def batches(first: int):
    numbers = Numbers(first)
    if "loader" not in words:
        return (numbers[index] for index in range(len(numbers)))
    generator = torch.Generator()
    return iter(DataLoader(numbers, batch_size=None, num_workers=2, generator=generator))


def write(**line: object) -> None:
    log.write(json.dumps(line) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(named.get("checkpoints", "{}"))
    if "memory" in words:
        options["non_persistent_save_interval"] = 1
    interval = int(named.get("interval", "100000"))
    with outlast.start(
        run_dir, save_interval=interval, checkpoints=outlast.CheckpointOptions(**options)
    ) as session:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 16)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ballast = torch.zeros(int(named.get("size", "1")))
        torch.manual_seed(rank)
        first = session.restore(model=model, optimizer=optimizer, ballast=Ballast(ballast))
        write(restored=first)
        data = batches(first)
        for step in session.steps(steps):
            loss = model(next(data)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if f"stop@{rank}@{step}" in words:
                session.stop_soon()
            if f"save@{rank}@{step}" in words:
                session.save_soon()
            if f"lose@{rank}@{step}" in words:
                lose_worker()
            if (rank, step) in hangs:
                write(hangs=step)
                time.sleep(3600)
            write(step=step, loss=loss.item().hex())
            if "drag" in named and (trace / f"drag-{rank}").exists():
                write(drags=step)
                time.sleep(float(named["drag"]))
            elif not (trace / "hurry").exists():
                time.sleep(float(named.get("pace", "0.02")))
        content = [value.double().sum().item().hex() for value in model.state_dict().values()]
        write(ended=session.completed_steps, preempted=session.preempted, content=content)
        dist.destroy_process_group()


def lose_worker() -> None:
    """Raise as where a scheduler has signalled a worker of a DataLoader; it comes to this rank afterwards."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    os.kill(child, signal.SIGTERM)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

    def raise_as_torch(number: int, frame: object) -> None:
        raise RuntimeError(f"DataLoader worker (pid {child}) is killed by signal: Terminated.")

    def go_on() -> None:
        leaving.wait()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            os.kill(MAIN, signal.SIGCHLD)
        os.kill(MAIN, signal.SIGTERM)

    leaving = threading.Event()
    threading.Thread(target=go_on, daemon=True).start()
    signal.signal(signal.SIGCHLD, raise_as_torch)
    sys.setswitchinterval(0.05)  # the other thread has its turn where the main thread waits on its way out
    leaving.set()
    raise ConnectionResetError(104, "Connection reset by peer")


class Ballast:
    """Bytes that make a state as large as a test wants it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        if (trace / "slow").exists():
            (trace / f"saving-{rank}").touch()
            time.sleep(float(named["slow"]))
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value.copy_(state["value"])


main()
