"""Values of all ranks, as typed JSON in tensors: nothing that a peer sends is unpickled.

torch's collectives of objects unpickle what arrives, and the addresses of a process group stand in its open
store.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
import torch.distributed as dist

from outlast.checkpoint.content.typed_json import Decoder, Encoder
from outlast.errors import UsageError
from outlast.fields import Damage, DamagedCopy

_MOST = 1 << 26  # bytes of one rank's value


def from_all_ranks(own: Any, name: str, *, only_rank0: bool = False) -> list[Any] | None:
    """Return the values of all ranks, in their order; without a process group that of this one.

    Every rank calls it. The caller checks the type of each value.

    Args:
        own: of this rank: plain Python values, and containers of them.
        name: of the value, for errors.
        only_rank0: the values go to rank 0; the others get None.

    Raises:
        DamagedCopy: a rank sent something else.
        UsageError: a value here is no plain one.
    """
    if not _in_group():
        return [own]
    sent, sizes = _sent(own, name)
    here: list[torch.Tensor] | None = None
    if not only_rank0:
        here = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(here, sent)
    else:
        if dist.get_rank() == 0:
            here = [torch.empty_like(sent) for _ in sizes]
        dist.gather(sent, here, dst=0)
    if here is None:
        return None
    names = (f"{name} of rank {rank}" for rank in range(len(sizes)))
    return [_decoded(*one) for one in zip(here, sizes, names, strict=True)]


def from_rank0(own: Any, name: str) -> Any:
    """Return the value of rank 0, on every rank.

    Every rank calls it; the arguments are those of :func:`from_all_ranks`, as are the errors.
    """
    if not _in_group():
        return own
    sent, sizes = _sent(own if dist.get_rank() == 0 else None, name)
    dist.broadcast(sent, src=0)
    return _decoded(sent, sizes[0], f"{name} of rank 0")


def group_device() -> torch.device:
    """Return where tensors of the default process group have to be."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sent(own: Any, name: str) -> tuple[torch.Tensor, list[int]]:
    """Return a value as the bytes to send, as many on every rank, and how many of them each rank uses.

    Raises:
        DamagedCopy: another rank has no value, or one that is too large.
        UsageError: a value here is no plain one.
    """
    device = group_device()
    content, refused = b"", None
    try:
        content = json.dumps(Encoder().encode(own, (name,))).encode()
    except UsageError as error:  # the other ranks wait for an answer
        refused = error
    every = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([len(content)], device=device))
    if refused is not None:
        raise refused
    sizes = [int(one) for one in every]
    for rank, size in enumerate(sizes):
        if not 0 < size <= _MOST:
            raise DamagedCopy(Damage(f"{name} of rank {rank}", f"1 to {_MOST} bytes", str(size)))
    padded = bytearray(content.ljust(max(sizes)))
    return torch.frombuffer(padded, dtype=torch.uint8).to(device), sizes


def _decoded(sent: torch.Tensor, size: int, source: str) -> Any:
    here = sent.cpu()
    try:
        value = json.loads(ctypes.string_at(here.data_ptr(), size))
    except (ValueError, RecursionError) as error:
        raise DamagedCopy(Damage(source, "JSON", str(error))) from error
    return Decoder(source, {}).decode(value)
