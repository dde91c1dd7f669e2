"""Rank 1 sends an object that runs code where it is unpickled; sends_objects.py FOLDER.

Each rank leaves the name of what its collective raised.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from outlast.errors import OutlastError
from outlast.integrations.collectives import from_all_ranks

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])


class Touches:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.makedirs, (str(folder / "ran"), 0o700, True)


dist.init_process_group("gloo")
try:
    from_all_ranks(Touches() if rank else {}, "a value")
    raised = ""
except OutlastError as error:
    raised = type(error).__name__
(folder / f"raised-{rank}").write_text(raised)
