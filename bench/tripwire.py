"""tripwire: cost of a comparison for the training thread, with parameters in host memory.

There is one rank, so nothing is exchanged: what is timed is the walk over the parameters and their digests.
"cpu" is processor time, the least of all repeats, which other programs disturb little. "seconds" is the
median of what the thread waited, on this host under this load.

    python bench/tripwire.py [--repeats 25]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch

from outlast.config import TripwireOptions
from outlast.consistency.worker import Tripwire

SHAPES = {"64 MiB": ((4096, 4096), 4), "16 KiB": ((64, 64), 4096), "64 B": ((16,), 4096)}


def measured(shape: tuple[int, ...], count: int, repeats: int) -> list[tuple[float, float]]:
    """Return the processor time and the wall time of the training thread in each of some comparisons."""
    model = torch.nn.ParameterList(torch.randn(shape) for _ in range(count))
    tripwire = Tripwire({"model": model}, TripwireOptions(tripwire_interval=2))
    times = []
    for _ in range(repeats):
        began = time.thread_time(), time.perf_counter()
        tripwire.begin(0)
        times.append((time.thread_time() - began[0], time.perf_counter() - began[1]))
        tripwire.after(1)  # takes the result
    tripwire.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for name, (shape, count) in SHAPES.items():
        nbytes = count * torch.Size(shape).numel() * 4
        cpu, wall = zip(*measured(shape, count, repeats), strict=True)
        line: dict[str, object] = {"tensors_of": name, "count": count}
        for how, seconds in (("cpu", min(cpu)), ("seconds", statistics.median(wall))):
            line[f"{how}_ms_per_GB"] = round(seconds * 1e12 / nbytes, 1)
            line[f"{how}_us_each"] = round(seconds * 1e6 / count, 2)
        print(json.dumps({**line, "loadavg": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
