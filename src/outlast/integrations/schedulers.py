"""The schedulers by name, and ``outlast run --scheduler NAME``: it gives the nodes and takes the job back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from outlast import plugins, settings
from outlast.errors import ExitCode, UsageError
from outlast.integrations.budget import Budget, newest_step
from outlast.integrations.requeue import Ending, Limits, NodeEnd, Outcome
from outlast.integrations.slurm import commands
from outlast.launcher.command.options import LaunchOptions
from outlast.observe.run_folder import RunFolder
from outlast.ports import Allocation, Scheduler

_FIRST_PORT, _PORTS = 29400, 2000
JOIN_TIMEOUT = 120.0  # seconds with too few nodes, after which another allocation is asked for


class Slurm:
    """Slurm: each node of a job step sees its place in ``SLURM_*``."""

    name = "slurm"

    def detect(self, environment: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of a job step; the agents meet on the node from which srun was called."""
        job = environment.get("SLURM_JOB_ID", "")
        if not job:
            return None
        nodes, first = int(environment.get("SLURM_JOB_NUM_NODES", "1")), ""
        if nodes > 1 and "SLURM_LAUNCH_NODE_IPADDR" in environment:
            first = f"{environment['SLURM_LAUNCH_NODE_IPADDR']}:{_FIRST_PORT + int(job) % _PORTS}"
        return Allocation(
            job=job,
            nodes=nodes,
            node_rank=int(environment.get("SLURM_NODEID", "0")),
            node=environment.get("SLURMD_NODENAME", ""),
            endpoint=first,
            ends=float(environment.get("SLURM_JOB_END_TIME", "inf")),
        )

    def requeue(self, allocation: Allocation, reason: str) -> int:
        """Have Slurm put the job back into the queue; raises SlurmError where it refuses."""
        del reason
        commands.requeue(allocation.job)
        return ExitCode.OK


class Kubernetes:
    """Kubernetes: each pod of an Indexed Job knows its index; a pod that fails is started again."""

    name = "kubernetes"

    def detect(self, environment: Mapping[str, str]) -> Allocation | None:
        """Return the place of a pod; how many there are, and the endpoint, are on the command line."""
        index = environment.get("JOB_COMPLETION_INDEX", "")
        if not index:
            return None
        pod = environment.get("HOSTNAME", "")
        return Allocation(pod.removesuffix(f"-{index}"), nodes=0, node_rank=int(index))

    def requeue(self, allocation: Allocation, reason: str) -> int:
        """Return the exit code of a pod that the Job's podFailurePolicy starts again."""
        del allocation, reason
        return ExitCode.PREEMPTED


class Ray(Kubernetes):
    """Ray: the driver of ``outlast ray run`` starts an agent again that ended with such an exit code."""

    name = "ray"

    def detect(self, environment: Mapping[str, str]) -> Allocation | None:
        """Return the job of an actor or task; nodes and endpoint are on the command line."""
        job = environment.get("RAY_JOB_ID", "")
        return Allocation(job, nodes=0) if job else None


_OURS: dict[str, Callable[[], Scheduler]] = {"slurm": Slurm, "kubernetes": Kubernetes, "ray": Ray}


def find(name: str) -> Scheduler:
    """Return the scheduler of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in _OURS and name not in plugins.names(plugins.SCHEDULERS):
        known = ", ".join([*_OURS, *plugins.names(plugins.SCHEDULERS)])
        raise UsageError(f"--scheduler={name}: known are {known}; nothing was started")
    made: Callable[[], Any] = _OURS[name] if name in _OURS else plugins.load(plugins.SCHEDULERS, name)
    found: Scheduler = made()
    return found


def node_options(allocation: Allocation) -> list[str]:
    """Return the options of ``outlast run`` by which the agents of several nodes find each other."""
    found = [f"--node-name={allocation.node}"] if allocation.node else []
    if allocation.nodes > 1:
        found += [f"--nnodes={allocation.nodes}", f"--rdzv-conf=join_timeout={JOIN_TIMEOUT:.0f}"]
    if allocation.endpoint:
        found += [f"--rdzv-endpoint={allocation.endpoint}"]
    if allocation.nodes != 1:
        found += [f"--node-rank={allocation.node_rank}"]
    return found


class ScheduledRun:
    """One ``outlast run`` in an allocation of a scheduler.

    Args:
        name: of the scheduler.
        environment: of this process.

    Raises:
        UsageError: there is no such scheduler, or this process is in none of its jobs.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._scheduler = find(name)
        found = self._scheduler.detect(environment)
        if found is None:
            raise UsageError(f"--scheduler={name}: this process is in no job of {name}; nothing was started")
        self._allocation = found
        self.options = node_options(found)

    def run(self, options: LaunchOptions, launch: Callable[[LaunchOptions], int]) -> int:
        """Run the job, and ask the scheduler for another allocation if that may help; return the exit code.

        Node 0 alone asks. The ranks are told when the allocation ends.

        Raises:
            OutlastError: nothing was started, or the scheduler refused.
        """
        allocation = self._allocation
        settings.export(settings.allocation_variables(allocation.ends, allocation.grace))
        if allocation.node_rank:
            return launch(options)
        run = RunFolder(options.run_dir)
        budget = Budget(run, self._scheduler.name, allocation.job, Limits())
        refused = budget.begin()
        if refused is not None:
            _say(f"{refused.outcome.value}: {refused.reason}; exit code {refused.exit_code}")
            return refused.exit_code
        code = launch(options)
        node = NodeEnd(options.nodes.name, code)
        decision = budget.end(Ending(code, (node,), 1, newest_step(run)))
        _say(f"{decision.outcome.value}: {decision.reason}")
        if decision.outcome is not Outcome.REQUEUE:
            return decision.exit_code
        return self._scheduler.requeue(allocation, decision.reason)


def _say(text: str) -> None:
    sys.stderr.write(f"outlast run: {text}\n")
    sys.stderr.flush()
