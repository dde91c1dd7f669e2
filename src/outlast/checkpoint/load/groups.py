"""Parameter groups that an optimizer gets while it trains, as by unfreezing a part of the model.

A script makes its optimizer as at the beginning, and the checkpoint was saved after ``add_param_group``. Or
it was saved before, and training goes back to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from outlast.checkpoint.content.rank_file import Parameter
from outlast.checkpoint.content.restore import is_optimizers
from outlast.checkpoint.content.typed_json import form_of

_Parameters = Sequence[Parameter]  # that an optimizer steps
_PLAIN = (bool, int, float, str, tuple, type(None))
_BY_PLACE = ("params", "param_names")  # of a group; all else are values


class AddedGroups:
    """The groups of the optimizers of a state, before and during its loads."""

    def __init__(self) -> None:
        self._made_with: dict[str, int] = {}  # groups of each optimizer before the first load
        self._frozen: dict[int, torch.Tensor] | None = None  # had requires_grad off before the first load
        self._before: list[tuple[torch.optim.Optimizer, list[Any]]] = []  # the load under way: groups
        self._flags: list[tuple[torch.Tensor, bool]] = []  # and requires_grad

    def begin(self, state: Mapping[str, object]) -> None:
        """Note the groups with which optimizers come; those of an earlier call stay as they were."""
        modules = (one for one in state.values() if isinstance(one, torch.nn.Module))
        registered = [one for module in modules for one in module.parameters()]
        if self._frozen is None:
            self._frozen = {id(one): one for one in registered if not one.requires_grad}
        for name, one in state.items():
            if isinstance(one, torch.optim.Optimizer):
                self._made_with.setdefault(name, len(one.param_groups))
                self._before.append((one, list(one.param_groups)))
        stepped = (one for _, groups in self._before for group in groups for one in group["params"])
        self._flags = [(one, one.requires_grad) for one in (*registered, *stepped)]

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
                then, count = saved[name]["param_groups"], len(one.param_groups)
                if self._made_with[name] <= len(then) < count and _begins_with(one.param_groups, then):
                    self._drop(one, len(then))
                elif len(then) > count:
                    _add(one, then, parameters.get(name, ()), live)
                    _thaw(one.param_groups[count:], then[count:], saved[name]["state"])

    def _drop(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """Keep the first groups of an optimizer; parameters of the others are as before the first load."""
        for one in (one for group in optimizer.param_groups[count:] for one in group["params"]):
            one.grad = None
            one.requires_grad_(id(one) not in (self._frozen or {}))
        del optimizer.param_groups[count:]

    def undo(self) -> None:
        """Have the groups as they were before: another copy is tried, or none."""
        for optimizer, groups in self._before:
            if len(optimizer.param_groups) != len(groups):
                optimizer.param_groups[:] = groups
        for one, flag in self._flags:
            if one.requires_grad != flag:
                one.requires_grad_(flag)

    def keep(self) -> None:
        """Keep the groups as they are: the load has ended."""
        self._before, self._flags = [], []


def _begins_with(groups: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> bool:
    """Return whether groups begin with others, by the numbers of their parameters."""
    return all(len(one["params"]) == len(other["params"]) for one, other in zip(groups, first, strict=False))


def _add(
    optimizer: torch.optim.Optimizer,
    then: Sequence[dict[str, Any]],
    parameters: _Parameters,
    live: Mapping[str, torch.nn.Parameter],
) -> None:
    """Add the groups that only the checkpoint has, where all parameters are known and free."""
    groups, rows = optimizer.param_groups, iter(parameters)
    count = sum(len(group["params"]) for group in then)
    if not _begins_with(then, groups) or len(parameters) != count:
        return
    held = {id(one) for group in groups for one in group["params"]}
    added = []
    for number, group in enumerate(then):
        known = list(islice(rows, len(group["params"])))
        if number < len(groups):
            continue
        found = [live.get(row[0]) for row in known]
        pairs = zip(found, known, strict=True)
        if any(one is None or id(one) in held or form_of(one) != row[1] for one, row in pairs):
            return
        names = group.get("param_names")
        values = {key: one for key, one in group.items() if key not in _BY_PLACE and isinstance(one, _PLAIN)}
        added.append({**values, "params": found if names is None else list(zip(names, found, strict=True))})
    for group in added:
        optimizer.add_param_group(group)


def _thaw(added: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]], states: Mapping[Any, Any]) -> None:
    """Set requires_grad of what was trained again; a group may have been added before it was unfrozen."""
    for group, known in zip(added, then, strict=False):
        for one, number in zip(group["params"], known["params"], strict=True):
            if not one.requires_grad and (number in states or not states):
                one.requires_grad_(True)
