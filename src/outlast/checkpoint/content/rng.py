"""The random states of a process: python, numpy, torch on the CPU and on the current CUDA device."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any

import torch

_WORD = "I"  # of 32 bits, the smallest first, as everywhere that torch runs


def capture_random() -> dict[str, Any]:
    """Return the states of the generators in use, as values that typed JSON knows."""
    version, words, gauss = random.getstate()
    python = (version, array(_WORD, words).tobytes(), gauss)
    states: dict[str, Any] = {"python": python, "torch": _octets(torch.get_rng_state())}
    if "numpy.random" in sys.modules:
        import numpy.random

        states["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = _octets(torch.cuda.get_rng_state())
    return states


def restore_random(states: dict[str, Any]) -> str:
    """Set the generators to captured states; return what could not be set, empty when all was."""
    version, words, gauss = states["python"]
    if type(words) is bytes:  # first written as a tuple of numbers
        words = tuple(array(_WORD, words))
    random.setstate((version, words, gauss))
    torch.set_rng_state(_tensor(states["torch"]))
    if "numpy" in states:
        import numpy.random

        numpy.random.set_state(states["numpy"])
    if "cuda" in states:
        if not torch.cuda.is_available():
            return "the CUDA generator's state was not restored: torch sees no CUDA device here"
        torch.cuda.set_rng_state(_tensor(states["cuda"]))
    return ""


def _octets(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
