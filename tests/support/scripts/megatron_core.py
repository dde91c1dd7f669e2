"""Trains a small GPT of megatron-core; goes on from its newest whole checkpoint.

arguments: folder of results, WAY (killed: rank 0 is killed in its save of the fatal step; damaged: and a file
           of the newest checkpoint is damaged before; none), the step, the seconds that a step takes at least
           In the ways plain (megatron-core's own strategy) and dcp (dcp.save of torch's state dicts) outlast
           is not used, and the tracker file, as Megatron-LM writes it, names the newest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.tensor_aware_state_dict import HAVE_NVRX
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.overrides import TorchFunctionMode

folder, way, fatal, pace = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
unchanged = way in ("plain", "dcp")
checkpoints, tracker = folder / "checkpoints", folder / "checkpoints" / "latest_checkpointed_iteration.txt"
SAMPLES, TOKENS, WORDS, STEPS = 2, 8, 32, 8


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that megatron-core makes on ``cuda`` without asking whether there is one."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return args[0] if function is torch.Tensor.cuda else function(*args, **options)


torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()  # dropout then draws from the CPU's states
OnCpu().__enter__()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
parallel_state.initialize_model_parallel()
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    use_cpu_initialization=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
model = DistributedDataParallel(
    config,
    DistributedDataParallelConfig(),
    GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=TOKENS),
)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, min_lr=0.0, clip_grad=0.0), [model])
scheduler = OptimizerParamScheduler(
    optimizer,
    init_lr=0.0,
    max_lr=0.01,
    min_lr=0.0,
    lr_warmup_steps=2,
    lr_decay_steps=STEPS,
    lr_decay_style="cosine",
    start_wd=0.01,
    end_wd=0.1,
    wd_incr_steps=STEPS,
    wd_incr_style="linear",
)
torch.manual_seed(rank + 1)  # data and dropout differ by rank
positions = torch.arange(TOKENS).repeat(SAMPLES, 1)
later = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5


def state(loading: bool) -> dict[str, Any]:
    """Return what is saved, as Megatron-LM groups it."""
    weights = model.module.sharded_state_dict()
    draws = ShardedObject("rng_state", torch.get_rng_state(), (ranks,), (rank,))
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": draws,
        "iteration": done,
    }


def torch_state() -> dict[str, Any]:
    """Return what dcp.save takes."""
    weights, moments = get_state_dict(model.module, adam)
    return {
        "model": weights,
        "optimizer": moments,
        "opt_param_scheduler": scheduler.state_dict(),
        f"rng_state-{rank}": torch.get_rng_state(),
        "iteration": done,
    }


def load(newest: Path) -> int:
    if way == "dcp":
        found = torch_state()
        dcp.load(found, checkpoint_id=newest)
        weights, moments = found["model"], found["optimizer"]
        set_state_dict(model.module, adam, model_state_dict=weights, optim_state_dict=moments)
        torch.set_rng_state(found[f"rng_state-{rank}"])
    else:
        found = dist_checkpointing.load(state(loading=True), str(newest), loading)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["rng_state"])
    scheduler.load_state_dict(found["opt_param_scheduler"])
    (folder / f"resumed-{rank}").write_text(newest.name)
    return int(found["iteration"])


def digest_of(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


def save() -> None:
    target = checkpoints / f"iter_{done:07}"
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if way == "dcp":
        dcp.save(torch_state(), checkpoint_id=target)
    else:
        dist_checkpointing.save(state(loading=False), str(target), saving)
    if rank == 0:
        tracker.write_text(str(done))


def fault() -> None:
    def dies(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if way == "damaged":
        common = checkpoints / f"iter_{done - 2:07}" / "common.pt"
        data = bytearray(common.read_bytes())
        data[len(data) // 2] ^= 1
        common.write_bytes(data)
    (dcp.DefaultSavePlanner if unchanged else strategies.MCoreSavePlanner).resolve_data = dies


class Alone:
    """Nobody is told and nobody asks."""

    should_save = should_stop = False

    def step_done(self, step: int) -> None:
        """Tell nobody."""

    saved = step_done


done = 0
(adam,) = (one.optimizer for one in optimizer.chained_optimizers)
saving: Any = None
loading: Any = None
asks: Any = nullcontext(Alone())
newest: Path | None
if unchanged:
    newest = checkpoints / f"iter_{int(tracker.read_text()):07}" if tracker.exists() else None
else:
    from outlast.integrations.announcing import AnnouncedLoop
    from outlast.integrations.dcp import newest_whole
    from outlast.integrations.megatron import OutlastLoadStrategy, OutlastSaveStrategy

    saving, loading = FullyParallelSaveStrategyWrapper(OutlastSaveStrategy()), OutlastLoadStrategy()
    asks, newest = AnnouncedLoop(), newest_whole(checkpoints)
if newest is not None:
    done = load(newest)
(folder / f"nvrx-{rank}").write_text(str(HAVE_NVRX))
with asks as job:
    while done < STEPS and not job.should_stop:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        words = torch.randint(0, WORDS, (SAMPLES, TOKENS))
        model(words, positions, later, labels=words).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        scheduler.step(1)
        done += 1
        with open(folder / f"steps-{rank}", "a") as file:
            print(json.dumps({"step": done}), file=file, flush=True)
        job.step_done(done)
        if done % 2 == 0 or job.should_save:
            if way != "none" and first and rank == 0 and done == fatal:
                fault()
            save()
            job.saved(done)
        time.sleep(pace)
ended = {
    "weights": [one.detach() for one in model.parameters()],
    "moments": [value for each in adam.state.values() for _, value in sorted(each.items())],
    "rates": [
        torch.tensor([float(group["lr"]), float(group["weight_decay"])]) for group in adam.param_groups
    ],
    "draws": [torch.get_rng_state()],
}
digests = {name: digest_of(tensors) for name, tensors in ended.items()}
for name, digest in digests.items():
    (folder / f"{name}-{rank}").write_text(digest)
draws = digests.pop("draws")  # they differ by rank
(folder / f"done-{rank}").write_text(json.dumps({"step": done, **digests}))
if way == "none":  # megatron-core's own strategy reads it, too
    for one in ended["weights"]:
        one.zero_()
    dist_checkpointing.load(state(loading=True), str(checkpoints / f"iter_{done:07}"))
    (folder / f"theirs-{rank}").write_text(digest_of(ended["weights"]))
dist.destroy_process_group()
