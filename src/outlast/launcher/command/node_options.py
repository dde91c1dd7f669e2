"""The options about the nodes of a job: how many there are, where they meet, and this node's name."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outlast import settings
from outlast.checkpoint.policy.manifest import is_label
from outlast.cluster.policy.members import JobSpec
from outlast.errors import UsageError
from outlast.launcher.command.parser import PING_TIMEOUT
from outlast.parallelism.policy.degrees import Layout

DEFAULT_PORT = 29400  # torchrun's, torch 2.13, elastic/rendezvous/c10d_rendezvous_backend.py
MASTER_ADDR, MASTER_PORT = "127.0.0.1", 29500  # torchrun's, torch 2.13, distributed/run.py
_AGENTS_BELOW = 100  # agents meet so many ports below the ranks of a static job: at 29400 for 29500
JOIN_TIMEOUT = 600.0  # torchrun, RendezvousTimeout.join
LAST_CALL = 30.0  # torchrun, RendezvousTimeout.last_call; here a partial membership's grace
NODE_LABEL = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class NodesSpec:
    """The nodes of a job.

    Args:
        least, most: active nodes (``--nnodes MIN:MAX``).
        spares: nodes that may wait beside them.
        endpoint: where agents meet, "host:port"; further addresses after commas are tried for a running job,
            and only the first one starts it; empty: the job has one node.
        name: of this node.
        domains: failure domains of this node by kind, from wide to narrow.
        group, group_size: nodes that are used together or not at all.
        local_addr: address by which others reach this node; empty: found out.
        token_file: file with the secret that admits an agent to the job; empty: in the run folder.
        tls: files for TLS between agents: certificate, key, and the authority that signs certificates of
            agents; empty: no TLS.
        grace: seconds that a partial membership waits for more nodes, once it is large enough.
        join_timeout: seconds with too few nodes, or without a leader, after which an agent ends.
        ping_timeout: seconds of silence after which a node is lost.
        preflight: checks before a node joins: "auto", "full" or "off".
        static: node ranks and a master were given, as for torchrun's static rendezvous.
    """

    least: int = 1
    most: int = 1
    spares: int = 0
    endpoint: str = ""
    name: str = ""
    domains: tuple[tuple[str, str], ...] = ()
    group: str = ""
    group_size: int = 1
    local_addr: str = ""
    token_file: str = ""
    tls: tuple[str, ...] = ()
    grace: float = LAST_CALL
    join_timeout: float = JOIN_TIMEOUT
    ping_timeout: float = PING_TIMEOUT
    preflight: str = "auto"
    static: bool = False

    @property
    def several(self) -> bool:
        """Whether the job has several agents."""
        return bool(self.endpoint)

    @property
    def replaceable(self) -> bool:
        """Whether a spare may replace this node, or the job may continue without it."""
        return self.spares > 0 or self.least < self.most

    def terms(
        self, run_id: str, version: str, options: str, slots: int, layouts: tuple[Layout, ...] = ()
    ) -> JobSpec:
        """Return the part of the job that all nodes must have in common."""
        return JobSpec(
            run_id=run_id,
            version=version,
            options=options,
            slots=slots,
            least=self.least,
            most=self.most,
            spares=self.spares,
            group_size=self.group_size,
            grace=self.grace,
            join_timeout=self.join_timeout,
            ping_timeout=self.ping_timeout,
            layouts=layouts,
        )


def read(given: argparse.Namespace, env: Mapping[str, str], problems: list[str]) -> NodesSpec:
    """Return what was given; what is wrong with it is added to the problems."""
    least, most = node_range(given.nnodes, problems)
    spares, group_size = given.spares or 0, given.node_group_size or 1
    if spares < 0:
        problems.append(f"--spares={spares}: expected 0 or more nodes")
    several = most > 1 or spares > 0
    name = given.node_name or env.get("OUTLAST_NODE", "") or NODE_LABEL.sub("-", _default_name(given))
    if not is_label(name):
        problems.append(f"--node-name={name}: letters, digits, points and dashes expected")
    conf = _conf(given.rdzv_conf, problems)
    if given.ping_timeout is not None and not 1 <= given.ping_timeout < math.inf:
        problems.append(f"--ping-timeout={given.ping_timeout}: at least 1 second; pings come twice a second")
    domains = _domains(env.get("OUTLAST_FAILURE_DOMAINS", ""), problems)
    if not several:
        _without_effect(given, problems)
        return NodesSpec(name=name)
    endpoint = _endpoint(given, problems)
    rank = node_rank(given)
    if rank >= most + spares or (given.node_rank or 0) < 0:
        problems.append(
            f"--node-rank={given.node_rank}: expected 0 to {most + spares - 1} (--nnodes, --spares)"
        )
    patience = conf.get("keep_alive_interval", 0.0) * conf.get("keep_alive_max_attempt", 3.0)
    spec = NodesSpec(
        least,
        most,
        spares,
        endpoint,
        name,
        domains,
        given.node_group,
        group_size,
        given.local_addr or "",
        given.token_file,
        _files(given.tls, problems),
        conf.get("last_call_timeout", LAST_CALL),
        conf.get("join_timeout", conf.get("timeout", JOIN_TIMEOUT)),
        patience or given.ping_timeout or PING_TIMEOUT,
        given.preflight,
        _is_static(given),
    )
    try:
        spec.terms("", "", "", 1)
    except UsageError as error:
        problems.append(str(error))
    if given.preflight not in ("auto", "full", "off"):
        problems.append(f"--preflight={given.preflight}: known are auto, full and off")
    if patience and not 1 <= patience < math.inf:
        problems.append(
            f"--rdzv-conf: keep_alive_interval x keep_alive_max_attempt is {patience:g} s: at least 1 second;"
            " pings come twice a second"
        )
    return spec


def node_range(text: str, problems: list[str]) -> tuple[int, int]:
    """Return least and most of ``--nnodes``; what is wrong with it is added to the problems."""
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        problems.append(f"--nnodes={text}: expected N or MIN:MAX")
        return 1, 1
    if not 1 <= least <= most:
        problems.append(f"--nnodes={text}: MIN is at least 1 and at most MAX")
        return 1, 1
    return least, most


def _without_effect(given: argparse.Namespace, problems: list[str]) -> None:
    for name in ("node_group", "token_file", "tls"):
        if getattr(given, name):
            problems.append(f"--{name.replace('_', '-')}: has no effect on one node")
    if given.node_rank not in (0, None):
        problems.append(f"--node-rank={given.node_rank}: the job has one node (--nnodes), whose rank is 0")


def _is_static(given: argparse.Namespace) -> bool:
    """Say whether the job is torchrun's static one: a master and node ranks in place of an endpoint."""
    named = (given.master_addr, given.master_port, given.node_rank) != (None, None, None)
    return given.rdzv_backend == "static" and not given.rdzv_endpoint and not given.standalone and named


