"""Iterators of torch's DataLoaders in a resumed run: making one again draws nothing from the generators.

A DataLoader draws seeds from torch's global generator whenever an iterator is made. Within an epoch a
resumed run makes one more than the run without the fault, so what its first step draws would differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from outlast import _torch_compat
from outlast.checkpoint.content.random_states import capture_random, restore_random


class Loaders:
    """Keeps the random states of a checkpoint until the first step begins.

    Args:
        state: the registered objects, which were loaded.
    """

    def __init__(self, state: Iterable[object]) -> None:
        self._random: dict[str, Any] = capture_random()
        stateful = [one for one in state if isinstance(one, DataLoader) and hasattr(one, "state_dict")]
        for one in stateful:
            one.state_dict()  # torchdata's makes the iterator that goes on
        if stateful:
            restore_random(self._random)

    def begin(self) -> None:
        """Put the random states back if the script has made iterators and taken batches from them.

        An iterator that has given no batch begins an epoch: its seed was drawn after this step without the
        fault, too, so the draw counts.
        """
        if capture_random() == self._random:
            return
        taken = _torch_compat.batches_taken()
        if taken and 0 not in taken:
            restore_random(self._random)
