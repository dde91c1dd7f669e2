"""Parameter groups that an optimizer gets while it trains, as by unfreezing a part of the model.

A script makes its optimizer as at the beginning, and the checkpoint was saved after ``add_param_group``. Or
it was saved before, and training goes back to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from outlast.checkpoint.content.restore import is_optimizers
from outlast.checkpoint.content.typed_json import form_of

_Parameters = Sequence[Sequence[Any]]  # name and form of each that an optimizer steps
_BY_PLACE = ("params", "param_names")  # of a group; all else are values


class AddedGroups:
    """The groups of the optimizers of a state, before and during its loads."""

    def __init__(self) -> None:
        self._made_with: dict[str, int] = {}  # groups of each optimizer before the first load
        self._before: dict[str, tuple[torch.optim.Optimizer, list[Any]]] = {}  # the load under way
        self._parts: list[torch.Tensor] | None = None  # what was registered at the first load
        self._frozen: set[int] = set()  # parameters that had no gradient before the first load
        self._flags: list[tuple[torch.Tensor, bool]] = []  # requires_grad before the load under way

    def begin(self, state: Mapping[str, object]) -> None:
        """Note with how many groups optimizers come; those of an earlier call stay as they were."""
        for name, one in state.items():
            if isinstance(one, torch.optim.Optimizer):
                self._made_with.setdefault(name, len(one.param_groups))
        if self._parts is None:
            self._parts = [one for each in state.values() for one in _parameters(each)]
            self._frozen = {id(one) for one in self._parts if not one.requires_grad}

    def fit(
        self, state: Mapping[str, object], saved: Mapping[str, Any], parameters: Mapping[str, _Parameters]
    ) -> None:
        """Add the groups that only a checkpoint has, or drop those that were added since it was saved.

        What does not fit all the same stays as it is.

        Args:
            state: the live objects.
            saved: what they gave when they were saved.
            parameters: what each optimizer stepped then, in its order.
        """
        live = {
            f"{name}.{key}": one
            for name, module in state.items()
            if isinstance(module, torch.nn.Module)
            for key, one in module.named_parameters()
        }
        for name, one in state.items():
            if isinstance(one, torch.optim.Optimizer) and is_optimizers(saved.get(name)):
                self._before.setdefault(name, (one, list(one.param_groups)))
                then = saved[name]["param_groups"]
                if len(then) < len(one.param_groups):
                    self._drop(name, one, then)
                else:
                    count = len(one.param_groups)
                    _add(one, then, parameters.get(name, ()), live)
                    self._thaw(one.param_groups[count:], then[count:], saved[name]["state"])

    def _drop(self, name: str, optimizer: torch.optim.Optimizer, then: Sequence[dict[str, Any]]) -> None:
        count = len(then)
        if count >= self._made_with.get(name, len(optimizer.param_groups)) and _begins_with(
            optimizer.param_groups, then
        ):
            for one in (one for group in optimizer.param_groups[count:] for one in group["params"]):
                self._flags.append((one, one.requires_grad))
                one.grad = None
                one.requires_grad_(id(one) not in self._frozen)
            del optimizer.param_groups[count:]

    def _thaw(
        self, added: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]], states: Mapping[Any, Any]
    ) -> None:
        """Let what was trained have gradients again; a group may have been added before it was unfrozen."""
        for group, known in zip(added, then, strict=False):
            for one, number in zip(group["params"], known["params"], strict=True):
                if not one.requires_grad and (number in states or not states):
                    self._flags.append((one, False))
                    one.requires_grad_(True)

    def undo(self) -> None:
        """Have the groups as they were before: another copy is tried, or none."""
        for optimizer, groups in self._before.values():
            optimizer.param_groups[:] = groups
        for one, flag in self._flags:
            one.requires_grad_(flag)
        self.keep()

    def keep(self) -> None:
        """Keep the groups: the state was loaded."""
        self._before, self._flags = {}, []


def _parameters(holder: object) -> Iterator[torch.Tensor]:
    if isinstance(holder, torch.nn.Module):
        yield from holder.parameters()


def _begins_with(groups: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> bool:
    """Say whether groups begin with others, by the numbers of their parameters."""
    return all(len(one["params"]) == len(other["params"]) for one, other in zip(groups, first, strict=False))


def _add(
    optimizer: torch.optim.Optimizer,
    then: Sequence[dict[str, Any]],
    parameters: _Parameters,
    live: Mapping[str, torch.nn.Parameter],
) -> None:
    """Add the groups that only the checkpoint has, where all parameters are known and free."""
    groups = optimizer.param_groups
    ends = [0, *accumulate(len(group["params"]) for group in then)]
    if not _begins_with(then, groups) or len(parameters) != ends[-1]:
        return
    held = {id(one) for group in groups for one in group["params"]}
    added = []
    for group, (begin, end) in list(zip(then, pairwise(ends), strict=True))[len(groups) :]:
        found = [live.get(known[0]) for known in parameters[begin:end]]
        forms = [known[1] for known in parameters[begin:end]]
        if any(
            one is None or id(one) in held or form_of(one) != form
            for one, form in zip(found, forms, strict=True)
        ):
            return
        names = group.get("param_names")
        values = {key: value for key, value in group.items() if key not in _BY_PLACE and _is_plain(value)}
        added.append({**values, "params": found if names is None else list(zip(names, found, strict=True))})
    for group in added:
        optimizer.add_param_group(group)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, type(None)))
