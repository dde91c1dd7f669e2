"""The losses and gradients of a step on this rank, and the rollback to an older checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from outlast import _torch_compat
from outlast.agreement.policy.votes import Reading
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.content.codecs import distributed, local_of
from outlast.checkpoint.load.restorer import Restored
from outlast.errors import NonFinite, UsageError
from outlast.numerics.policy.numerics import Finding, plan
from outlast.settings import WorkerContext

_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class _Group:
    """Parameters whose gradients are measured in the same way.

    Args:
        root: of the share of a gradient's square that this rank answers for: what several ranks have alike
            is counted once in all.
        sharded: its gradients are distributed tensors; this rank's part counts.
        kind: what sums are made in; None: the gradients' own type.
    """

    root: float
    sharded: bool
    kind: torch.dtype | None
    names: list[str] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


class Gauge:
    """Measures a rank's steps: the mean of the losses that it validates, and the norm of its gradients.

    A norm is not finite where a gradient is not, and reads each gradient once, at the speed of memory;
    ``torch.isfinite`` makes a tensor of its own first. Norms of all parameters and the loss go to the host in
    one transfer, the only time that the host waits for the device.

    Args:
        model: whose gradients are measured.
        optimizer: what it changes besides is measured, too.
        gradients: measure gradients at all.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: bool = True
    ) -> None:
        self._named = {one: name for name, one in model.named_parameters()}
        for number, one in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            self._named.setdefault(one, f"parameter {number} of the optimizer")
        self._gradients = gradients
        self._groups: list[_Group] = []
        self._scattered = False  # over several devices
        self._total = torch.zeros(())  # of the losses, on their device
        self._kind: torch.dtype | None = None  # of the losses
        self._place: torch.device | None = None
        self._count = 0
        self._bad: list[str] = []

    def equip(self, world: int) -> None:
        """Find how the parameters are distributed; before the first step."""
        found: dict[tuple[float, bool, torch.dtype | None], _Group] = {}
        for one, name in self._named.items() if self._gradients else ():
            sharded = distributed(one)
            key = (math.sqrt(_parts(one) / world), sharded, _sums_in(one.dtype))
            group = found.setdefault(key, _Group(*key))
            group.names.append(name)
            group.parameters.append(one)
        self._groups = list(found.values())
        self._scattered = len({one.device for one in self._named}) > 1

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; does not wait for the device.

        Raises:
            UsageError: it is no tensor of one number.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                f"guard.validate: found {_form(loss)}, expected the loss of a micro-batch, a tensor of one"
                " number; nothing was checked"
            )
        value = loss.detach()
        if value.dim():
            value = value.reshape(())
        if self._count:
            self._total.add_(value)
        else:
            if value.dtype is not self._kind or value.device != self._place:
                self._make_room(value)
            self._total.copy_(value)  # a copy: a graph's replay writes over its outputs
        self._count += 1

    def _make_room(self, loss: torch.Tensor) -> None:
        """Make room for the sum of such losses."""
        self._kind, self._place = loss.dtype, loss.device
        kind = torch.float64 if loss.dtype is torch.float64 else torch.float32
        with torch.inference_mode(False):
            self._total = torch.zeros((), dtype=kind, device=loss.device)
        self._scattered = len({one.device for one in (*self._named, self._total)}) > 1

    def read(self) -> Reading:
        """Return the result of the step, and reset; waits for the device once."""
        values: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        shares: list[tuple[float, int]] = []
        for group in self._groups:
            found = [grad for one in group.parameters if (grad := one.grad) is not None]
            if group.sharded:
                with torch.no_grad():
                    found = [one.to_local() for one in found]  # type: ignore[attr-defined]
            if found:
                values += _norms(found, group.kind)
                gradients += found
                shares.append((group.root, len(values)))
        if self._count:
            values.append(self._total)
        numbers = self._to_host(values) if values else []
        loss = numbers.pop() / self._count if self._count else None
        self._count = 0
        numbers = [_in_range(one, norm) for one, norm in zip(gradients, numbers, strict=True)]
        norm = _whole(numbers, shares) if numbers else None
        self._bad = [] if norm is None or math.isfinite(norm) else self._names_of_bad(numbers)
        return Reading(loss, norm)

    def _to_host(self, values: list[torch.Tensor]) -> list[float]:
        if self._scattered:
            values = [one.to(values[0].device) for one in values]
        numbers: list[float] = torch.stack(values).tolist()
        return numbers

    def _names_of_bad(self, numbers: list[float]) -> list[str]:
        names = (
            name
            for group in self._groups
            for name, one in zip(group.names, group.parameters, strict=True)
            if one.grad is not None
        )
        return [name for name, norm in zip(names, numbers, strict=True) if not math.isfinite(norm)]

    @property
    def bad(self) -> list[str]:
        """The parameters whose gradients were not finite on this rank in the step that was read last."""
        return self._bad


