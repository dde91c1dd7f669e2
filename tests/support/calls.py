"""Counting the calls of torch's operators, also on a device that is not there."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts calls, by the name of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def until_a_number_is_read() -> Iterator[None]:
    """Expect that a number of a tensor without content is read; torch 2.4 fails in a later place."""
    with pytest.raises((RuntimeError, AttributeError), match=r"_local_scalar_dense|create_unbacked_symint"):
        yield
