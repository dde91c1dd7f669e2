"""A megatron-core job for bench/frameworks.py: a tiny GPT on the CPU, dist_checkpointing every 20 steps."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
NEWEST = FOLDER / "latest_checkpointed_iteration.txt"
SAMPLES, TOKENS, WORDS = 2, 8, 32


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that megatron-core makes on ``cuda`` without asking whether there is one."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return args[0] if function is torch.Tensor.cuda else function(*args, **options)


def main() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    OnCpu().__enter__()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=TOKENS)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, min_lr=0.0, clip_grad=0.0), [model])
    positions = torch.arange(TOKENS).repeat(SAMPLES, 1)
    later = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5
    done = 0

    def state(loading: bool) -> dict[str, Any]:
        weights = model.module.sharded_state_dict()
        moments = optimizer.sharded_state_dict(weights, is_loading=loading)
        return {"model": weights, "optimizer": moments, "iteration": done}

    if NEWEST.exists():
        found = dist_checkpointing.load(state(loading=True), str(FOLDER / NEWEST.read_text()))
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["iteration"]
    while done < 100_000:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        words = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(done))
        model(words, positions, later, labels=words).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        done += 1
        if done % 20 == 0:
            save(state(loading=False), FOLDER / f"iter_{done:07}")
        with open(f"{FOLDER}/trace-{RANK}", "a") as file:
            file.write(f"{os.getpid()} {done} {time.monotonic()}\n")


def save(state: dict[str, Any], target: Path) -> None:
    target.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(target))
    if RANK == "0":
        (FOLDER / "newest.part").write_text(target.name)
        os.replace(FOLDER / "newest.part", NEWEST)


if __name__ == "__main__":  # the first save starts a process that imports this file
    main()
