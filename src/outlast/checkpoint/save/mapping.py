"""The memory of a buffer, registered with the driver so that a device copies into it at its full speed.

Copies into ordinary pages of tmpfs run at 14 to 16 GB/s on an H200, into registered ones at 52 to 55
(DeepSpeed, pull request 8283). Registration takes 0.1 to 0.3 s a GB, once a mapping. CUDA and HIP.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable

import torch

from outlast.checkpoint.content.memory import address_of
from outlast.checkpoint.content.transfers import WINDOW

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
_REGISTERED_WITHIN = 60.0  # seconds: a driver that does not answer holds no save back


class Mapping(mmap.mmap):
    """A file in memory. Its registration is released before it is unmapped."""

    valid = 0  # bytes that the file still has
    registered: tuple[int, ...] = ()  # addresses of its parts
    tried = False  # to register it

    def register(self, device: int | None, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Register it once; where the driver refuses, copies into it are slower and nothing else.

        On a thread of its own: an error of the driver stays with the thread until some other call reports it.

        Args:
            device: of this rank; None: it uses none yet, and nothing is done.
            goes_on: called before each window; False ends the registration.
        """
        if device is None or self.tried or not len(self):
            return
        self.tried = True
        thread = threading.Thread(
            target=self._register, args=(device, goes_on), name="registering", daemon=True
        )
        thread.start()
        thread.join(_REGISTERED_WITHIN)

    def _register(self, device: int, goes_on: Callable[[], bool]) -> None:
        done: list[int] = []
        with contextlib.suppress(RuntimeError, AttributeError), torch.cuda.device(device):
            library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            begin = address_of(self)
            for low in range(0, len(self), WINDOW):
                if not goes_on() or int(
                    library.cudaHostRegister(begin + low, min(WINDOW, len(self) - low), _PORTABLE)
                ):
                    break
                done.append(begin + low)
        self.registered = tuple(done)

    def unregister(self) -> None:
        """Release what is registered, before the file is no longer mapped."""
        parts, self.registered = self.registered, ()
        with contextlib.suppress(RuntimeError, AttributeError):  # the driver has gone
            for part in parts:
                torch.cuda.cudart().cudaHostUnregister(part)  # type: ignore[no-untyped-call]

    def shorten(self, nbytes: int) -> None:
        """Release what is registered and reaches beyond a size to which the file is about to be cut."""
        end, before = address_of(self) + nbytes, self.registered
        kept = tuple(part for part in before if part + WINDOW <= end)
        self.valid, self.registered = nbytes, before[len(kept) :]
        self.unregister()
        self.registered = kept

    def __del__(self) -> None:
        """Release what is registered."""
        self.unregister()


def current_device() -> int | None:
    """Return the device of the calling thread; None where this process has used none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
