"""Scripts with accelerate whose state a session saves and restores, bit for bit.

accelerate's ``load_state`` leaves it to the script to find its place in the data; ``integrations/resuming``
keeps it.
"""

from __future__ import annotations

from typing import Any

from outlast.config import CheckpointOptions
from outlast.errors import UsageError
from outlast.integrations.announcing import require
from outlast.integrations.resuming import ResumedLoop, Trained

OLDEST = (1, 0)
_OTHERS = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}


def resume(
    accelerator: Any, optimizer: Any = None, *, checkpoints: CheckpointOptions | None = None, name: str = ""
) -> ResumedLoop:
    """Save and restore, through a session, what ``accelerator.prepare`` and its registrations know.

    Call it on every rank, after ``prepare`` and ``register_for_checkpointing``, as a context manager::

        with resume(accelerator) as job:
            for epoch in job.epochs(3):
                for batch in job.batches(loader):
                    train(batch)

    Models, optimizers, schedulers, the scaler, registered objects, random states and the place in the data
    are saved when :func:`outlast.start` would, after a batch, and restored at the beginning of ``with``.

    Args:
        accelerator: of the script.
        optimizer: what ``prepare`` returned; with several, the one whose steps count. Default: the first.
        checkpoints: when and where to save; default as for :func:`outlast.start`.
        name: of this training, where a script has several; as for :func:`outlast.start`.

    Raises:
        UsageError: accelerate is missing or too old, nothing was prepared, or the state is sharded.
    """
    require("accelerate", OLDEST, "outlast.integrations.accelerate")
    _refuse(accelerator)
    return ResumedLoop(_Prepared(accelerator, optimizer or accelerator._optimizers[0]), checkpoints, name)


def _refuse(accelerator: Any) -> None:
    kind = accelerator.distributed_type.name
    other = _OTHERS.get(kind)
    if other is not None:
        raise UsageError(
            f"resume: found {other}, which shards the state by itself, expected DDP or one process; use"
            " announce and accelerator.save_state"
        )
    for name, found in (("model", accelerator._models), ("optimizer", accelerator._optimizers)):
        if not found:
            raise UsageError(f"resume: no {name} was prepared; call accelerator.prepare first")


class _Prepared(Trained):
    """What ``accelerator.prepare`` returned.

    Args:
        accelerator: of the script.
        optimizer: whose steps count.
    """

    one_step = "name the optimizer whose steps count"
    unknown_loader = "the loader was not prepared; call accelerator.prepare first"

    def __init__(self, accelerator: Any, optimizer: Any) -> None:
        self._accelerator = accelerator
        self._made = 0
        self._hook = getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._made += 1

    @property
    def processes(self) -> int:
        return int(self._accelerator.num_processes)

    def micro_step(self) -> int:
        return int(self._accelerator.step)

    def set_micro_step(self, step: int) -> None:
        self._accelerator.step = step

    def loaders(self) -> list[Any]:
        return list(self._accelerator._dataloaders)

    def state(self) -> dict[str, Any]:
        return _registered(self._accelerator)

    def steps(self) -> int:
        return self._made

    def end(self) -> None:
        self._hook.remove()


def _registered(accelerator: Any) -> dict[str, Any]:
    """Return what makes up the state, by names that stay the same between runs."""
    found: dict[str, Any] = {}
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    optimizers = [getattr(one, "optimizer", one) for one in accelerator._optimizers]
    kinds = {
        "model": models,
        "optimizer": optimizers,
        "scheduler": accelerator._schedulers,
        "object": accelerator._custom_objects,
    }
    for kind, objects in kinds.items():
        found |= {f"{kind}{number or ''}": one for number, one in enumerate(objects)}
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    return found
