"""Our rendezvous under torchrun's own agent: ``torchrun --rdzv-backend=outlast``.

torchrun loads it by the entry point group ``torchrun.handlers`` (torch 2.13, elastic/rendezvous/registry.py),
in every process that imports its rendezvous. So what costs time is imported only when it is used.
"""

from __future__ import annotations

import datetime
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

if TYPE_CHECKING:
    from outlast.core.letters import Assignment
    from outlast.integrations.torchrun_part import Part

BACKEND = "outlast"
CONNECT = datetime.timedelta(seconds=20)  # for a connection with a node that answered a moment ago
STORE = datetime.timedelta(seconds=300)  # the default of torch's own TCPStore
_POLL = 0.02
_BACKLOG = 4096


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes the handler: torchrun's registry calls this."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return this node's rendezvous handler, which begins to look for the others at once.

    Raises:
        UsageError: the options make no sense; all that is wrong is named.
    """
    from outlast.integrations.torchrun_meeting import meeting
    from outlast.integrations.torchrun_part import Part

    return Handler(Part(meeting(params)))


class Handler(RendezvousHandler):
    """torchrun's side of this node's part in the job.

    Each generation meets in a store of its own, served by the torchrun of its first node; no key of an older
    one is ever seen. The store of the next generation is ready ahead.

    Args:
        part: of this node in the job.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._ready = self._serve()
        self._present: Store | None = None

    def _serve(self) -> TCPStore:
        host = self._part.address  # torch by itself would listen at every address of this node
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        port = listener.getsockname()[1]
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers use the store of the generation, too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node has ranks in a generation that is younger than the last one.

        Raises:
            RendezvousTimeoutError: the others were not found in time.
            RendezvousClosedError: the job is over.
            RendezvousError: the job does not take this node.
            SystemExit: the job is done, and this node was a spare.
        """
        self._part.ended()
        while True:
            mine = self._part.place(self._ready.port)
            try:
                self._present = self._meet(mine)
            except (DistError, RuntimeError) as error:
                where = f"the store at {mine.host}:{mine.port}"
                self._part.failed(mine.generation, f"{where} cannot be reached: {error}")
                continue
            store = PrefixStore(BACKEND, self._present)
            if self._all_here(store, mine):
                store.set_timeout(STORE)
                self._part.begins(mine)
                bootstrap = RendezvousStoreInfo(mine.host, mine.port)
                return RendezvousInfo(store, mine.node_rank, mine.nodes, bootstrap)

    def _meet(self, mine: Assignment) -> Store:
        if not mine.master:
            return TCPStore(mine.host, mine.port, is_master=False, timeout=CONNECT)
        if mine.port != self._ready.port:
            raise RuntimeError("this node has another one ready")
        store, self._ready = self._ready, self._serve()
        return store

    def _all_here(self, store: Store, mine: Assignment) -> bool:
        """Wait until every node of the generation is there; False: it is over before it began.

        torchrun's next step waits for all of them, and its agent dies if one does not come.
        """
        try:
            here = store.add("here", 1)
            while here < mine.nodes and not self._part.is_over(mine.generation):
                time.sleep(_POLL)
                here = store.add("here", 0)
        except (DistError, RuntimeError) as error:
            self._part.failed(mine.generation, f"the store at {mine.host}:{mine.port} is gone: {error}")
        return not self._part.is_over(mine.generation)

    def is_closed(self) -> bool:
        """Say whether the job is over."""
        return self._part.ending is not None

    def set_closed(self) -> None:
        """End the job, on every node."""
        self._part.close_job("torchrun closed the rendezvous")

    def num_nodes_waiting(self) -> int:
        """Return 1 while torchrun's agent has to end its workers and come to the next rendezvous, else 0."""
        return int(self._part.has_to_restart())

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._part.run_id

    def shutdown(self) -> bool:
        """Leave the job: torchrun's agent is done, and ends the job if its workers failed for good.

        torchrun does not say which; it calls this while the exception of a failure is under way.
        """
        failure = sys.exc_info()[1]
        if failure is None or isinstance(failure, SystemExit):
            self._part.finished()
        else:
            self._part.close_job(f"torchrun gives up: {type(failure).__name__}")
        self._part.leave()
        return True
