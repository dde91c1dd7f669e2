"""How each fault that can be made from outside is made: by a signal, or in a file.

Nothing in the rest of the package knows of this module: what it does to a run is what a broken
machine does to it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.chaos import targets
from outlast.core.errors import UsageError
from outlast.core.scenario import FAULTS, Place, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outlast.chaos.targets import LiveRun

PAGE = 4096

SIGNALS: dict[str, int] = {
    "rank_killed": signal.SIGKILL,
    "rank_hung": signal.SIGSTOP,
    "OS_ABORT": signal.SIGABRT,
    "SEGFAULT": signal.SIGSEGV,
    "SIGINT": signal.SIGINT,
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGSTOP": signal.SIGSTOP,
    "agent_killed": signal.SIGKILL,
}


@dataclass(frozen=True)
class Made:
    """A fault that was made.

    Args:
        fault: its name in the table of faults.
        rank: whose worker, -1 where the target is not a worker.
        detail: one phrase: to which process, file and place.
        clock: monotonic seconds of the moment before it took effect.
    """

    fault: str
    rank: int
    detail: str
    clock: float


def inject(run: LiveRun, fault: str, rank: int, seed: int) -> Made:
    """Make a fault in a live run.

    Args:
        run: the run, as :func:`targets.find` reads it.
        fault: a key of FAULTS.
        rank: whose worker; ignored where the target is not a worker.
        seed: chooses file, bit and the like.

    Raises:
        UsageError: it cannot be made from outside, or its target does not exist.
    """
    spec = FAULTS[fault]
    if spec.place is Place.CUDA:
        require_cuda(fault)
    if spec.place is not Place.OUTSIDE:
        raise UsageError(
            f"{fault} can only be made inside the worker: start the script through "
            f"`outlast run ... -m outlast.chaos.inprocess -- --fault {fault} --rank {max(rank, 0)} SCRIPT`"
        )
    clock = time.monotonic()
    if spec.target is Target.CHECKPOINT:
        folder = targets.newest_checkpoint(run)
        return Made(fault, -1, _CORRUPTIONS[fault](folder, random.Random(seed)), clock)
    if spec.target is Target.AGENT:
        pid = targets.signal_agent(run, SIGNALS[fault])
        return Made(fault, -1, f"{signal.Signals(SIGNALS[fault]).name} to agent {pid}", clock)
    pid = targets.signal_rank(run, rank, SIGNALS[fault])
    return Made(fault, rank, f"{signal.Signals(SIGNALS[fault]).name} to process {pid}", clock)


def require_cuda(fault: str) -> None:
    """Refuse a fault that only a CUDA device can have.

    Raises:
        UsageError: torch sees no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"{fault} needs a CUDA device and torch sees none; choose one of the other faults")


def flip_bit(folder: Path, dice: random.Random) -> str:
    """Flip one bit of one shard of a checkpoint; return which."""
    path = _pick(folder, "*.safetensors", dice)
    offset, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
    _change(path, offset, lambda old: bytes([old[0] ^ (1 << bit)]), 1)
    return f"{folder.name}/{path.name}: bit {bit} of byte {offset}"


def zero_page(folder: Path, dice: random.Random) -> str:
    """Overwrite one page of a shard that is not zero already with zeros; return which."""
    path = _pick(folder, "*.safetensors", dice)
    pages = list(range(-(-path.stat().st_size // PAGE)))
    dice.shuffle(pages)
    for page in pages:
        if _change(path, page * PAGE, lambda old: bytes(len(old)), PAGE):
            return f"{folder.name}/{path.name}: page {page}"
    raise UsageError(f"{path}: every page is zero already; nothing was injected")


def truncate(folder: Path, dice: random.Random) -> str:
    """Cut one file of a checkpoint short; return which."""
    path = _pick(folder, "*", dice)
    size = path.stat().st_size
    left = dice.randrange(size)
    os.truncate(path, left)
    return f"{folder.name}/{path.name}: {left} of {size} bytes left"


_CORRUPTIONS: dict[str, Callable[[Path, random.Random], str]] = {
    "bit_flipped": flip_bit,
    "page_zeroed": zero_page,
    "file_truncated": truncate,
}


def _pick(folder: Path, pattern: str, dice: random.Random) -> Path:
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size)
    if not found:
        raise UsageError(f"{folder}: no file {pattern} with content; nothing was injected")
    return dice.choice(found)


def _change(path: Path, offset: int, change: Callable[[bytes], bytes], length: int) -> bool:
    """Rewrite bytes in place; return False when they were the same already."""
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(length)
        new = change(old)
        if new == old:
            return False
        file.seek(offset)
        file.write(new)
        file.flush()
        os.fsync(file.fileno())
    return True
