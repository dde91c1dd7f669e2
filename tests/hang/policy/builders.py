"""Evidence about ranks and their groups, as an agent gathers it, and what ranks measured."""

from __future__ import annotations

from typing import Any

from outlast.hang.policy.diagnosis import RankEvidence
from outlast.hang.policy.rank_state import Doing, GroupState
from outlast.hang.policy.timeouts import Durations

SITE = "/venv/lib/python3.11/site-packages"
WAITS = ("train.py:main", "train.py:step", f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce")
READS = ("train.py:main", "data.py:read_batch")
LOGS = ("train.py:main", "train.py:log_loss")  # on a GPU, a wait below such a frame shows nothing


def rank(number: int, doing: Doing = Doing.NOTHING, **fields: Any) -> RankEvidence:
    """Return the evidence about a rank that waits in a collective, as its stack says."""
    usual: dict[str, Any] = {"alive": True, "process_state": "S", "cpu_busy": False, "stack": WAITS}
    usual |= {"step": 7, "sections": (), "last_beat": 100.0 + number, "doing": doing}
    return RankEvidence(number, **{**usual, **fields})


def group(
    entered: int, pending: int = 0, ranks: tuple[int, ...] = (0, 1, 2), name: str = "0", **operations: str
) -> GroupState:
    """Return how far a rank is in a group; ``_7="barrier"``: its collective 7 is a barrier."""
    numbered = tuple((int(number[1:]), operation) for number, operation in operations.items())
    return GroupState(name, ranks, entered, pending, numbered)


def many(p99: float, longest: float, count: int = 100) -> Durations:
    """Return what ranks measured of a section."""
    return Durations(count, p99, longest)
