"""Carries out what :mod:`outlast.integrations.ray.decision` orders, on a Ray cluster."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from typing import Any

from outlast.errors import OutlastError
from outlast.integrations.agent_command import (
    SHORTEST_LEAD,
    given_twice,
    option_names,
    with_stop_timeout,
)
from outlast.integrations.ray.agent import TOKEN_MARK, AgentActor, new_token
from outlast.integrations.ray.decision import (
    Ended,
    Finish,
    Notice,
    Order,
    Place,
    Placed,
    RayJob,
    Start,
    Stop,
    Terms,
)
from outlast.integrations.slurm.commands import Noted


@dataclass(frozen=True)
class ClusterJob:
    """One training job under Ray.

    Args:
        name: the run id.
        nodes: fewest and most nodes that train.
        command: the user's part of ``outlast run``'s command line.
        script_at: where the script stands in it.
        gpus, cpus: of each node.
        address: of the cluster; ``auto``: the one that this process is in.
        placement_timeout: seconds to wait for the nodes.
        restarts: failures in a row after which a node's place stays empty.
        lead: seconds that agents get to end in.
    """

    name: str
    nodes: tuple[int, int]
    run_dir: str
    command: tuple[str, ...]
    script_at: int
    spares: int = 0
    gpus: int = 0
    cpus: int = 1
    address: str = "auto"
    placement_timeout: float = 600.0
    restarts: int = 6
    lead: float = 120.0

    @property
    def bundles(self) -> int:
        """The bundles of the placement group."""
        return self.nodes[1] + self.spares

    def words(self, rank: int, endpoint: str) -> tuple[str, ...]:
        """Return the command line of one agent."""
        least, most = self.nodes
        ranks = (f"--nproc-per-node={self.gpus}",) if self.gpus else ()
        given = option_names(self.command[: self.script_at])
        return (
            *("outlast", "run", f"--nnodes={least}:{most}", f"--spares={self.spares}"),
            *(() if "--nproc-per-node" in given else ranks),
            *(f"--rdzv-id={self.name}", f"--rdzv-endpoint={endpoint}", f"--node-rank={rank}"),
            *(f"--token-file={TOKEN_MARK}", f"--run-dir={self.run_dir}"),
            *with_stop_timeout(self.command, self.script_at, self.lead),
        )


def problems(job: ClusterJob) -> list[str]:
    """Return what is wrong with a job, one line each."""
    found = []
    for name, value, least in (
        ("--spares", job.spares, 0),
        ("--gpus", job.gpus, 0),
        ("--cpus", job.cpus, 1),
        ("--lead", job.lead, SHORTEST_LEAD),
        ("--placement-timeout", job.placement_timeout, 1),
        ("--max-node-restarts", job.restarts, 0),
    ):
        if not value >= least:
            found.append(f"{name}={value:g}: expected {least} or more")
    if not job.run_dir.startswith("/"):
        found.append(f"--run-dir={job.run_dir}: expected an absolute path that all nodes see")
    return [*found, *given_twice(job.command[: job.script_at], "outlast ray")]


_SLICE = 1.0  # seconds that an actor waits for its agent at a time; a signal is passed on after it
_LOOK = 0.25  # seconds between two looks for signals


class RayUnavailable(OutlastError):
    """Ray is not installed, its cluster cannot be reached, or it has no room for the job."""


@dataclass
class _Bundle:
    """The actor of a bundle, and what it was asked last."""

    actor: Any
    asked: Any
    host: str = ""


class Driver:
    """Runs one job on a cluster that has room for it.

    Args:
        ray: the module.
        group: the placement group, ready.
    """

    def __init__(self, ray: Any, job: ClusterJob, group: Any) -> None:
        self._ray, self._job, self._group = ray, job, group
        self._token = new_token()
        self._bundles: dict[int, _Bundle] = {}
        self._port = 0
        self._free: dict[int, int] = {}

    def run(self, noted: Noted) -> Finish:
        """Carry out the machine's orders until it says that the job is over."""
        job = self._job
        machine = RayJob(Terms(job.bundles, job.nodes[0], job.restarts, job.lead))
        orders = machine.begin(time.monotonic())
        signals = 0
        while True:
            for order in orders:
                if isinstance(order, Finish):
                    return order
                self._carry_out(order)
            events = self._look(machine.deadline() - time.monotonic())
            events += [Notice(number) for number in noted.numbers[signals:]]
            signals = len(noted.numbers)
            now = time.monotonic()
            orders = [order for event in events for order in machine.handle(event, now)]
            orders += machine.tick(now) if now >= machine.deadline() else []

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Place):
            self._place(order.bundle)
        elif isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Stop) and order.bundle in self._bundles:
            self._bundles[order.bundle].actor.stop.remote()

    def _place(self, number: int) -> None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(self._group, number)
        kind = self._ray.remote(num_cpus=self._job.cpus, num_gpus=self._job.gpus, max_restarts=0)(AgentActor)
        actor = kind.options(scheduling_strategy=where).remote(self._token, self._job.cpus)
        self._bundles[number] = _Bundle(actor, actor.address.remote())

    def _start(self, order: Start) -> None:
        bundle = self._bundles[order.bundle]
        if order.at == order.bundle:
            self._port = self._free[order.bundle]
        endpoint = f"{self._bundles[order.at].host}:{self._port}"
        _say(f"bundle {order.bundle}: node {order.rank} at {bundle.host}, endpoint {endpoint}")
        bundle.asked = bundle.actor.start.remote(self._job.words(order.rank, endpoint))

    def _look(self, seconds: float) -> list[Placed | Ended | Notice]:
        """Wait a moment for what was asked of the actors; return what became of it."""
        asked = {bundle.asked: number for number, bundle in self._bundles.items() if bundle.asked is not None}
        wait = min(max(seconds, 0.0), _LOOK)
        if not asked:
            time.sleep(wait)
            return []
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=wait)
        events = [event for one in ready if (event := self._answer(asked[one])) is not None]
        return sorted(
            events, key=lambda event: isinstance(event, Placed)
        )  # no agent asks to join where one has ended

    def _answer(self, number: int) -> Placed | Ended | None:
        bundle = self._bundles[number]
        try:
            answer = self._ray.get(bundle.asked)
        except self._ray.exceptions.RayError as error:
            _say(f"bundle {number}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return self._ended(number, None)
        if not bundle.host:
            bundle.host, self._free[number] = answer
            bundle.asked = None
            return Placed(number)
        if answer is None:
            bundle.asked = bundle.actor.wait.remote(_SLICE)
            return None
        _say(f"bundle {number}: the agent ended with exit code {answer}")
        return self._ended(number, answer)

    def _ended(self, number: int, code: int | None) -> Ended:
        self._ray.kill(self._bundles.pop(number).actor)
        return Ended(number, code)


def drive(job: ClusterJob) -> int:
    """Run a job on a Ray cluster and return its exit code.

    Raises:
        RayUnavailable: Ray is not installed, its cluster cannot be reached, or it has no room for the job.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise RayUnavailable("Ray is not installed here: pip install 'outlast[ray]'") from error
    try:
        ray.init(address=job.address, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RayUnavailable(f"--address={job.address}: {error}; nothing was started") from error
    group = None
    try:
        group = _group(ray, job)
        with Noted() as noted:
            ending = Driver(ray, job, group).run(noted)
        _say(f"the job ends with exit code {ending.code}: {ending.reason}")
        return ending.code
    finally:
        if group is not None:
            ray.util.remove_placement_group(group)
        ray.shutdown()


def _group(ray: Any, job: ClusterJob) -> Any:
    """Return a placement group with one bundle a node, once Ray has found all of them."""
    bundle = {"CPU": job.cpus, **({"GPU": job.gpus} if job.gpus else {})}
    group = ray.util.placement_group(
        [bundle] * job.bundles, strategy="STRICT_SPREAD", name=f"outlast-{job.name}"
    )
    ready, _ = ray.wait([group.ready()], timeout=job.placement_timeout)
    if ready:
        return group
    fit = sum(
        one["Alive"] and all(one["Resources"].get(name, 0) >= amount for name, amount in bundle.items())
        for one in ray.nodes()
    )
    ray.util.remove_placement_group(group)
    raise RayUnavailable(
        f"{job.bundles} nodes (--nnodes and --spares) with {bundle} each expected, {fit} are alive; "
        f"waited {job.placement_timeout:.0f} s (--placement-timeout); nothing was started"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"outlast ray: {text}\n")
    sys.stderr.flush()
