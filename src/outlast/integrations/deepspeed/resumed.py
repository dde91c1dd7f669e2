"""Scripts with a DeepSpeed engine whose state a session saves and restores, bit for bit.

Each rank gives the session what the engine's ``save_checkpoint`` would write for it: its own part of the
optimizer, as DeepSpeed's ``state_dict`` returns it. With ZeRO 3 the weights are part of that. Nothing
of DeepSpeed's is pickled, and no rank needs the part of another one.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from typing import Any

from outlast.config import CheckpointOptions
from outlast.errors import CheckpointMismatch, UsageError
from outlast.integrations.announcing import require
from outlast.integrations.resuming import ResumedLoop, Trained

OLDEST = (0, 19)
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_WEIGHTS = 3  # the stage of ZeRO that divides the weights, too
_SCALER = "loss_scaler"
_UNUSED = ("zero_stage", "param_slice_mappings", "universal_checkpoint_info")  # by a load of the own part


def resume(
    engine: Any, *loaders: Any, checkpoints: CheckpointOptions | None = None, name: str = ""
) -> ResumedLoop:
    """Save and restore, through a session, the state of an engine and the place in the data.

    Call it on every rank, after ``deepspeed.initialize``, as a context manager::

        with resume(engine, loader) as job:
            for epoch in job.epochs(3):
                for batch in job.batches(loader):
                    engine.backward(engine(batch))
                    engine.step()

    Weights, this rank's part of the optimizer, the scheduler, the loss scale, the engine's counts, random
    states and the place in the data are saved when :func:`outlast.start` would, after a batch with which the
    optimizer made a step, and restored at the beginning of ``with``.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        loaders: what ``job.batches`` is called with.
        checkpoints: when and where to save; default as for :func:`outlast.start`.
        name: of this training, where a script has several; as for :func:`outlast.start`.

    Raises:
        UsageError: DeepSpeed is missing or too old, or has a state that would not be restored.
    """
    require("deepspeed", OLDEST, "outlast.integrations.deepspeed")
    _refuse(engine, loaders)
    return ResumedLoop(_Engine(engine, loaders), checkpoints, name)


def _found(name: str) -> Any:
    return importlib.import_module(f"deepspeed.{name}")


def _refuse(engine: Any, loaders: tuple[Any, ...]) -> None:
    """Raise for what would not be restored, or not be exact."""
    if not isinstance(engine, _found("runtime.engine").DeepSpeedEngine):
        raise UsageError(
            f"resume: found a {type(engine).__qualname__}, expected the engine, which deepspeed.initialize"
            " returns first"
        )
    zero = engine._config.zero_config
    offloads = (zero.offload_optimizer, zero.offload_param)
    wrong = {
        "pipeline parallelism": isinstance(engine, _found("runtime.pipe.engine").PipelineEngine),
        "mixture of experts": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1,
        "curriculum learning": engine.curriculum_learning_enabled(),
        "random layer token drop": engine.random_ltd_enabled(),
        "elastic_checkpoint": zero.elastic_checkpoint,
        "offload to NVMe": any(one is not None and one.device == "nvme" for one in offloads),
        "hierarchical partitions (zero_hpz_partition_size)": zero.zero_hpz_partition_size > 1,
        "ZenFlow": zero.zenflow is not None,
    }
    found = [name for name, there in wrong.items() if there]
    if found:
        raise UsageError(
            f"resume: found {', '.join(found)}, whose state is not saved here; use AnnouncedLoop and"
            " engine.save_checkpoint"
        )
    if engine.optimizer is None or not hasattr(engine.optimizer, "state_dict"):
        raise UsageError("resume: the engine has no optimizer; give deepspeed.initialize one")
    if not loaders:
        raise UsageError("resume: no loader was given; call resume(engine, loader)")
    if any(isinstance(one, _found("runtime.dataloader").RepeatingLoader) for one in loaders):
        raise UsageError("resume: a RepeatingLoader has no epochs; give the loader that it repeats")


class _Engine(Trained):
    """What an engine trains.

    Args:
        engine, loaders: of :func:`resume`.
    """

    one_step = "call engine.step once for each batch"
    unknown_loader = "the loader was not given to resume; call resume(engine, loader)"

    def __init__(self, engine: Any, loaders: tuple[Any, ...]) -> None:
        self._engine = engine
        self._loaders = list(loaders)
        self._whole_at = engine.micro_steps  # when no micro-batch waited for the next step
        self._steps = engine.global_steps
        self._lost = 0

    @property
    def processes(self) -> int:
        return int(self._engine.dp_world_size)

    def loaders(self) -> list[Any]:
        return self._loaders

    def state(self) -> dict[str, Any]:
        engine = self._engine
        found: dict[str, Any] = {"engine": self}
        if engine.zero_optimization_stage() == _WEIGHTS:
            found["undivided"] = _Undivided(engine.module)
        else:
            found["model"] = engine.module
        found["optimizer"] = engine.optimizer if engine.optimizer is engine.basic_optimizer else _Part(engine)
        if engine.lr_scheduler is not None:
            found["scheduler"] = engine.lr_scheduler
        return found

    def steps(self) -> int:
        if self._engine.global_steps != self._steps:
            self._steps, self._whole_at = self._engine.global_steps, self._engine.micro_steps
        return int(self._steps)

    def require_whole(self) -> None:
        if self._lost:
            raise UsageError(
                f"resume: found a run that ended {self._lost} micro-batches after its last optimizer step,"
                " expected one that ended with a step; their gradients were not saved, so more epochs would"
                " not be exact; begin a new run"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's counts."""
        counts = {name: int(getattr(self._engine, name)) for name in _COUNTS}
        waiting = counts["micro_steps"] - self._whole_at
        return {"counts": counts, "waiting": waiting, "stage": int(self._engine.zero_optimization_stage())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the engine's counts.

        Raises:
            CheckpointMismatch: the state is of another stage of ZeRO.
        """
        found, saved = int(self._engine.zero_optimization_stage()), state["stage"]
        if found != saved:
            raise CheckpointMismatch(f"found ZeRO stage {found}, expected {saved}, as saved")
        for name, value in state["counts"].items():
            setattr(self._engine, name, value)
        self._lost = state["waiting"]


class _Part:
    """This rank's part of an optimizer that DeepSpeed has wrapped.

    Args:
        engine: whose.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return what a load of this rank's part needs, without DeepSpeed's own types."""
        found = {name: one for name, one in self._optimizer.state_dict().items() if name not in _UNUSED}
        if _SCALER in found:
            found[_SCALER] = {name: one for name, one in vars(found[_SCALER]).items() if name != "dtype"}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put this rank's part back, as DeepSpeed does when it loads its own files."""
        optimizer = self._optimizer
        if _SCALER in state:
            vars(optimizer.loss_scaler).update(state[_SCALER])
            state = {**state, _SCALER: optimizer.loss_scaler}
        if "state_dict_list" not in inspect.signature(optimizer.load_state_dict).parameters:
            optimizer.load_state_dict(state)
            return
        divided = hasattr(optimizer, "checkpoint_event_prologue")  # weights, with ZeRO 3
        if divided:
            optimizer.checkpoint_event_prologue()
        # It takes the own part alone out of those of all ranks.
        optimizer.load_state_dict(state_dict_list=defaultdict(lambda: state), load_from_fp32_weights=True)
        if divided:
            optimizer.checkpoint_event_epilogue()


class _Undivided:
    """What ZeRO 3 does not keep in its optimizer: buffers, and this rank's part of frozen weights.

    Args:
        module: of the engine.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return them by name."""
        weights = dict(self._module.named_parameters(remove_duplicate=False))
        kept = self._module.state_dict()
        return {
            "buffers": {name: one for name, one in kept.items() if name not in weights},
            "frozen": {name: one.ds_tensor for name, one in weights.items() if not one.requires_grad},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
        now = self.state_dict()
        for kind, content in state.items():
            for name, tensor in content.items():
                now[kind][name].data.copy_(tensor)
