"""The state that a rerun of a step needs: micro-batches, random states, and what forward passes change.

Nothing here waits for a device. A step without a rerun costs references to its micro-batches, the states of
the random generators, and a copy of the model's persistent buffers.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_not as _is_not
from typing import Any

import torch

from outlast import _torch_compat
from outlast.errors import UsageError
from outlast.ports import Stateful

Generators = dict[str, Any]
Drawn = tuple[Any, Generators | None]  # a micro-batch, and the random states after drawing it


class RerunDataIterator(Iterator[Any]):
    """An iterator over micro-batches that can go back to the first one of the step (Megatron-LM's name).

    It keeps the batches of the current step. Containers (dict, list, tuple) are copied, tensors are not: a
    script that changes a batch in place must copy it first. If drawing a batch changed the random states,
    they are set to the same ones when the batch is returned again.

    Args:
        iterable: a loader, or any iterable; the position of one with ``state_dict`` is saved in checkpoints.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._source = iterable
        self._inner: Iterator[Any] | None = None
        self._drawn: list[Drawn] = []
        self._at = 0
        self._swapped: list[Drawn] | None = None

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        if self._swapped is not None:
            if self._at >= len(self._swapped):
                raise StopIteration
            self._at += 1
            return _again(self._swapped[self._at - 1])
        if self._at < len(self._drawn):
            self._at += 1
            return _again(self._drawn[self._at - 1])
        self._drawn.append(self._draw())
        self._at += 1
        return _shallow(self._drawn[-1][0])

    def _draw(self) -> Drawn:
        before = capture_generators()
        if self._inner is None:
            self._inner = iter(self._source)
        batch = _shallow(next(self._inner))
        after = capture_generators()
        return batch, None if _same(before, after) else after

    @property
    def drawn(self) -> Sequence[Drawn]:
        """The micro-batches of the current step, each with the random states after drawing it."""
        return tuple(self._drawn)

    def rewind(self) -> None:
        """Go back to the first micro-batch of the step."""
        self._at, self._swapped = 0, None

    def advance(self) -> None:
        """Begin the next step: drop the batches, except those that were not drawn again after a rewind."""
        if self._swapped is not None:
            self._at, self._swapped = len(self._drawn), None
        self._drawn, self._at = [(batch, None) for batch, _ in self._drawn[self._at :]], 0

    def swap(self, drawn: Sequence[Drawn]) -> None:
        """Return other micro-batches once, instead of the step's own."""
        self._swapped, self._at = list(drawn), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, if it has one, and the batches that are to be drawn again."""
        give = getattr(self._inner, "state_dict", None) or getattr(self._source, "state_dict", None)
        return {
            "loader": None if give is None else give(),
            "left": [batch for batch, _ in self._drawn[self._at :]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there.

        Raises:
            UsageError: the checkpoint has a position, and the loader has no ``load_state_dict``.
        """
        self._drawn, self._at, self._swapped = [(batch, None) for batch in state["left"]], 0, None
        if state["loader"] is None:
            return
        take = getattr(self._source, "load_state_dict", None)
        if take is None:
            raise UsageError(
                "RerunDataIterator: the checkpoint has the position of a loader, but"
                f" {type(self._source).__name__} has no load_state_dict; nothing was loaded; use the loader"
                " that the checkpoint was made with"
            )
        take(state["loader"])
        self._inner = None


def iterators(data: object) -> tuple[RerunDataIterator, ...]:
    """Return the iterators that a step draws from; none if the script keeps its batches itself.

    Raises:
        UsageError: one of them is not a RerunDataIterator.
    """
    if data is None:
        return ()
    found = tuple(data) if isinstance(data, (list, tuple)) else (data,)
    for one in found:
        if not isinstance(one, RerunDataIterator):
            raise UsageError(
                f"guard.should_run_forward_backward: found {type(one).__name__}, expected a"
                " RerunDataIterator, which can go back to the first micro-batch of a step; wrap the iterator"
                " once, before the loop"
            )
    return found


def capture_generators() -> Generators:
    """Return the states of the random generators in use, including those of every CUDA device.

    Where CUDA is not in use yet, they include the seed that its generators would begin with.
    """
    states: Generators = {"python": random.getstate(), "torch": torch.get_rng_state()}
    states["seed"] = torch.initial_seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states["numpy"] = numpy.get_state(legacy=False)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(state, other[name]) for name, state in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(torch.equal, one, other))
    if isinstance(one, dict):  # numpy's
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the generators to captured states."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # a new process begins with the seed
        torch.cuda.manual_seed_all(states["seed"])


class StepState:
    """The state before a step that forward and backward change, besides gradients.

    Args:
        model: its persistent buffers are saved, such as the running statistics of batch norm.
        optimizer: the gradients of its parameters are cleared.
        also: further objects whose state a forward pass changes.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, also: Sequence[Stateful] = ()
    ) -> None:
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        self._parameters = tuple(dict.fromkeys([*model.parameters(), *trained]))
        self._also = tuple(also)
        self._places = _torch_compat.persistent_buffers(model)
        self._buffers: list[torch.Tensor] = []
        self._contents: list[torch.Tensor] = []
        self._states: list[Any] = []
        self._generators: dict[str, Any] = {}
        self._has_gradient: list[bool] = []

    def keep(self) -> None:
        """Save the state, at the beginning of a step."""
        self._generators = capture_generators()
        if self._places:
            self._keep_buffers()
        self._states = [copy.deepcopy(one.state_dict()) for one in self._also]
        self._has_gradient = [one.grad is not None for one in self._parameters]

    def _keep_buffers(self) -> None:
        live = [one for holder, name in self._places if (one := holder[name]) is not None]
        if len(live) != len(self._buffers) or any(map(_is_not, live, self._buffers)):
            self._buffers, self._contents = live, [torch.empty_like(one) for one in live]
        with torch.no_grad():
            _torch_compat.copy_all(self._contents, live)

    def put_back(self) -> None:
        """Restore the state; gradients become zero, or None where there were none."""
        restore_generators(self._generators)
        for (holder, name), buffer in zip(self._places, self._buffers, strict=True):
            holder[name] = buffer  # a forward pass may have put another tensor there
        with torch.no_grad():
            _torch_compat.copy_all(self._buffers, self._contents)
        for one, state in zip(self._also, self._states, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        for parameter, had in zip(self._parameters, self._has_gradient, strict=True):
            if not had:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @property
    def generators(self) -> Mapping[str, Any]:
        """The states of the random generators before the step."""
        return self._generators


def _again(drawn: Drawn) -> Any:
    batch, generators = drawn
    if generators is not None:
        restore_generators(generators)
    return _shallow(batch)


def _shallow(batch: Any) -> Any:
    """Return a batch with copied containers and the same tensors."""
    if type(batch) is dict:
        return {name: _shallow(one) for name, one in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_shallow(one) for one in batch)
    return batch
