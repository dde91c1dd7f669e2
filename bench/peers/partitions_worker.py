"""The rank of bench/partitions.py: it asks for the right to commit twenty times a second, and commits.

A commit is a line in a file that all nodes share and only append to, so the order of the
lines is the order of the commits. A second line follows each one when it is written. It needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from outlast.cluster.lease_file import boot_time, wait_for
from outlast.errors import StaleGeneration
from outlast.ipc.control import Reporter
from outlast.ipc.heartbeat_page import HeartbeatPage, RankState
from outlast.observe.policy import codec
from outlast.recovery.policy.events import Saved
from outlast.settings import worker_context

EVERY = 0.05
TOLD_EVERY = 20  # ticks; the job refills its budgets and grows when it hears of a commit


class Worker:
    """One rank of one generation.

    Args:
        log: file of the commits.
        since: boot time of step 0; steps follow the clock, so that every generation gets further.
        leased: commit only under a lease.
    """

    def __init__(self, log: Path, since: float, leased: bool) -> None:
        self.context = worker_context()
        self.since, self.leased = since, leased
        self.file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.page = HeartbeatPage.open(self.context.heartbeat_path)
        self.reporter = Reporter(self.context.control_path)
        self.ticks = 0
        self.same = {
            "node": self.context.node,
            "pid": os.getpid(),
            "generation": self.context.generation,
        }
        self.who = {
            "rank": self.context.rank,
            "world": self.context.world_size,
            "master": f"{self.context.master_addr}:{os.environ['MASTER_PORT']}",
        }

    def run(self) -> None:
        self.page.words[3] = os.getpid()
        self.page.mark("first_step")
        self.page.set_state(RankState.RUNNING)
        while True:
            self.ticks += 1
            step = int((boot_time() - self.since) / EVERY)
            self.page.heartbeat(step)
            self.commit(step)
            time.sleep(EVERY)

    def commit(self, step: int) -> None:
        """Commit, if this rank may do so now."""
        before = boot_time()
        if self.leased:
            try:
                wait_for(self.context.lease_path, self.context.generation, 0.0)
            except StaleGeneration:
                return
        self.append({"number": self.ticks, "before": before, **self.same, **self.who})
        self.append({"number": self.ticks, "after": boot_time(), **self.same})
        if self.context.rank == 0 and self.ticks % TOLD_EVERY == 0:
            self.tell(step)

    def append(self, line: dict[str, Any]) -> None:
        os.write(self.file, json.dumps(line).encode() + b"\n")

    def tell(self, step: int) -> None:
        """Report a commit to the agent, as checkpoint writers do."""
        generation = self.context.generation
        name = f"step-{step:09d}.g{generation}"
        record = Saved(time.time(), time.monotonic(), generation, step, name, 0, 0.0, "a line was appended")
        self.reporter.send(codec.encode(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=Path, required=True, help="their file, shared by the nodes")
    parser.add_argument("--since", type=float, required=True, help="boot time of step 0, in seconds")
    parser.add_argument(
        "--no-lease", action="store_true", help="commit without the right to: a planted fault"
    )
    options = parser.parse_args()
    Worker(options.commits, options.since, not options.no_lease).run()


if __name__ == "__main__":
    main()
