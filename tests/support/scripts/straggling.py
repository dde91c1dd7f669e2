"""Times a step by NVRx's names on every rank, rank 1 slower: straggling.py TRACE RUN STEPS WHICH."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from outlast.compat.straggler import Detector, Statistic
from outlast.compat.straggler_callback import NVRxStragglerDetectionConfig, NVRxStragglerDetectionManager
from outlast.stragglers.worker.kernels import Kernels

trace, _, steps, which = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo")
rank = dist.get_rank()
lines: list[str] = []
out: dict[str, object] = {}


class Kept(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        lines.append(record.getMessage())


def work(seconds: float = 0.03) -> None:
    time.sleep(seconds * (4 if rank == 1 else 1))


if which == "manager":
    config = NVRxStragglerDetectionConfig(enabled=True, report_time_interval=0.001, stop_if_detected=True)
    logging.getLogger(config.logger_name).addHandler(Kept())
    logging.getLogger(config.logger_name).setLevel(logging.DEBUG)
    figures: list[dict[str, float]] = []
    manager = NVRxStragglerDetectionManager(config, lambda some: figures.append(dict(some)))
    manager.initialize()
    step = manager.wrap_train_step_function(work)
    done, stop = 0, False
    while not stop and done < steps:
        step()
        done += 1
        stop = manager.check_stragglers(rank)
    manager.shutdown()
    out = {"done": done, "stop": stop, "figures": figures}
elif which.startswith("kernels"):
    # Operators of the CPU stand for kernels. On rank 1 they take longer; "kernels-some": rank 0 has none.
    kernels: Kernels | bool = Kernels(on_device=False) if which == "kernels" or rank else False
    Detector.initialize(profiling_interval=2, profile_kernels=kernels)
    matrix = torch.ones(4000 if rank == 1 else 500, 1000)
    for _ in range(steps):
        with Detector.detection_section("work"):
            torch.add(matrix, matrix, out=matrix)
            work(0.002)
    report = Detector.generate_report()
    if report is not None:
        out = {
            "gpu": report.gpu_relative_perf_scores,
            "individual": report.gpu_individual_perf_scores,
            "slow": sorted(one.rank for one in report.identify_stragglers()["straggler_gpus_relative"]),
            "kernels": {
                name: one[Statistic.NUM] for name, one in sorted(report.local_kernel_summaries.items())
            },
        }
    Detector.shutdown()
else:
    on_rank0 = which == "gathered"
    Detector.initialize(gather_on_rank0=on_rank0, node_name=f"node-{rank}")
    for _ in range(steps):
        with Detector.detection_section("work"):
            work()
        with Detector.detection_section("host", profile_cuda=False):
            pass
    if rank == 1:
        with Detector.detection_section("only here"):
            work()
    report = Detector.generate_report()
    if report is not None:
        slow = report.identify_stragglers()
        out = {
            "gpu": report.gpu_relative_perf_scores,
            "sections": report.section_relative_perf_scores,
            "individual": report.section_individual_perf_scores,
            "slow": sorted(one.rank for one in slow["straggler_gpus_relative"]),
            "nodes": report.rank_to_node,
            "kernels": sorted(report.local_kernel_summaries),
        }
    Detector.shutdown()

trace.mkdir(exist_ok=True, parents=True)
(trace / f"rank-{rank}").write_text(json.dumps({"step": 1, "lines": lines, "report": out}) + "\n")
dist.destroy_process_group()
os._exit(0)