def _is_several(given: argparse.Namespace) -> bool:
    return node_range(given.nnodes, [])[1] > 1 or (given.spares or 0) > 0


def _default_name(given: argparse.Namespace) -> str:
    """Return the host's name, in a static job with the node rank: one host may have several nodes."""
    host = os.uname().nodename
    return f"{host}-{node_rank(given)}" if _is_several(given) and _is_static(given) else host


def node_rank(given: argparse.Namespace) -> int:
    """Return the place that the user gave this node; -1: none, or the backend pays no heed to it."""
    if given.rdzv_backend != "static" or not _is_several(given):
        return -1
    default = 0 if _is_static(given) else -1
    return default if given.node_rank is None else int(given.node_rank)


def master(given: argparse.Namespace, problems: list[str]) -> tuple[str, int]:
    """Return where the user wants the ranks to meet; port 0: anywhere.

    As under torchrun, an endpoint or the c10d backend leaves that to the rendezvous.
    """
    addr, port = given.master_addr or MASTER_ADDR, given.master_port
    if port is not None and not 0 < port < 65536:
        problems.append(f"--master-port={port}: expected a port, 1 to 65535")
        return addr, 0
    if given.rdzv_endpoint or given.rdzv_backend != "static":
        return "", 0
    if _is_several(given):
        return (addr, port or MASTER_PORT) if _is_static(given) else ("", 0)
    return (addr, port or 0) if (given.master_addr, port) != (None, None) else ("", 0)


def _endpoint(given: argparse.Namespace, problems: list[str]) -> str:
    """Return where agents meet: torchrun's rendezvous endpoint, or a port beside its static master's."""
    text = given.rdzv_endpoint
    if _is_static(given):
        addr, port = master(given, [])
        text = f"{addr}:{port - _AGENTS_BELOW if port > 1024 + _AGENTS_BELOW else port + _AGENTS_BELOW}"
    if not text and given.standalone:
        problems.append("--standalone: means one node")
    elif not text:
        problems.append(
            "--rdzv-endpoint: needed with several nodes: HOST:PORT of one of them, the same on each;"
            " or --node-rank, --master-addr and --master-port"
        )
    return ",".join(_address(one.strip(), problems) for one in text.split(","))


def _files(text: str, problems: list[str]) -> tuple[str, ...]:
    found = tuple(filter(None, text.split(",")))
    if text and len(found) not in (2, 3):
        problems.append(f"--tls={text}: CERTIFICATE,KEY or CERTIFICATE,KEY,AUTHORITY expected")
    problems += [f"--tls: {path} is no file" for path in found if not os.path.isfile(path)]
    return found


def _address(text: str, problems: list[str]) -> str:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if text and not (host and port.isdigit() and 0 < int(port) < 65536):
        problems.append(f"--rdzv-endpoint={text}: HOST:PORT expected")
    return f"{host}:{port}"


def _conf(text: str, problems: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key in (
            "join_timeout",
            "timeout",
            "last_call_timeout",
            "keep_alive_interval",
            "keep_alive_max_attempt",
        ):
            try:
                found[key] = float(value)
                if not 0 <= found[key] < math.inf:
                    raise ValueError
            except ValueError:
                problems.append(f"--rdzv-conf: {key}={value}: expected a number of seconds")
    return found


def _domains(text: str, problems: list[str]) -> tuple[tuple[str, str], ...]:
    try:
        return tuple(settings.failure_domains(text).items())
    except UsageError as error:
        problems.append(str(error))
        return ()
