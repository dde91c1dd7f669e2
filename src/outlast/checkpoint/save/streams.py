"""Copies from a device beside training: after what was enqueued before the save, and on streams of their own.

On the default stream a copy in the background would wait for all kernels of training, and training on
another stream would not wait for it. CUDA and HIP; tensors on the host need nothing of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class DeviceMoment:
    """What the devices of some tensors had been given to do at one time, on this thread's streams.

    Args:
        tensors: of any devices; those on the host do not count.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {one.device for one in tensors if one.device.type == "cuda"}
        self._events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Run copies after that moment, on streams of their own; when the block ends, they are done."""
        streams = [(torch.cuda.Stream(one), event) for one, event in self._events.items()]  # type: ignore[no-untyped-call]
        with contextlib.ExitStack() as stack:
            for stream, event in streams:
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream, _ in streams:
                stream.synchronize()
