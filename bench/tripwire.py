"""tripwire: cost of a comparison for the training thread: the digests of a rank's parameters, in host memory.

python bench/tripwire.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from outlast.checkpoint.content.tensor_digest import digests_of

SHAPES = {"64 MiB": ((4096, 4096), 8), "16 KiB": ((64, 64), 4096)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for name, (shape, count) in SHAPES.items():
        tensors = [torch.randn(shape) for _ in range(count)]
        nbytes = sum(one.numel() * one.element_size() for one in tensors)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            digests_of(tensors)
            times.append(time.perf_counter() - began)
        middle = statistics.median(times)
        line = {"tensors_of": name, "count": count, "ms_per_GB": middle * 1e12 / nbytes}
        print(
            json.dumps(
                {**line, "best_ms_per_GB": min(times) * 1e12 / nbytes, "us_each": middle * 1e6 / count}
            )
        )


if __name__ == "__main__":
    main()
