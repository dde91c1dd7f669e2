"""The rendezvous for torchrun's own agent, ``torchrun --rdzv-backend=outlast``, and what its options say.

torchrun loads it by the entry point group ``torchrun.handlers`` (torch 2.13, elastic/rendezvous/registry.py)
in every process that imports its rendezvous. So what takes time to import is imported when it is used.
"""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from outlast import files, settings
from outlast._torch_compat import stops_workers, store_at
from outlast.checkpoint.policy.manifest import is_label
from outlast.cluster.agent import network
from outlast.cluster.policy.members import JobSpec
from outlast.errors import UsageError
from outlast.launcher.command.node_options import DEFAULT_PORT, LAST_CALL, NODE_LABEL

if TYPE_CHECKING:
    from outlast.cluster.policy.messages import Assignment
    from outlast.integrations.torchrun.part import Part


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
    from outlast.integrations.torchrun.part import Part
    from outlast.integrations.torchrun.rendezvous import meeting

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
        return store_at(listener, host, torch.distributed)

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
        if stops_workers(inspect.currentframe()):
            return False
        failure = sys.exc_info()[1]
        if failure is None or isinstance(failure, SystemExit):
            self._part.finished()
        else:
            self._part.close_job(f"torchrun gives up: {type(failure).__name__}")
        self._part.leave()
        return True


KEEP_ALIVE = (5.0, 3.0)  # seconds, times: torchrun's c10d rendezvous, keep_alive_interval and _max_attempt
_NUMBERS = {
    "spares": 0.0,
    "join_timeout": math.nan,
    "timeout": 900.0,  # torchrun passes its own default, LaunchConfig in torch/distributed/launcher/api.py
    "last_call_timeout": LAST_CALL,
    "ping_timeout": math.nan,
    "keep_alive_interval": KEEP_ALIVE[0],
    "keep_alive_max_attempt": KEEP_ALIVE[1],
}
_TEXTS = ("token_file", "node_name")


@dataclass(frozen=True)
class StoreRendezvous:
    """Where and how the agents of a job meet.

    Args:
        name: of this node.
        seeds: "host:port" where others may be found; the agent at the first one creates the job.
        run_id: of the job.
        nodes: least active, most active, and spare ones.
        token: what proves that an agent belongs to the job; empty: all of them are on this host.
        address: by which others reach this node.
        grace: seconds that a partial membership waits for more nodes, once it is large enough.
        join_timeout: seconds with too few nodes, or without a leader, until a rendezvous fails.
        ping_timeout: seconds of silence after which a node is lost.
    """

    name: str
    seeds: tuple[str, ...]
    run_id: str
    nodes: tuple[int, int, int]
    token: str
    address: str
    grace: float
    join_timeout: float
    ping_timeout: float

    def terms(self) -> JobSpec:
        """Return what every node has to agree with.

        Raises:
            UsageError: the numbers of nodes do not fit each other.
        """
        digest = hashlib.sha256(json.dumps(["torchrun", *self.nodes]).encode()).hexdigest()[:16]
        return JobSpec(
            run_id=self.run_id,
            version=metadata.version("outlast"),
            options=digest,
            slots=1,
            least=self.nodes[0],
            most=self.nodes[1],
            spares=self.nodes[2],
            grace=self.grace,
            join_timeout=self.join_timeout,
            ping_timeout=self.ping_timeout,
        )


def meeting(params: RendezvousParameters) -> StoreRendezvous:
    """Return where and how agents meet.

    Raises:
        UsageError: they make no sense; all that is wrong is named.
    """
    problems: list[str] = []
    numbers = _numbers(params.config, problems)
    seeds = tuple(_address(one.strip(), problems) for one in params.endpoint.split(","))
    name, token = _texts(params.config, problems)
    name = name or NODE_LABEL.sub("-", os.uname().nodename)
    if not is_label(name):
        problems.append(f"--rdzv-conf: node_name={name}: messages, digits, points and dashes expected")
    if problems:
        raise UsageError("; ".join(problems) + "; nothing was started")
    host = seeds[0].rpartition(":")[0]
    if not token and not network.is_loopback(host):
        raise UsageError(
            "--rdzv-conf: token_file expected (or OUTLAST_TOKEN), since the endpoint is no loopback address;"
            " nothing was started"
        )
    ping = numbers["ping_timeout"]
    join = numbers["join_timeout"]
    return StoreRendezvous(
        name=name,
        seeds=seeds,
        run_id=params.run_id,
        nodes=(params.min_nodes, params.max_nodes, int(numbers["spares"])),
        token=token,
        address=params.local_addr or network.outward(host),
        grace=numbers["last_call_timeout"],
        join_timeout=numbers["timeout"] if math.isnan(join) else join,
        ping_timeout=numbers["keep_alive_interval"] * numbers["keep_alive_max_attempt"]
        if math.isnan(ping)
        else ping,
    )


def _numbers(config: Mapping[str, Any], problems: list[str]) -> dict[str, float]:
    unknown = sorted(config.keys() - _NUMBERS.keys() - set(_TEXTS))
    if unknown:
        known = ", ".join(sorted((*_NUMBERS, *_TEXTS)))
        problems.append(
            f"--rdzv-conf: {', '.join(unknown)}: unknown to --rdzv-backend outlast; known are {known}"
        )
    if "ping_timeout" in config and any(key.startswith("keep_alive") for key in config):
        problems.append("--rdzv-conf: ping_timeout and keep_alive_*: two ways to say the same, expected one")
    found = dict(_NUMBERS)
    for key in _NUMBERS.keys() & config.keys():
        try:
            found[key] = float(config[key])
        except ValueError:
            problems.append(f"--rdzv-conf: {key}={config[key]}: expected a number")
            continue
        if found[key] < 0 or (key == "spares" and found[key] % 1):
            problems.append(f"--rdzv-conf: {key}={config[key]}: expected 0 or more")
        if key == "ping_timeout" and found[key] < 1:
            problems.append(f"--rdzv-conf: {key}={config[key]}: at least 1 second; pings come twice a second")
    return found


def _texts(config: Mapping[str, Any], problems: list[str]) -> tuple[str, str]:
    """Return the node's name and the token, where they were given."""
    around = settings.inherited()
    token = around.get(settings.TOKEN_VARIABLE, "")
    path = str(config.get("token_file", "")) or around.get(settings.TOKEN_FILE_VARIABLE, "")
    if path:
        try:
            token = files.read_text(path, files.TOKEN_BYTES).strip()
        except OSError as error:
            problems.append(f"--rdzv-conf: token_file={path}: {error.strerror}")
        else:
            if not token:
                problems.append(f"--rdzv-conf: token_file={path}: is empty")
            settings.export({settings.TOKEN_FILE_VARIABLE: os.path.abspath(path)})  # workers inherit it
    return str(config.get("node_name", "")) or around.get("OUTLAST_NODE", ""), token


def _address(text: str, problems: list[str]) -> str:

    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        problems.append(f"--rdzv-endpoint={text}: HOST:PORT of one of the nodes expected, the same on each")
    return f"{host}:{port}"
