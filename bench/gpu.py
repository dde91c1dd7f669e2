"""gpu: what only a GPU can tell: copies to the host, digests, the guard, NCCL's abort, the end of a process.

Each step runs in a process of its own with a limit, since an error of CUDA stays with its process. Steps:
"machine" (versions, limits), "copies" (16 GB or a third of the GPU's memory to the host: pageable and
registered tmpfs, torch's pinned memory; 40,000 small tensors gathered and one by one), "digests" (of as much,
on the device and through the host), "guard" (10,000 gradients: their norms and one read), "abort" (one rank:
init, abort and destroy, with and without a pending kernel), "end" (SIGKILL with memory in use: seconds to the
end of the process and until the memory is free). Without a GPU it prints one line and ends with 0.

    python bench/gpu.py --out gpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

LIMIT = 240.0  # seconds; of each step
REPEATS = 5
SMALL = 40_000
GRADIENTS = 10_000
GB = 1e9
Line = dict[str, Any]


def timed(do: Callable[[], object]) -> dict[str, float]:
    """Return the median and the range of the seconds that a call takes, the device's work included."""
    import torch

    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        do()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"seconds": statistics.median(times), "least": min(times), "most": max(times)}


def rate(nbytes: int, found: dict[str, float]) -> dict[str, float]:
    """Return times together with the speed."""
    return {**found, "GB_per_s": nbytes / GB / found["seconds"]}


