"""What torchrun's options say about where and how the agents of a job meet."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from outlast import files, settings
from outlast.agent import network
from outlast.agent.node_options import DEFAULT_PORT, LAST_CALL, NODE_LABEL
from outlast.core.errors import UsageError
from outlast.core.manifest import is_label
from outlast.core.members import Terms

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
class Meeting:
    """Where and how the agents of a job meet.

    Args:
        name: of this node.
        seeds: "host:port" where others may be found; whoever has the first one founds the job.
        run_id: of the job.
        nodes: least active, most active, and spare ones.
        token: what proves that an agent belongs to the job; empty: all of them are on this host.
        address: by which others reach this node.
        grace: seconds that a partial membership waits for more nodes.
        join_timeout: seconds with too few nodes, or without a coordinator, until a rendezvous fails.
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

    def terms(self) -> Terms:
        """Return what every node has to agree with.

        Raises:
            UsageError: the numbers of nodes do not fit each other.
        """
        digest = hashlib.sha256(json.dumps(["torchrun", *self.nodes]).encode()).hexdigest()[:16]
        return Terms(
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


def meeting(params: RendezvousParameters) -> Meeting:
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
        problems.append(f"--rdzv-conf: node_name={name}: letters, digits, points and dashes expected")
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
    return Meeting(
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
