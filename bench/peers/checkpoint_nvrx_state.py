"""NVRx's tensor state for a host without a GPU, where its own class refuses; the tensors are copies."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class OnHost(BasicTensorAwareStateDict):
    """A state whose tensors are in host memory and stay there."""

    def __init__(self, state_dict: dict[str, Any]) -> None:  # not the base's, which asserts is_cuda
        self.state_dict = state_dict
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """They are there."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They are there."""
