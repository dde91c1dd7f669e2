"""The states of random generators as values that typed JSON and torch.load can hold; words become bytes.

They are those of python, numpy, torch on the CPU and on the current CUDA device.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any

import torch

from outlast.fields import Damage, DamagedCopy

_NUMPY_WORDS = 624  # of the state of MT19937
_WORD = "I"  # of 32 bits, the smallest first, as everywhere that torch runs


def capture_random() -> dict[str, Any]:
    """Return the states of the generators in use."""
    states = states_of(random, torch.default_generator, sys.modules.get("numpy.random"))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        every, here = torch.cuda.get_rng_state_all(), torch.cuda.current_device()
        every.insert(0, every.pop(here))
        states["cuda"] = [_octets(one) for one in every]  # that of the device in use is the first
    return states


def states_of(python: Any, of_torch: torch.Generator, of_numpy: Any = None) -> dict[str, Any]:
    """Return the states of some generators of the host.

    Args:
        python: a ``random.Random``, or the module, which has one.
        of_torch: torch's.
        of_numpy: a ``numpy.random.RandomState``, or the module, which has one; None: none.
    """
    version, words, gauss = python.getstate()
    states: dict[str, Any] = {
        "python": (version, array(_WORD, words).tobytes(), gauss),
        "torch": _octets(of_torch.get_state()),
    }
    if of_numpy is not None:
        found = of_numpy.get_state(legacy=False)
        inner = {name: one.tobytes() if name == "key" else one for name, one in found["state"].items()}
        states["numpy"] = {**found, "state": inner}
    return states


def restore_random(states: dict[str, Any]) -> str:
    """Set the generators to captured states; return what could not be set, empty when all was."""
    _set(states, random, torch.default_generator)
    if "cuda" in states:
        if not torch.cuda.is_available():
            return "the CUDA generator's state was not restored: torch sees no CUDA device here"
        here = torch.cuda.current_device()  # it may be another one than before
        others = [device for device in range(torch.cuda.device_count()) if device != here]
        for device, content in zip((here, *others), states["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(content), device)
    return ""


def require_random(states: Any, source: str) -> dict[str, Any]:
    """Check random states that were read from a file by setting new generators to them, and return them.

    Args:
        states: decoded.
        source: the file, for errors.

    Raises:
        DamagedCopy: they are not what :func:`capture_random` returns.
    """
    try:
        _set(states, random.Random(), torch.Generator(), own=True)
        if not all(type(one) is bytes for one in states.get("cuda", [])):
            raise TypeError("a state of CUDA that is no bytes")
    except Exception as error:  # whatever fails here fails because of the file's bytes
        found = f"{type(error).__name__}: {error}"
        raise DamagedCopy(Damage(source, "states of random generators", found[:200])) from error
    return dict(states)


def _set(states: dict[str, Any], python: Any, of_torch: torch.Generator, own: bool = False) -> None:
    """Set generators of the host to captured states.

    Args:
        states: the states.
        python: see :func:`states_of`.
        of_torch: torch's.
        own: the generator of numpy is a new one, too.

    Raises:
        ValueError: the position is outside of the words, which numpy does not check.
    """
    version, words, gauss = states["python"]
    python.setstate((version, tuple(array(_WORD, words)), gauss))
    of_torch.set_state(_tensor(states["torch"]))
    if "numpy" in states:
        import numpy.random

        found = states["numpy"]
        inner = dict(found["state"])
        if found["bit_generator"] == "MT19937":
            if len(inner["key"]) != 4 * _NUMPY_WORDS or not 0 <= inner["pos"] <= _NUMPY_WORDS:
                raise ValueError(f"position {inner['pos']} in {len(inner['key'])} bytes")
            inner["key"] = numpy.frombuffer(inner["key"], numpy.uint32)
        (numpy.random.RandomState() if own else numpy.random).set_state({**found, "state": inner})


def _octets(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
