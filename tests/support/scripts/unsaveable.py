"""Train with an object whose state_dict raises on one rank, the CALL-th time that it is asked.

unsaveable.py RANK CALL SECONDS

That rank ends so many seconds after the others have heard of it.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

import outlast

bad, call, late = map(int, sys.argv[1:])


class Part:
    """Counts how often it was asked for its state."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        if (int(os.environ["RANK"]), self.calls) == (bad, call):
            raise RuntimeError("cannot say what I hold")
        return {"calls": self.calls}

    def load_state_dict(self, _: dict[str, int]) -> None:
        """Take nothing over."""


dist.init_process_group("gloo")
try:
    with outlast.start(save_interval=4) as session:
        session.restore(part=Part())
        for _ in session.steps(12):
            dist.barrier()
except RuntimeError:
    time.sleep(late)
    raise
