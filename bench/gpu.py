"""gpu: what only a GPU can tell: copies to the host, digests, the guard, NCCL's abort, the end of a process.

Each step runs in a process of its own with a limit, since an error of CUDA stays with its process. Steps:
"machine" (versions, limits, the link to the host), "copies" (16 GB or a third of the GPU's memory to the
host: pageable and registered tmpfs, torch's pinned memory; 40,000 small tensors gathered and one by one),
"digests" (of as much, on the device and through the host), "guard" (a step of SGD with 10,000 gradients,
without and with their norms and one read), "abort" (one rank of NCCL, 20 times: init, abort and destroy, with
and without a pending kernel; memory in use afterwards), "end" (SIGKILL with memory in use and 16 GB pinned:
seconds to the end of the process and until the memory is free), "pair" (two ranks of NCCL on one GPU, which
NCCL may refuse: one is killed, the other aborts and should live 70 s, with outlast's variables and without),
"check" (the device check of a preflight). Without a GPU it prints one line and ends with 0. "--device cpu"
runs the steps on the processor, small and without NCCL, to find mistakes in this script.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 240.0  # seconds; of each step
REPEATS = 5
ABORTS = 20
SMALL = 40_000
GRADIENTS = 10_000
OUTLIVE = 70  # seconds; NCCL's watchdog ends a process 60 s after it has learned of a lost peer
FEWER = 100  # times fewer tensors where there is no GPU
GB = 1e9
MB = 1 << 20
Line = dict[str, Any]
RANK = Path(__file__).resolve().parent / "peers" / "gpu_rank.py"


@dataclass(frozen=True)
class Device:
    """Where the steps run: "cuda", or "cpu" to try this script."""

    kind: str

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def wait(self) -> None:
        """Wait for the end of what was enqueued."""
        import torch

        if self.is_gpu:
            torch.cuda.synchronize()

    def free(self) -> int:
        """Return the free bytes of its memory."""
        import torch

        return int(torch.cuda.mem_get_info()[0]) if self.is_gpu else 64 * MB

    def some(self, number: int) -> int:
        """Return the number for a GPU, or fewer."""
        return number if self.is_gpu else number // FEWER


def timed(device: Device, do: Callable[[], object]) -> dict[str, float]:
    """Return the median and the range of the seconds that a call takes, the device's work included."""
    times = []
    for _ in range(REPEATS):
        device.wait()
        began = time.perf_counter()
        do()
        device.wait()
        times.append(time.perf_counter() - began)
    return {"seconds": statistics.median(times), "least": min(times), "most": max(times)}


def rate(nbytes: int, found: dict[str, float]) -> dict[str, float]:
    """Return times together with the speed."""
    return {**found, "GB_per_s": nbytes / GB / found["seconds"]}


def machine(device: Device) -> Iterator[Line]:
    """Yield what the other figures depend on."""
    import torch

    yield {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "processors": os.cpu_count(),
        "host": platform.release(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_GB": shutil.disk_usage("/dev/shm").free / GB,
        "load": os.getloadavg()[0],
    }
    if device.is_gpu:
        properties = torch.cuda.get_device_properties(0)
        yield {"gpu": properties.name, "memory_GB": properties.total_memory / GB, **_link()}


def _link() -> Line:
    names = ("driver_version", "pcie.link.gen.max", "pcie.link.gen.current", "pcie.link.width.current")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"link": f"not known: {error}"}
    return dict(zip(names, (one.strip() for one in told.split(",")), strict=False))


def _size(device: Device) -> int:
    room = shutil.disk_usage("/dev/shm").free
    return int(min(16 * GB, device.free() / 3, room / 2)) >> 20 << 20


