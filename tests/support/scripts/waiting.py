"""Do nothing as a rank of several nodes, without torch, until a file says otherwise.

arguments: folder

The folder gets ``rank-R-of-W.gG`` with the pid when a rank begins. Rank 0 commits a step several times a
second, where it may, and says so to its agent. A file ``do`` in the folder is a list of orders, one a line:
``WHAT RANK GENERATION``; WHAT is ``exit:N``, ``raise`` or a signal; ``*`` stands for any rank or generation.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from outlast.cluster.lease_file import wait_for
from outlast.errors import StaleGeneration
from outlast.ipc.control import Reporter
from outlast.observe.policy import codec
from outlast.recovery.policy.events import Saved

folder = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ["OUTLAST_GENERATION"])
node, lease_file = os.environ["OUTLAST_NODE"], os.environ["OUTLAST_LEASE"]
reporter = Reporter(os.environ["OUTLAST_CONTROL"])
commits = open(folder / "commits.jsonl", "a", buffering=1)  # noqa: SIM115


def obey(what: str) -> None:
    if what == "raise":
        raise RuntimeError(f"boom on rank {rank}")
    if what.startswith("exit:"):
        sys.exit(int(what.partition(":")[2]))
    os.kill(os.getpid(), getattr(signal, what))


def commit(step: int) -> None:
    try:
        wait_for(lease_file, generation, 0.0)
    except StaleGeneration:
        return
    commits.write(json.dumps({"node": node, "generation": generation, "at": time.monotonic()}) + "\n")
    name = f"step-{step:09d}.g{generation}"
    reporter.send(
        codec.encode(Saved(time.time(), time.monotonic(), generation, step, name, 0, 0.0, "a test"))
    )


(folder / f"rank-{rank}-of-{world}.g{generation}").write_text(f"{os.getpid()}")
for step in itertools.count(1):
    if (folder / "do").exists():
        for what, who, when in map(str.split, (folder / "do").read_text().splitlines()):
            if who in ("*", str(rank)) and when in ("*", str(generation)):
                obey(what)
    if rank == 0:
        commit(step)
    time.sleep(0.1)
