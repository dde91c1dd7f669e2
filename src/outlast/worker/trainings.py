"""The trainings of one process, one after the other: each has checkpoints of its own, or goes on.

A script with several trainings (folds, stages, a sweep) has a session or a Trainer for each. One that finds
the last checkpoint of the training before would load it and have nothing left to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from outlast.errors import UsageError
from outlast.inprocess.worker.cleanup import when_left

_earlier: dict[Path, Training] = {}  # the latest of this process, by the folder of its checkpoints


_SESSIONS = (
    'nothing was loaded; give each training of the script a name, outlast.start(name="..."),'
    ' resume(name="...") or the training_name of an OutlastTrainer: it then has checkpoints of its own, and a'
    " restart skips the trainings that are complete"
)


class Training:
    """One training of this process.

    Args:
        folder: of its checkpoints.
        who: for errors.
        cure: what to do about another training with the same folder.
    """

    def __init__(self, folder: Path, who: str = "session.restore", cure: str = _SESSIONS) -> None:
        self.folder = folder
        self._who = who
        self._cure = cure
        self._parts: dict[int, weakref.ref[object]] = {}
        self.completed = 0  # steps

    def begin(self, state: Mapping[str, object], *, loads: bool = True) -> None:
        """Take the place of the training before in the same folder, if it goes on with its objects.

        Args:
            state: what is registered.
            loads: it begins with a checkpoint of that folder.

        Raises:
            UsageError: the one before has trained other objects, so its checkpoints are not this one's.
        """
        before = _earlier.get(self.folder)
        parts = {id(one): one for one in _parts_of(state)}
        if loads and before is not None and before.completed and not before.has(parts):
            raise UsageError(
                f"{self._who}: an earlier training of this process has completed {before.completed} steps"
                f" with other objects, and its checkpoints in {self.folder} would be loaded into these;"
                f" {self._cure}"
            )
        self._parts = {at: weakref.ref(one) for at, one in parts.items()}
        _earlier[self.folder] = self
        when_left(_earlier.clear)  # the function begins again, with new objects

    def left(self) -> None:
        """Let the next training go on from this one, which an exception has ended."""
        if _earlier.get(self.folder) is self:
            del _earlier[self.folder]

    def has(self, parts: Mapping[int, object]) -> bool:
        """Say whether all of these objects, and one at least, are of this training."""
        known = (self._parts.get(at) for at in parts)
        return bool(parts) and all(
            one is not None and one() is part for one, part in zip(known, parts.values(), strict=True)
        )


def _parts_of(state: object) -> Iterator[object]:
    """Yield what is trained: parameters, optimizers and tensors; the rest may be another in each session."""
    todo, seen = [state], set[int]()
    while todo:
        one = todo.pop()
        if isinstance(one, torch.nn.Module):
            yield from one.parameters()
        elif isinstance(one, (torch.optim.Optimizer, torch.Tensor)):
            yield one
        elif isinstance(one, (Mapping, list, tuple)) and id(one) not in seen:
            seen.add(id(one))  # what contains itself is refused by its name when it is restored
            todo += one.values() if isinstance(one, Mapping) else one
