"""Finds ranks that wait for ever because the script starts its training processes itself, with ``mp.spawn``.

TORCHELASTIC_USE_AGENT_STORE says that a process besides the ranks serves their store, so the spawned rank 0
does not serve one, and all wait for half an hour. torchrun has the same problem.
"""

from __future__ import annotations

import contextlib

from outlast.hang.agent.monitor import Watch
from outlast.ipc.processes import children_of, cpu_seconds
from outlast.launcher.workers.generation import Generation

PATIENCE = 10.0  # seconds from the start of a generation until a rank that has sent no heartbeat is looked at
_SPAWNED = b"multiprocessing.spawn"
_IS_CLIENT = b"TORCHELASTIC_USE_AGENT_STORE=True"
_IDLE = 0.5  # processor seconds of such a process between two looks


class Spawning:
    """Looks for such ranks; reports them once in each generation."""

    def __init__(self) -> None:
        self._said = 0
        self._looked = 0.0
        self._used: dict[int, float] = {}

    def explain(self, generation: Generation, watch: Watch, now: float) -> str:
        """Return a message about ranks without a heartbeat; "": there is none."""
        if self._said == generation.number or now - max(generation.spawned, self._looked) < PATIENCE:
            return ""
        self._looked = now
        before, self._used = self._used, {}
        for worker in generation.living():
            heartbeat = watch.heartbeats.get(worker.rank)
            if heartbeat is None or heartbeat.beats:
                continue
            spawned = [pid for pid in children_of(worker.pid) if _waits_for_a_store(pid)]
            self._used |= {pid: cpu_seconds(pid) for pid in spawned}
            if len(spawned) > 1 and all(self._used[pid] - before.get(pid, -1e9) < _IDLE for pid in spawned):
                self._said = generation.number
                return _words(worker.rank, len(spawned))
        return ""


def _waits_for_a_store(pid: int) -> bool:
    """Say whether a process was started by multiprocessing's spawn, as a client of the launcher's store."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
        if _SPAWNED not in command:
            return False
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _IS_CLIENT in file.read().split(b"\0")
    return False


def _words(rank: int, number: int) -> str:
    return (
        f"rank {rank} has started {number} processes of its own (mp.spawn), and they do nothing: under a"
        " launcher nobody serves their store, since TORCHELASTIC_USE_AGENT_STORE is set. Start the script"
        " with plain python, or without mp.spawn and with --nproc-per-node, or remove"
        " TORCHELASTIC_USE_AGENT_STORE from os.environ before mp.spawn"
    )
