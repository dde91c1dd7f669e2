"""Warns, once, of what a session's checkpoints do not hold and a resumed run may miss.

Parameters that only an optimizer knows; ``requires_grad`` and modes of submodules that are not as in the
checkpoint; non-persistent buffers that training changes. Such buffers are common and mostly made anew from
nothing by each model, so one is named only when its content changes from step to step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from outlast import _torch_compat
from outlast.checkpoint.content.codecs import local_of
from outlast.checkpoint.content.flags import Flags, flags_of, flags_that_stay
from outlast.checkpoint.content.state import tensors_in
from outlast.checkpoint.policy.manifest import some

_LOG = logging.getLogger("outlast")
_WITHOUT_PARAMETERS = (
    "outlast.",
    "torch.optim.",
    "torch.amp.",
    "torch.cuda.amp.",
    "torch.utils.data",
    "torchdata.",
)
_STEPS = 3  # after which it is known
_MOST_BYTES = 16 << 20  # of buffers that are compared; larger ones are passed over


class Unsaved:
    """Looks at what is registered, at the load and after each of the first steps.

    Args:
        state: what is registered.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._saved: Mapping[str, tuple[str, str]] = {}
        self._seen: list[Flags] = []
        self._steps = 0
        self._marks: dict[str, tuple[int, int, int]] = {}
        self._contents: dict[str, torch.Tensor] = {}

    def restored(self, saved: Mapping[str, tuple[str, str]]) -> None:
        """Begin, with the flags of the checkpoint that was loaded; without one there are none."""
        self._saved = saved
        for line in _without_owner(self._state):
            _LOG.warning("%s", line)
        self._look()

    def step_ended(self) -> None:
        """Look after one of the first steps; after the last of them, warn of what was found."""
        if self._steps >= _STEPS:
            return
        self._steps += 1
        self._look()
        buffers = dict(_fleeting(self._state))
        marks = {key: (id(one), one.data_ptr(), one._version) for key, one in buffers.items()}
        if self._steps == _STEPS - 1:
            self._keep({key: one for key, one in buffers.items() if self._marks.get(key) != marks[key]})
        if self._steps == _STEPS:
            self._warn(buffers)
        self._marks = marks

    def _look(self) -> None:
        if self._saved:
            self._seen.append(flags_of(self._state))

    def _keep(self, changed: Mapping[str, torch.Tensor]) -> None:
        left = _MOST_BYTES
        for key, one in changed.items():
            left -= one.numel() * one.element_size()
            if key in self._marks and left >= 0:
                self._contents[key] = one.detach().clone()

    def _warn(self, buffers: Mapping[str, torch.Tensor]) -> None:
        found = []
        lines = flags_that_stay(self._saved, self._seen, self._state)
        if lines:
            found.append(f"{'; '.join(lines)}: set it after session.restore, by the step that it returns")
        changing = [key for key, then in self._contents.items() if not _equal(then, buffers.get(key))]
        if changing:
            found.append(
                f"{some(changing)}: non-persistent, and changed by each step; a resumed run begins with those"
                " of a new model: register them with persistent=True, or give them to session.restore"
            )
        self._contents, self._seen = {}, []
        if found:
            _LOG.warning("not part of a checkpoint: %s", "; ".join(found))


def _equal(then: torch.Tensor, now: torch.Tensor | None) -> bool:
    """Say whether a buffer is as before; one of another form holds something else, not something newer."""
    if now is None or (then.shape, then.dtype, then.device) != (now.shape, now.dtype, now.device):
        return True
    return torch.equal(then, now)


def _fleeting(state: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in state.items():
        if isinstance(one, torch.nn.Module):
            for key, buffer in _torch_compat.fleeting_buffers(one):
                local = local_of(buffer)
                if type(local) is torch.Tensor and not (local.is_meta or local.is_inference()):
                    yield f"{name}.{key}", local


def _without_owner(state: Mapping[str, object]) -> Iterator[str]:
    """Yield a line for each optimizer with parameters that are in nothing else that is registered."""
    held: set[int] = set()
    optimizers = {}
    for name, one in state.items():
        if isinstance(one, torch.optim.Optimizer):
            optimizers[name] = one
        elif isinstance(one, torch.nn.Module):
            held.update(map(id, one.parameters()))
        elif isinstance(one, (torch.Tensor, dict, list)):
            held.update(id(tensor) for _, tensor in tensors_in(one))
        elif not type(one).__module__.startswith(_WITHOUT_PARAMETERS):
            return  # it may hold any of them; asking it for its state may change it
    for name, one in optimizers.items():
        steps = [each for group in one.param_groups for each in group["params"]]
        lost = [each for each in steps if id(each) not in held]
        if lost:
            yield (
                f"{name}: {len(lost)} of its {len(steps)} parameters are in nothing that is registered, so"
                " checkpoints do not hold them: give session.restore the module or the tensors, too"
            )
