"""Digests of live tensors for comparison between ranks: computed where the tensor is.

On the host it is xxh3. The bytes of a device would take a second for 16 GB to reach the host, so there it is
a sum: each word of 4 bytes times an odd number of its place, modulo 2^64. One changed word always changes it,
and the order in which a device adds does not. There is a sum for each 16 MiB, and they reach the host in one
transfer. It finds accidents; against an attacker it is worth nothing, as xxh3.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from xxhash import xxh3_64_intdigest

from outlast.checkpoint.content.codecs import local_of
from outlast.checkpoint.content.transfers import SMALL, copy_tensors, is_plain, octets_of

_CHUNK = 16 << 20  # bytes; products of its words take six times as much memory
_PIECE = 64 << 20  # bytes of host memory that one thread digests
_WORD = 4
_SEED = 17
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # a subclass may keep its bytes elsewhere


def digests_of(tensors: Sequence[torch.Tensor], spread: Callable[..., Iterable[int]] = map) -> list[int]:
    """Return 64 bits for each tensor's elements in order; of a distributed one for the part here.

    Tensors of other kinds of devices have other digests of the same bytes.

    Args:
        tensors: of any devices.
        spread: like ``map``; may call in several threads.
    """
    own = [local_of(one) for one in tensors]
    found = [0] * len(own)
    large: list[int] = []
    small: list[int] = []
    for at, one in enumerate(own):
        if not one.is_cpu:
            (small if one.numel() * one.element_size() < SMALL else large).append(at)
    small.sort(key=lambda at: (str(own[at].device), str(own[at].dtype)))  # so that many go in one copy
    sums = [_sums(own[at]) for at in large]  # a device works while the host digests its own
    pieces = [(at, piece) for at, one in enumerate(own) if one.is_cpu for piece in _pieces(one)]
    numbers = spread(_digest, [piece for _, piece in pieces])
    of_pieces = {at: list[int]() for at, _ in pieces}
    for (at, _), number in zip(pieces, numbers, strict=True):
        of_pieces[at].append(number)
    for at, each in of_pieces.items():
        found[at] = each[0] if len(each) == 1 else xxh3_64_intdigest(struct.pack(f"<{len(each)}Q", *each))
    for at, octets in zip(small, _fetched([own[at] for at in small]), strict=True):
        found[at] = _digest(octets)
    for at, each in zip(large, _on_host(sums), strict=True):
        found[at] = _of_sums(own[at].numel() * own[at].element_size(), each)
    return found


def digest_of_copy(octets: torch.Tensor, tensor: torch.Tensor) -> int:
    """Return what :func:`digests_of` returns of a plain tensor, from bytes in host memory.

    Args:
        octets: the bytes.
        tensor: it tells the device alone.
    """
    if tensor.is_cpu:
        return digests_of([octets])[0]
    return _digest(octets) if octets.numel() < SMALL else _of_sums(octets.numel(), _sums(octets).tolist())


def _of_sums(nbytes: int, sums: Sequence[int]) -> int:
    return xxh3_64_intdigest(struct.pack(f"<{len(sums) + 1}q", nbytes, *sums))


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor in host memory in pieces for several threads."""
    if tensor.numel() * tensor.element_size() <= _PIECE:
        return (tensor,)
    return torch.split(octets_of(tensor), _PIECE)


def _digest(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor in host memory; where its bytes lie in order, nothing is made of it."""
    if type(tensor) not in _PLAIN or not is_plain(tensor):
        tensor = octets_of(tensor)
    found: int = xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found


Mark = int | torch.Tensor | None  # sums stay on the device until they are compared


def marks_of(tensors: Mapping[str, torch.Tensor], spread: Callable[..., Iterable[int]]) -> dict[str, Mark]:
    """Return what tells later whether bytes in host memory are those that the tensors have now, by key.

    A device computes its part behind what it was given to do; nothing waits for it.

    Args:
        tensors: by key.
        spread: like ``map``; may call in several threads.
    """
    here = [key for key, one in tensors.items() if one.is_cpu and one.numel()]
    found: dict[str, Mark] = dict(zip(here, spread(_digest, [tensors[key] for key in here]), strict=True))
    for key, one in tensors.items():
        if key not in found:
            found[key] = _sums(one) if one.numel() else None
    return found


def is_marked(octets: torch.Tensor, mark: Mark) -> bool:
    """Return whether bytes in host memory are those of the tensor that a mark was made of."""
    if isinstance(mark, torch.Tensor):
        return torch.equal(_sums(octets), mark.cpu())
    return mark is None or _digest(octets) == mark


def _fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of small tensors of devices, which travel together."""
    if not tensors:
        return []
    sizes = [one.numel() * one.element_size() for one in tensors]
    begins = [0, *itertools.accumulate(sizes)]
    image = torch.empty(begins.pop(), dtype=torch.uint8, device="cpu")
    copy_tensors(zip(tensors, begins, strict=True), image, 1)
    return [image[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's chunks, on its device; nothing waits for them."""
    octets = octets_of(tensor)
    chunks = []
    for begin in range(0, octets.numel(), _CHUNK):
        chunk = octets.narrow(0, begin, min(_CHUNK, octets.numel() - begin))
        if chunk.numel() % _WORD or chunk.storage_offset() % _WORD:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % _WORD))
        words = chunk.view(torch.int32)
        chunks.append((words * _odd_numbers(words.device).narrow(0, 0, words.numel())).sum())
    return torch.stack(chunks)


@functools.cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    """Return the odd number of each place of a chunk; equal in all processes."""
    generator = torch.Generator().manual_seed(_SEED)
    some = torch.randint(-(2**63), 2**63 - 1, (_CHUNK // _WORD,), generator=generator, device="cpu")
    return (some | 1).to(device)


def _on_host(sums: list[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of some rows, in one transfer for each device."""
    found: list[list[int]] = [[] for _ in sums]
    for device in {one.device for one in sums}:
        here = [at for at, one in enumerate(sums) if one.device == device]
        numbers = iter(torch.cat([sums[at] for at in here]).tolist())
        for at in here:
            found[at] = [next(numbers) for _ in range(sums[at].numel())]
    return found
