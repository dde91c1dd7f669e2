"""The store of ranks that began early, served by a cold process where no zygote can fork a store host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outlast.launcher.workers.generation import Generation
from outlast.launcher.workers.zygote import Answering


class ColdStore(Answering):
    """The agent's side of a cold store host.

    Args:
        generation: whose ranks were promised the store.
        host: address of this host; empty: all of them.
        environment: the variables that all ranks share; torch is imported under them.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, generation: Generation, host: str, environment: Mapping[str, str]) -> None:
        super().__init__("store_host.py", {"host": host, "port": generation.meeting.port}, environment, ())
        generation.meeting = replace(generation.meeting, host_pid=self.pid)
        self.generation = generation

    def problem(self) -> str | None:
        """Return why the store is not served, "" if it is; None: that is not known yet."""
        found = self.answers()
        if found == []:
            return None
        answer = found[0] if found else {"storeless": "its host ended"}
        problem: str = answer.get("storeless") or answer["busy"]
        return problem


def unserved(generation: Generation, why: str) -> str:
    """Return what to say where nobody serves the store of a generation."""
    return (
        f"generation {generation.number}: nobody serves its store, port {generation.meeting.port}: {why}; a"
        " rank that uses torch.distributed waits there until torch's timeout"
    )
