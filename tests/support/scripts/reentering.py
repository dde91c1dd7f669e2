"""Train with DDP in a function that is entered again after faults; write a trace, and a digest at the end.

arguments: trace folder, steps, save interval, [what@rank@step@generation]; DEVICE is a variable (cpu)
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.config import CheckpointOptions
from outlast.inprocess import CallWrapper
from outlast.ipc.processes import children_of

trace, steps, interval = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
calls: list[CallWrapper] = []
faults = [entry.split("@") for entry in sys.argv[4:] if "@" in entry]
device = torch.device(os.environ.get("DEVICE", "cpu"))
torch.set_num_threads(1)
trace.mkdir(parents=True, exist_ok=True)


def log_of(rank: int) -> Path:
    return trace / f"rank-{rank}"


def write(kind: str, **more: object) -> None:
    status = Path("/proc/self/status").read_text()
    line = {
        "kind": kind,
        "rank": int(os.environ["RANK"]),
        "generation": int(os.environ["OUTLAST_GENERATION"]),
        "pid": os.getpid(),
        "clock": time.monotonic(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "watchdog": os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"],
        "kilobytes": int(status.partition("VmRSS:")[2].split()[0]),
        **more,
    }
    with open(log_of(int(os.environ["RANK"])), "a") as log:
        log.write(json.dumps(line) + "\n")


class Late:
    """State whose load or save can meet a fault."""

    def __init__(self, when: str) -> None:
        self.when = when

    def state_dict(self) -> dict[str, object]:
        if self.when == "save":
            strike("save")
        return {"nothing": 0}

    def load_state_dict(self, _: object) -> None:
        strike("load")


def strike(place: str, step: int = -1) -> None:
    rank, generation = int(os.environ["RANK"]), int(os.environ["OUTLAST_GENERATION"])
    for what, at, when, which in faults:
        if (int(at), int(which)) == (rank, generation) and when in (place, str(step)):
            if what == "second":  # raises after another rank's fault
                wait_for_another(rank)
            write("fault", what=what)
            fault(what, rank)


def wait_for_another(rank: int) -> None:
    while not any('"fault"' in path.read_text() for path in trace.glob("rank-*") if path != log_of(rank)):
        time.sleep(0.01)


def fault(what: str, rank: int) -> None:
    if what in ("raise", "second"):
        raise RuntimeError(f"boom on rank {rank}")
    if what.startswith("exit"):
        sys.exit(int(what[4:]))
    if what == "sleep":
        time.sleep(3600)
    elif what == "gil":
        ctypes.PyDLL(None).sleep(3600)
    elif what == "spin":
        while True:
            with contextlib.suppress(BaseException):
                while True:
                    time.sleep(0.001)
    elif what == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        ctypes.PyDLL(None).pthread_mutex_lock(*2 * [ctypes.create_string_buffer(64)])
        ctypes.PyDLL(None).sleep(3600)
    elif what == "wait":
        threading.Event().wait()
    else:
        strike_alone(what, rank)


def fails_on_the_device() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def strike_alone(what: str, rank: int) -> None:
    if what == "converts":
        try:
            time.sleep(3600)
        except BaseException as error:
            raise RuntimeError(f"rank {rank} was interrupted") from error
    if what == "sticky":  # as every use of CUDA after an illegal memory access
        torch.cuda.is_initialized = lambda: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.synchronize = fails_on_the_device
        fails_on_the_device()
    if what == "illegal":
        torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)].sum().item()
    if what == "hold":
        while not (trace / "go").exists():
            time.sleep(0.01)
        return
    if what == "late":
        time.sleep(0.5)
        calls[-1].ping()
        what = "SIGSTOP"
    os.kill(os.getpid(), getattr(signal, what))


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """What a rank is fed with, by step."""

    def __init__(self, rank: int, start: int) -> None:
        self.first = 1000 * rank + start

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(self.first + at))


def batches(rank: int, start: int) -> Iterator[torch.Tensor]:
    if "LOADER" in os.environ:
        options = {"num_workers": int(os.environ["LOADER"]), "generator": torch.Generator()}
        yield from torch.utils.data.DataLoader(Batches(rank, start), batch_size=None, **options)
    while True:
        yield torch.randn(4, 16)


def children() -> int:
    return len(set(children_of(os.getpid())))


@outlast.resilient(
    hang_timeout=float(os.environ.get("HANG", "60")), granularity=os.environ.get("GRANULARITY", "rank")
)
def train(call: CallWrapper) -> str:
    calls.append(call)
    write("entered", iteration=call.iteration, world=call.world_size, children=children())
    strike("entry")
    options = CheckpointOptions(save_interval=interval, non_persistent_save_interval=1)
    with outlast.start(checkpoints=options) as session:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 16)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(call.rank)
        start = session.restore(model=model, optimizer=optimizer, late=Late("save"))
        write("restored", step=start)
        fed = batches(call.rank, start)
        for step in session.steps(steps):
            strike("step", step)
            loss = model(next(fed).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            write("step", step=step, loss=loss.item().hex())
        dist.destroy_process_group()
    strike("end")
    found = b"".join(one.cpu().numpy().tobytes() for one in model.state_dict().values())
    return hashlib.sha256(found).hexdigest()


write("done", digest=train())
