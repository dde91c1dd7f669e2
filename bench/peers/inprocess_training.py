"""One rank of bench/inprocess.py, under outlast and under NVRx: it trains and makes the faults.

    inprocess_training.py outlast|nvrx|nvrx-tuned FOLDER HANG_TIMEOUT

The rank writes ``trace-PID`` and looks for ``fault-PID`` after each step: ``raise`` or ``hang``.
NVRx is used as in its own basic example: plain processes, a store in rank 0, gloo with a timeout of 10 s.
Only outlast saves and loads, in memory after each step, because it stops a job without progress.
"""

# no annotations from __future__: NVRx compares a parameter's annotation with its class

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP = 0.02
GLOO_TIMEOUT = timedelta(seconds=10)
SYSTEM, FOLDER, HANG_TIMEOUT = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
_trace = open(FOLDER / f"trace-{os.getpid()}", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(kind: str, **more: object) -> None:
    _trace.write(json.dumps({"kind": kind, "pid": os.getpid(), "clock": time.monotonic(), **more}) + "\n")


def usage() -> dict[str, int]:
    """Return what this process has open."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return {"resident": pages * os.sysconf("SC_PAGESIZE"), "files": files, "threads": threads}


def meet_fault(path: Path) -> None:
    what = path.read_text()
    path.unlink()
    note("fault", what=what)
    if what == "raise":
        raise RuntimeError(f"a fault at {time.monotonic()}")
    while True:
        time.sleep(0.01)


def train(iteration: int, make_group: Callable[[], None], steps: Callable[..., Iterator[int]]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note("entered", iteration=iteration, rank=rank, world=world, **usage())
    make_group()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fault = FOLDER / f"fault-{os.getpid()}"
    for step in steps(model, optimizer):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note("step", step=step, iteration=iteration)
        if fault.exists():
            meet_fault(fault)
        time.sleep(STEP)


def run_outlast() -> None:
    import outlast
    from outlast.inprocess import CallWrapper

    @outlast.resilient(hang_timeout=HANG_TIMEOUT)
    def function(call: CallWrapper) -> None:
        def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
            session.restore(model=model, optimizer=optimizer)
            yield from session.steps(10**9)

        each_step = outlast.CheckpointOptions(save_interval=1000, non_persistent_save_interval=1)
        with outlast.start(checkpoints=each_step) as session:
            train(call.iteration, lambda: dist.init_process_group("gloo", timeout=GLOO_TIMEOUT), steps)

    function()


def run_nvrx(tuned: bool) -> None:
    from nvidia_resiliency_ext import inprocess

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        host, port, world, is_master=rank == 0, multi_tenant=True, timeout=timedelta(seconds=60)
    )

    class AbortSockets(inprocess.abort.Abort):
        def __call__(self, state: object) -> object:
            from outlast.inprocess.worker.abort import abort_process_groups

            abort_process_groups("NVRx asks for it")
            return state

    more: dict[str, object] = {}
    if tuned:
        gc.freeze()  # NVRx collects garbage between calls: 0.5 s, nearly all for torch's modules
        names = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
        more = {f"{name}_interval": timedelta(milliseconds=50) for name in names}
        more |= {"last_call_wait": timedelta(milliseconds=50)}
        more |= {"abort": inprocess.Compose(inprocess.abort.AbortTorchDistributed(), AbortSockets())}

    @inprocess.Wrapper(
        store_kwargs={"port": port + 1, "timeout": timedelta(seconds=60)},
        soft_timeout=timedelta(seconds=HANG_TIMEOUT),
        hard_timeout=timedelta(seconds=HANG_TIMEOUT + 10),
        termination_grace_time=timedelta(seconds=1),
        **more,
    )
    def function(call: inprocess.CallWrapper = None) -> None:
        def make_group() -> None:
            place = dist.PrefixStore(str(call.iteration), store)
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", store=place, rank=rank, world_size=world, timeout=GLOO_TIMEOUT)

        def steps(*_: object) -> Iterator[int]:
            for step in range(10**9):
                yield step
                call.ping()

        train(call.iteration, make_group, steps)

    function()


if __name__ == "__main__":
    run_outlast() if SYSTEM == "outlast" else run_nvrx(SYSTEM == "nvrx-tuned")
