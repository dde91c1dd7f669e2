"""The environment that a rank sees: torchrun's, variable by variable.

Source: torch 2.13, elastic/agent/server/local_elastic_agent.py and run.py.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.ipc.processes import identity
from outlast.settings import LAUNCHER_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from outlast.cluster.policy.messages import Assignment
    from outlast.launcher.command.options import LaunchOptions

_THREADS = "OMP_NUM_THREADS"
_RECORDER = frozenset({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"})  # its name until torch 2.8


def notice(options: LaunchOptions, inherited: Mapping[str, str]) -> str:
    """Return the warning, as of torchrun, that OMP_NUM_THREADS is set for the ranks; "" if it is not."""
    if options.world.nproc_per_node == 1 or _THREADS in inherited:
        return ""
    return f"{_THREADS}=1 for every rank, so that ranks do not crowd each other out; set it yourself to tune"


def common_environment(options: LaunchOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all ranks share; the zygote imports torch with them."""
    variables = {name: value for name, value in inherited.items() if name != TOKEN_VARIABLE}
    if options.world.nproc_per_node > 1:
        variables.setdefault(_THREADS, "1")
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if not _RECORDER.intersection(variables):
        variables["TORCH_FR_BUFFER_SIZE"] = "2000"  # torch's own default; a hang is read from it
    variables[LAUNCHER_VARIABLE] = identity()
    variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(options.signals)
    variables["TORCHELASTIC_MAX_RESTARTS"] = str(options.config.fault_tolerance.max_restarts)
    return variables


def mark() -> str:
    """Return what the environment of this launcher's workers has in it, and of no other process."""
    return f"{LAUNCHER_VARIABLE}={identity()}"


def rank_environment(
    options: LaunchOptions, mine: Assignment, local_rank: int, run_id: str, meeting: tuple[str, int, bool]
) -> dict[str, str]:
    """Return the variables of one rank, in addition to the common ones.

    Args:
        mine: what the generation means for this node.
        local_rank: of the rank.
        run_id: of the run.
        meeting: address and port of the store, and whether a process besides the ranks serves it.
    """
    local_world, world = str(options.world.nproc_per_node), str(mine.world_size)
    rank = str(mine.first_rank + local_rank)
    host, port, served = meeting
    world_spec = options.world
    if world_spec.master_addr and (port == world_spec.master_port or not options.nodes.several):
        host = world_spec.master_addr  # as it was written, which the script may name, too
    variables = {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(mine.node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": options.world.role,
        "LOCAL_WORLD_SIZE": local_world,
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(mine.nodes),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(mine.generation - 1),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(served),
    }
    if options.world.virtual_gpus:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = options.world.virtual_gpus[local_rank]
    return variables


def logger_variables(run_id: str, folder: Path, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which Weights & Biases goes on with a rank's run after a restart.

    The id names the run and its folder; ranks other than 0 have their number in theirs. There are none where
    the user, or a sweep, has chosen the id.
    """
    if "WANDB_RUN_ID" in inherited or "WANDB_SWEEP_ID" in inherited:
        return {}
    text = re.sub(r"[/\\#?%:]", "-", run_id)[:64]  # W&B refuses these
    digest = hashlib.blake2s(os.fsencode(f"{folder.absolute()}\0{run_id}"), digest_size=4).hexdigest()
    found = f"{text}-{digest}" + (f"-rank{rank}" if rank else "")
    return {"WANDB_RUN_ID": found, "WANDB_RESUME": inherited.get("WANDB_RESUME") or "allow"}


def error_file(path: str) -> dict[str, str]:
    """Return the variable with the path of a rank's error file."""
    return {"TORCHELASTIC_ERROR_FILE": path}
