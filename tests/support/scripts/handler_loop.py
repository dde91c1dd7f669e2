"""A loop of its own that asks a ShutdownHandler after each step: TRACE RUN_DIR STEPS [TIMEOUT] [hang|linger].

linger: its own save takes four seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from outlast.compat import ShutdownHandler

trace, rank = Path(sys.argv[1]), int(os.environ["RANK"])
trace.mkdir(parents=True, exist_ok=True)
handler = ShutdownHandler(timeout_sec=float(sys.argv[4]) if len(sys.argv) > 4 else 600.0)
handler.register()

import torch  # noqa: E402 - after the handlers
import torch.distributed as dist  # noqa: E402


def write(**line: object) -> None:
    with open(trace / f"rank-{rank}", "a") as log:
        log.write(json.dumps(line) + "\n")


dist.init_process_group("gloo")
for step in range(100_000):
    dist.all_reduce(torch.ones(10))
    write(step=step)
    if handler.should_shutdown():
        received = handler.signal_received
        write(ended=step, requested=handler.shutdown_requested, signal=received and received.name)
        if "linger" in sys.argv:
            time.sleep(4)
            write(finished=True)
        if "hang" not in sys.argv:
            handler.finish()
        break
    time.sleep(0.02)
if "hang" in sys.argv:
    time.sleep(3600)
dist.destroy_process_group()
