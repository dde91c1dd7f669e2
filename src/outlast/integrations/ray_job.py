"""What ``outlast ray`` is told, and what of it cannot be: nothing is started yet."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.integrations.kubernetes_job import OURS, option_names
from outlast.integrations.ray_agent import TOKEN_MARK
from outlast.integrations.slurm_batch import SHORTEST_LEAD, with_stop_timeout


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
        restarts: failures in a row after which a node's place is given up.
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
    def seats(self) -> int:
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
    for word in job.command[: job.script_at]:
        name = word.partition("=")[0].replace("_", "-")
        clash = [one for one in OURS if name.startswith("--") and one.startswith(name)]
        if clash:
            found.append(f"{name}: outlast ray gives {clash[0]} itself; it cannot be given twice")
    return found
