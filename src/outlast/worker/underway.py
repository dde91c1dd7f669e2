"""What a step has begun and not finished: signs that it has begun, and gradients that wait for an optimizer.

A script that accumulates gradients over several steps has, after most of them, gradients that no optimizer
has taken yet. They belong to the state: without them a resumed run would lose the samples behind them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import distributed, local_of
from outlast.parallelism.worker import Batches

_LOG = logging.getLogger("outlast")
GRADIENTS = "outlast.gradients"  # no keyword argument, so no object of the script has this name


class Underway:
    """Watches the registered optimizers and batches of a session.

    Args:
        state: what is registered.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self._batches = [one for one in state.values() if isinstance(one, Batches)]
        self.optimizers = {
            name: stepper
            for name, one in state.items()
            if isinstance(one, torch.optim.Optimizer)
            for stepper in _torch_compat.steppers_of(one)[:1]
        }
        self._stepped: set[str] = set()  # since the last step ended
        self._before = frozenset(self.optimizers)  # in the last complete step
        self._places: list[dict[str, Any]] = []
        self.gradients = Gradients(self)
        self._hooks = [
            one.register_step_post_hook(functools.partial(self._on_step, name))
            for name, one in self.optimizers.items()
        ]

    def _on_step(self, name: str, *_: Any) -> None:
        self._stepped.add(name)

    def begin(self) -> None:
        """Record where the objects are after a load."""
        self._stepped.clear()
        held = self.gradients.loaded
        self._before = frozenset(name for name in self.optimizers if name not in held)
        self._places = [one.state_dict() for one in self._batches]

    def step_ended(self) -> None:
        """Record where the objects are after a complete step."""
        self._before = frozenset(self._stepped)
        self._stepped.clear()
        self._places = [one.state_dict() for one in self._batches]

    @property
    def begun(self) -> bool:
        """Whether something shows that another step has begun since the last one ended."""
        return bool(self._stepped) or self._places != [one.state_dict() for one in self._batches]

    def waiting(self) -> Iterator[tuple[str, int, torch.nn.Parameter]]:
        """Yield what has a gradient that its optimizer did not take in the last complete step.

        Yields:
            Name of the optimizer, number of the parameter in it, and the parameter.
        """
        for name, one in self.optimizers.items():
            if name not in self._before:
                yield from ((name, at, each) for at, each in enumerate(params_of(one)) if _waits(each.grad))

    def state(self, registered: Mapping[str, object]) -> Mapping[str, object]:
        """Return what is saved: what is registered, and gradients if some wait."""
        return {**registered, GRADIENTS: self.gradients} if any(self.waiting()) else registered

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()


class Gradients:
    """The gradients that wait, as an object of the state; a checkpoint without it has none.

    Args:
        underway: knows which wait.
    """

    outlast_optional = True  # a checkpoint may lack it

    def __init__(self, underway: Underway) -> None:
        self._underway = underway
        self.loaded: frozenset[str] = frozenset()  # optimizers of which some were loaded

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return them by optimizer and number of the parameter; of distributed ones this rank's part."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, at, parameter in self._underway.waiting():
            assert parameter.grad is not None
            found.setdefault(name, {})[str(at)] = local_of(parameter.grad.detach())
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set the gradients of all parameters; those that did not wait are gone."""
        self.loaded = frozenset(state)
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        fixed = cuda and _torch_compat.has_cuda_graph()  # a graph writes where they are
        for name, optimizer in self._underway.optimizers.items():
            saved = state.get(name, {})
            for at, parameter in enumerate(params_of(optimizer)):
                value = saved.get(str(at))
                if value is not None:
                    parameter.grad = _like(parameter, value)
                elif not fixed:
                    parameter.grad = None


def params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of an optimizer in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _waits(gradient: torch.Tensor | None) -> bool:
    """Say whether there is a gradient that can be saved; a sparse one cannot."""
    if gradient is None:
        return False
    if distributed(gradient) or (type(gradient) is torch.Tensor and gradient.layout is torch.strided):
        return True
    _warn_of(type(gradient).__name__ if gradient.layout is torch.strided else str(gradient.layout))
    return False


@functools.cache
def _warn_of(kind: str) -> None:
    _LOG.warning(
        "gradients that wait for their optimizer's step are not saved, since they are %s: a run that is"
        " resumed between two of its steps differs",
        kind,
    )


def _like(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return a gradient in new memory, distributed as its parameter is."""
    local = local_of(parameter.detach())
    found = torch.empty_like(local, dtype=saved.dtype).copy_(saved)
    return _torch_compat.distributed_like(parameter, found) if distributed(parameter) else found