def machine() -> Iterator[Line]:
    """Yield what the other figures depend on."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    yield {
        "gpu": properties.name,
        "memory_GB": properties.total_memory / GB,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "processors": os.cpu_count(),
        "host": platform.release(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_GB": shutil.disk_usage("/dev/shm").free / GB,
        "load": os.getloadavg()[0],
    }


def _size() -> int:
    import torch

    free = torch.cuda.mem_get_info()[0]
    room = shutil.disk_usage("/dev/shm").free
    return int(min(16 * GB, free / 3, room / 2)) >> 20 << 20


def copies() -> Iterator[Line]:
    """Yield the speed of copies to the host."""
    import torch

    from outlast.checkpoint.content.transfers import copy_tensors
    from outlast.checkpoint.save.mapping import Mapping

    nbytes = _size()
    large = [torch.zeros(nbytes // 16, dtype=torch.uint8, device="cuda") for _ in range(16)]
    pairs = [(one, number * one.numel()) for number, one in enumerate(large)]
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        memory = Mapping(file.fileno(), nbytes)
        image = torch.frombuffer(memory, dtype=torch.uint8)
        image.zero_()
        yield {"to": "pageable tmpfs", **rate(nbytes, timed(lambda: copy_tensors(pairs, image, 4)))}
        began = time.perf_counter()
        memory.register(torch.cuda.current_device())
        seconds = time.perf_counter() - began
        yield {"registration_s_per_GB": seconds / (nbytes / GB), "registered": bool(memory.registered)}
        yield {"to": "registered tmpfs", **rate(nbytes, timed(lambda: copy_tensors(pairs, image, 4)))}
        small = [torch.zeros(1000, device="cuda") for _ in range(SMALL)]
        places = [(one, number * 4000) for number, one in enumerate(small)]
        yield {"tensors": SMALL, "how": "gathered", **timed(lambda: copy_tensors(places, image, 4))}

        def one_by_one() -> None:
            for one, begin in places:
                image[begin : begin + 4000].copy_(one.view(torch.uint8))

        yield {"tensors": SMALL, "how": "one by one", **timed(one_by_one)}
    pinned = torch.empty(nbytes // 16, dtype=torch.uint8, pin_memory=True)
    found = timed(lambda: [pinned.copy_(one, non_blocking=True) for one in large])
    yield {"to": "torch's pinned memory", **rate(nbytes, found)}


def digests() -> Iterator[Line]:
    """Yield the speed of digests on the device and through the host."""
    import torch

    from outlast.checkpoint.content.tensor_digest import digests_of

    nbytes = _size()
    tensors = [torch.ones(nbytes // 64, device="cuda") for _ in range(16)]
    yield {"where": "device", **rate(nbytes, timed(lambda: digests_of(tensors)))}
    yield {"where": "host", **rate(nbytes, timed(lambda: digests_of([one.cpu() for one in tensors])))}


def guard() -> Iterator[Line]:
    """Yield the time that the guard takes of a step."""
    import torch

    from outlast.numerics.worker.numerics import Gauge

    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.ones(4096, device="cuda")) for _ in range(GRADIENTS)
    )
    for one in model:
        one.grad = torch.ones_like(one)
    gauge = Gauge(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gauge.equip(1)
    loss = torch.ones((), device="cuda")

    def step() -> None:
        gauge.add(loss)
        gauge.read()

    yield {"gradients": GRADIENTS, **timed(step)}


def abort() -> Iterator[Line]:
    """Yield the seconds that an abort of NCCL takes in a job of one rank."""
    import torch
    import torch.distributed as dist

    from outlast._torch_compat import gpu_sleep
    from outlast.inprocess.worker.abort import (
        abort_process_groups,
        destroy_process_groups,
        to_outlive_watchdog,
    )

    os.environ.update(to_outlive_watchdog(os.environ))
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * REPEATS):
            began = time.perf_counter()
            dist.init_process_group("nccl", init_method=f"file://{folder}/{number}", rank=0, world_size=1)
            dist.all_reduce(torch.ones(1 << 20, device="cuda"))
            torch.cuda.synchronize()
            made = time.perf_counter() - began
            pending = number % 2 == 1
            if pending:
                gpu_sleep(3 * 10**9)
                dist.all_reduce(torch.ones(1 << 20, device="cuda"))
            began = time.perf_counter()
            failed = abort_process_groups("a benchmark").failed
            aborted = time.perf_counter() - began
            destroy_process_groups()
            over = time.perf_counter() - began
            times = {"init_s": made, "abort_s": aborted, "destroyed_s": over}
            yield {"pending": pending, **times, "failed": failed, "reserved": torch.cuda.memory_reserved()}


_HOLDER = """
import time, torch
held = torch.ones(int({nbytes}), dtype=torch.uint8, device="cuda")
pinned = torch.ones(1 << 30, dtype=torch.uint8, pin_memory=True)
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(600)
"""


def end() -> Iterator[Line]:
    """Yield how long after SIGKILL a process has ended, and its memory is free."""
    import torch

    free = torch.cuda.mem_get_info()[0]
    for _ in range(REPEATS):
        code = _HOLDER.format(nbytes=0.7 * free)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            began = time.perf_counter()
            holder.send_signal(signal.SIGKILL)
            holder.wait(60)
            ended = time.perf_counter() - began
        while torch.cuda.mem_get_info()[0] < 0.95 * free and time.perf_counter() - began < 60:
            time.sleep(0.01)
        yield {"ended_s": ended, "free_s": time.perf_counter() - began, "held_GB": 0.7 * free / GB}


STEPS = {one.__name__: one for one in (machine, copies, digests, guard, abort, end)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="also write the lines there")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--here", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        for line in STEPS[options.here]():
            print(json.dumps({"step": options.here, **line}), flush=True)
        return
    import torch

    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} finds none on this machine, so nothing was measured")
        return
    lines = [line for step in options.steps for line in run(step)]
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(f"{line}\n" for line in lines)


def run(step: str) -> Iterator[str]:
    """Run a step in a process of its own, and yield and print its lines."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--here", step],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        lines = done.stdout.splitlines()
        if done.returncode:
            lines.append(json.dumps({"step": step, "failed": done.returncode, "told": done.stderr[-1000:]}))
    except subprocess.TimeoutExpired:
        lines = [json.dumps({"step": step, "failed": f"no end within {LIMIT:g} s"})]
    for line in lines:
        print(line, flush=True)
        yield line


if __name__ == "__main__":
    main()
