"""Ping on ranks that are forks of one process; each writes its answers.

pinging.py FOLDER WORLD [stopped=RANK | late=RANK] [rounds=N] [timeout=SECONDS]

stopped: that rank stops itself (SIGSTOP) before the second round and is ended when the others are done.
late: that rank comes to the second round when the others have their answer, and takes part in the third.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from outlast.agreement.worker.ping import check_nccl_health

folder, world, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
named = dict(word.split("=", 1) for word in words)
timeout = float(named.get("timeout", "60"))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def ask(rank: int) -> None:
    assert check_nccl_health(0.0), "without a group nobody is missing"
    log = Lines()
    logging.getLogger("outlast").addHandler(log)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=rank, world_size=world
    )
    answers = []
    for number in range(int(named.get("rounds", "2"))):
        if number == 1 and named.get("stopped") == str(rank):
            os.kill(os.getpid(), signal.SIGSTOP)
        while number == 1 and named.get("late") == str(rank):
            if len(list(folder.glob("answered-*"))) == world - 1:
                break
            time.sleep(0.01)
        began = time.monotonic()
        answers.append(check_nccl_health(60.0 if number != 1 else timeout))
        log.lines.append(f"round {number}: {time.monotonic() - began:.1f} s")
        if number == 1:
            (folder / f"answered-{rank}").touch()
    (folder / f"rank-{rank}").write_text(json.dumps({"answers": answers, "log": log.lines}))
    if rank == 0:  # serves the store
        others = [one for one in range(world) if str(one) != named.get("stopped")]
        while not all((folder / f"rank-{one}").exists() for one in others):
            time.sleep(0.01)


children = {}
for rank in range(world):
    child = os.fork()
    if not child:
        try:
            ask(rank)
        finally:
            os._exit(0)
    children[rank] = child
for rank, child in children.items():
    if named.get("stopped") != str(rank):
        os.waitpid(child, 0)
for rank, child in children.items():
    if named.get("stopped") == str(rank):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
