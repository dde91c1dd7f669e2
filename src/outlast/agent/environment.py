"""The environment that a rank sees: torchrun's, variable by variable.

Source: torch 2.13, elastic/agent/server/local_elastic_agent.py and run.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from outlast.agent.options import LaunchOptions

_THREADS = "OMP_NUM_THREADS"


def notice(options: LaunchOptions, inherited: Mapping[str, str]) -> str:
    """Return what torchrun warns of: a variable that is set though nobody asked for it; "" when none is."""
    if options.world.nproc_per_node == 1 or _THREADS in inherited:
        return ""
    return f"{_THREADS}=1 for every rank, so that ranks do not crowd each other out; set it yourself to tune"


def common_environment(options: LaunchOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what all ranks share; the zygote imports torch under it."""
    variables = dict(inherited)
    if options.world.nproc_per_node > 1:
        variables.setdefault(_THREADS, "1")
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(options.signals)
    variables["TORCHELASTIC_MAX_RESTARTS"] = str(options.config.fault_tolerance.max_restarts)
    return variables


def rank_environment(
    options: LaunchOptions, rank: int, run: tuple[str, int], meeting: tuple[int, bool], error_file: str
) -> dict[str, str]:
    """Return what one rank has on top.

    Args:
        rank: global and local rank (one node).
        run: the run id and the generation.
        meeting: port of the store on loopback, and whether a process besides the ranks serves it.
        error_file: where the rank leaves its exception.
    """
    world = str(options.world.nproc_per_node)
    run_id, generation = run
    port, served = meeting
    variables = {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": options.world.role,
        "LOCAL_WORLD_SIZE": world,
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(served),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if options.world.virtual_gpus:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = options.world.virtual_gpus[rank]
    return variables