def copies(device: Device) -> Iterator[Line]:
    """Yield the speed of copies to the host."""
    import torch

    from outlast.checkpoint.content.transfers import copy_tensors
    from outlast.checkpoint.save.buffers import Mapping

    nbytes, count = _size(device), device.some(SMALL)
    large = [torch.zeros(nbytes // 16, dtype=torch.uint8, device=device.kind) for _ in range(16)]
    pairs = [(one, number * one.numel()) for number, one in enumerate(large)]
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        memory = Mapping(file.fileno(), nbytes)
        image = torch.frombuffer(memory, dtype=torch.uint8)
        image.zero_()

        def copy() -> None:
            copy_tensors(pairs, image, 4)

        yield {"to": "pageable tmpfs", **rate(nbytes, timed(device, copy))}
        began = time.perf_counter()
        memory.register(torch.cuda.current_device() if device.is_gpu else None)
        seconds = time.perf_counter() - began
        yield {"registration_s_per_GB": seconds / (nbytes / GB), "registered": bool(memory.registered)}
        yield {"to": "registered tmpfs", **rate(nbytes, timed(device, copy))}
        small = [torch.zeros(1000, device=device.kind) for _ in range(count)]
        places = [(one, number * 4000) for number, one in enumerate(small)]
        gathered = timed(device, lambda: copy_tensors(places, image, 4))
        yield {"tensors": count, "how": "gathered", **gathered}

        def one_by_one() -> None:
            for one, begin in places:
                image[begin : begin + 4000].copy_(one.view(torch.uint8))

        yield {"tensors": count, "how": "one by one", **timed(device, one_by_one)}
    pinned = torch.empty(nbytes // 16, dtype=torch.uint8, pin_memory=device.is_gpu)
    found = timed(device, lambda: [pinned.copy_(one, non_blocking=True) for one in large])
    yield {"to": "torch's pinned memory", **rate(nbytes, found)}


def digests(device: Device) -> Iterator[Line]:
    """Yield the speed of digests on the device and through the host."""
    import torch

    from outlast.checkpoint.content.tensor_digest import digests_of

    nbytes = _size(device)
    tensors = [torch.ones(nbytes // 64, device=device.kind) for _ in range(16)]
    yield {"where": "device", **rate(nbytes, timed(device, lambda: digests_of(tensors)))}
    on_host = timed(device, lambda: digests_of([one.cpu() for one in tensors]))
    yield {"where": "host", **rate(nbytes, on_host)}


def guard(device: Device) -> Iterator[Line]:
    """Yield the time of an optimizer's step, and the same with what the guard adds."""
    import torch

    from outlast.numerics.worker.numerics import Gauge

    count = device.some(GRADIENTS)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.ones(4096, device=device.kind)) for _ in range(count)
    )
    for one in model:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauge = Gauge(model, optimizer)
    gauge.equip(1)
    loss = torch.ones((), device=device.kind)

    def guarded() -> None:
        gauge.add(loss)
        gauge.read()
        optimizer.step()

    yield {"gradients": count, "guard": False, **timed(device, optimizer.step)}
    yield {"gradients": count, "guard": True, **timed(device, guarded)}


def abort(device: Device) -> Iterator[Line]:
    """Yield the seconds that an abort takes in a job of one rank, and the memory that stays in use."""
    import torch
    import torch.distributed as dist

    from outlast._torch_compat import gpu_sleep
    from outlast.inprocess.worker.abort import (
        abort_process_groups,
        destroy_process_groups,
        to_outlive_watchdog,
    )

    os.environ.update(to_outlive_watchdog(os.environ))
    backend = "nccl" if device.is_gpu else "gloo"
    one = torch.ones(1 << 20, device=device.kind)
    before = device.free()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ABORTS):
            began = time.perf_counter()
            dist.init_process_group(backend, init_method=f"file://{folder}/{number}", rank=0, world_size=1)
            dist.all_reduce(one)
            device.wait()
            made = time.perf_counter() - began
            pending = number % 2 == 1
            if pending and device.is_gpu:
                gpu_sleep(3 * 10**9)
                dist.all_reduce(one)
            began = time.perf_counter()
            failed = abort_process_groups("a benchmark").failed
            aborted = time.perf_counter() - began
            destroy_process_groups()
            over = time.perf_counter() - began
            device.wait()
            times = {"init_s": made, "abort_s": aborted, "destroyed_s": over}
            grown = (before - device.free()) / GB
            yield {"number": number, "pending": pending, **times, "failed": failed, "grown_GB": grown}


_HOLDER = """
import time, torch
held = torch.ones({nbytes}, dtype=torch.uint8, device="{device}")
pinned = torch.ones({pinned}, dtype=torch.uint8, pin_memory={is_gpu})
print("ready", flush=True)
time.sleep(600)
"""


def end(device: Device) -> Iterator[Line]:
    """Yield how long after SIGKILL a process has ended, and its memory is free."""
    free = device.free()
    held = int(0.7 * free)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pinned = int(min(16 * GB, host / 4)) if device.is_gpu else MB
    for _ in range(REPEATS):
        code = _HOLDER.format(nbytes=held, pinned=pinned, device=device.kind, is_gpu=device.is_gpu)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise RuntimeError(f"the process that was to hold {held / GB:.0f} GB ended before it did")
            began = time.perf_counter()
            holder.send_signal(signal.SIGKILL)
            holder.wait(60)
            ended = time.perf_counter() - began
        while device.free() < 0.95 * free and time.perf_counter() - began < 60:
            time.sleep(0.01)
        took = {"ended_s": ended, "free_s": time.perf_counter() - began}
        yield {**took, "held_GB": held / GB, "pinned_GB": pinned / GB}


def pair(device: Device) -> Iterator[Line]:
    """Yield whether a rank lives on after its peer was killed and it has aborted; both ways at a time."""
    lasts = OUTLIVE if device.is_gpu else 1
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for how in ("with", "without"):
            words = [sys.executable, str(RANK), how, f"{folder}/{how}", device.kind, str(lasts)]
            started[how] = [
                subprocess.Popen(
                    [*words, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
                for rank in (0, 1)
            ]
        deadline = time.monotonic() + lasts + 100
        for how, (survivor, victim) in started.items():
            try:
                told, _ = survivor.communicate(timeout=max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                survivor.kill()
                told, _ = survivor.communicate()
            victim.kill()
            victim.communicate()
            last = told.splitlines()[-1:]
            yield {
                "variables": how,
                "lived": last == ["lived"],
                "exit": survivor.returncode,
                "told": told[-400:],
            }


def check(device: Device) -> Iterator[Line]:
    """Yield what the device check says and takes."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "outlast.health.worker", "--devices", device.kind]
    told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    for line in told.splitlines():
        yield json.loads(line)
    yield {"all_s": time.perf_counter() - began}


STEPS = {one.__name__: one for one in (machine, copies, digests, guard, abort, end, pair, check)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="also write the lines there")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script")
    parser.add_argument("--here", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        for line in STEPS[options.here](Device(options.device)):
            print(json.dumps({"step": options.here, **line}), flush=True)
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} finds none on this machine, so nothing was measured")
        return 0
    lines = [line for step in options.steps for line in run(step, options.device)]
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(f"{line}\n" for line in lines)
    return int(any(json.loads(line).get("failed") for line in lines))


def run(step: str, device: str) -> Iterator[str]:
    """Run a step in a process of its own, and yield and print its lines."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--here", step, "--device", device],
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
    sys.exit(main())