def bad_gradients(model: torch.nn.Module) -> list[str]:
    """Return the parameters whose gradients are not finite on this rank."""
    named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    with torch.no_grad():
        norms = [_norms([local_of(one)], _sums_in(one.dtype))[0] for one in named.values()]
        numbers = torch.stack(norms).tolist() if norms else []
        gradients = [local_of(one) for one in named.values()]
        numbers = [_in_range(one, norm) for one, norm in zip(gradients, numbers, strict=True)]
    return [name for name, norm in zip(named, numbers, strict=True) if not math.isfinite(norm)]


def _in_range(gradient: torch.Tensor, norm: float) -> float:
    """Return the norm of a gradient; where it is not finite, the squares may only have been too large."""
    if math.isfinite(norm) or gradient.is_complex():
        return norm
    with torch.no_grad():
        return float(_norms([gradient], torch.float64)[0])


def _norms(gradients: list[torch.Tensor], kind: torch.dtype | None) -> Sequence[torch.Tensor]:
    try:
        return _torch_compat.norms_of(gradients, kind)
    except RuntimeError:
        if not any(one.is_sparse for one in gradients):
            raise
        dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
        return _torch_compat.norms_of(dense, kind)


def _sums_in(kind: torch.dtype) -> torch.dtype | None:
    """Return the type in which short numbers are summed; None: their own type."""
    return torch.float32 if kind in _HALVES else None


def _parts(tensor: torch.Tensor) -> int:
    """Return into how many parts, each on another rank, a tensor is divided."""
    if not distributed(tensor):
        return 1
    mesh = tensor.device_mesh
    sizes = (mesh.size(at) for at, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return math.prod(sizes)


def _whole(numbers: list[float], shares: list[tuple[float, int]]) -> float:
    """Return a norm whose squares, of all ranks, add up to the square of the norm of all gradients."""
    if len(shares) == 1:
        return shares[0][0] * math.hypot(*numbers)
    begin, found = 0, 0.0
    for root, end in shares:
        found = math.hypot(found, root * math.hypot(*numbers[begin:end]))
        begin = end
    return found


def _form(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


class Rollback:
    """Rollbacks to older checkpoints.

    Args:
        checkpointer: of the session.
        context: from the launcher.
        timeout: seconds that ranks wait for each other.
    """

    def __init__(self, checkpointer: Checkpointer, context: WorkerContext, timeout: float) -> None:
        self._checkpointer = checkpointer
        self._context = context
        self._timeout = timeout
        self._tried: set[str] = set()

    def go(self, finding: Finding, first: bool, state: Mapping[str, object]) -> Restored:
        """Load the newest trusted checkpoint from before the bad steps, and at a repetition an older one.

        Newer ones of this generation are set aside, since their steps will be saved again.

        Args:
            finding: why.
            first: there was progress since the last rollback, or none before.
            state: the live objects.

        Raises:
            NonFinite: there is no such checkpoint; on every rank.
            NoUsableCheckpoint: copies exist, but none is trusted.
        """
        if first:
            self._tried.clear()
        here = self._checkpointer
        names = here.names() if here.alone else []
        listed = json.loads(here.exchange.gather("copies", json.dumps(names), self._timeout)[0])
        if not here.alone:
            self._refuse(finding, "a rollback within the job needs all copies on one node and no global_url")
        way = plan(listed, here.generation, finding.since, self._tried)
        if way is None:
            self._refuse(finding, f"there is no checkpoint from before step {finding.since}")
        here.put_away(way.put_away, f"rolled back: {finding.reason}")
        here.exchange.gather("put away", "", self._timeout)
        found = here.restore(state, (*self._context.avoid, *way.avoid))
        if found is None:
            self._refuse(finding, "there is no other checkpoint")
        self._tried.add(found.name)
        return found

    def _refuse(self, finding: Finding, why: str) -> NoReturn:
        error = NonFinite(finding.what, finding.value, finding.step)
        error.args = (f"{finding.reason}; {why}: the worker ends",)
        raise error
