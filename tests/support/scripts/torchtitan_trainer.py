"""torchtitan's own ``train.py`` with a small model; it goes on from its newest whole checkpoint.

arguments: folder of results, WAYS (damaged: the newest checkpoint is damaged before the fault; stopped: the
           fault is SIGSTOP; plain: torchtitan's checkpoint manager; async: saves are; none), the step in the
           save of which rank 0 is killed, the seconds that a step takes at least
"""

# ruff: noqa: E402 - what torchtitan asks of a GPU is replaced before it is imported
from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

# Without a GPU torchtitan takes cuda.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0  # type: ignore[assignment,return-value]  # it wants a number

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]  # torch 2.13 does not have it yet

from torchtitan import trainer as theirs
from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common import Embedding, Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.train import main

folder, ways, fatal, pace = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
OURS = "outlast.integrations.torchtitan.checkpoints"
WORDS, WIDTH, STEPS = 64, 16, 12


class NoMemory:
    """What torchtitan asks of a GPU's memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        """Nothing is counted."""


metrics.build_device_memory_monitor = NoMemory


class Model(BaseModel):
    """Guesses a word from the one before."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, **_: Any) -> None:
            """All of it is fixed."""

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(one.numel() for one in model.parameters()), 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH).build()
        self.head = Linear.Config(in_features=WIDTH, out_features=WORDS).build()

    def forward(self, words: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(words)))


def divided(model: torch.nn.Module, *, parallel_dims: Any, **_: Any) -> torch.nn.Module:
    fully_shard(model, mesh=parallel_dims.get_mesh("fsdp"))
    return model


class Data(BaseDataLoader):
    """Draws words; its place is what it has given."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self._rank, self._given = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self._given += 1
            draws = torch.Generator().manual_seed(1000 * self._given + self._rank)
            words = torch.randint(0, WORDS, (2, 9), generator=draws)
            yield {"input": words[:, :-1]}, words[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {f"given-{self._rank}": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state.get(f"given-{self._rank}", 0)


class NoTokens(BaseTokenizer):
    """The data are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Observed(theirs.Trainer):
    """Notes where it begins and what it ends with, and meets its fault."""

    begins = -1

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.Trainer.Config):
        pass

    def train_step(self, data: Any) -> None:
        rank = dist.get_rank()
        if self.begins < 0:
            self.begins = self.step - 1
            (folder / f"resumed-{rank}").write_text(str(self.begins))
        super().train_step(data)
        time.sleep(pace)
        with (folder / f"steps-{rank}").open("a") as trace:
            trace.write(f"{self.step}\n")
        if first and rank == 0 and self.step == fatal:
            fault()

    def train(self) -> None:
        super().train()
        weights = [one.full_tensor() for one in self.model_parts[0].parameters()]
        found = b"".join(one.detach().numpy().tobytes() for one in weights)
        (folder / f"weights-{dist.get_rank()}").write_text(hashlib.sha256(found).hexdigest())


def fault() -> None:
    if "stopped" in ways:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "damaged" in ways:
        (data, *_) = sorted((folder / "checkpoint" / f"step-{fatal - 3}").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-1])
    dcp.DefaultSavePlanner.resolve_data = dies  # type: ignore[method-assign]


def small() -> Observed.Config:
    return Observed.Config(
        model_spec=ModelSpec("small", "small", Model.Config(), divided, None, None, None),
        tokenizer=NoTokens.Config(),
        dataloader=Data.Config(),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=default_adamw(lr=0.01),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=8, steps=STEPS, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=3),
        debug=DebugConfig(seed=0),
    )


sys.modules["small_model"] = sys.modules[__name__]
sys.argv[1:] = ["--module", "small_model", "--config", "small"]
if "plain" not in ways:
    sys.argv += ["--override.imports", OURS]
if "async" in ways:
    sys.argv += ["--checkpoint.async_mode", "async"]
main()
