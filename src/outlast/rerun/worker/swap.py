"""Data that ranks exchange when a step was rejected, and the comparison of their results."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_64

from outlast.checkpoint.content.codecs import distributed
from outlast.checkpoint.content.tensor_digest import digests_of
from outlast.numerics.policy.numerics import Finding
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Observation
from outlast.ports import Exchange, ExchangeFailed
from outlast.rerun.policy.stats import relative_difference

_PLAIN = (bool, int, float, str, type(None))


def digest(tensors: Iterable[torch.Tensor | None], seed: str = "") -> str:
    """Return the xxh3 of the digests of tensors, in their order."""
    found, listed = xxh3_64(seed.encode()), list(tensors)
    numbers = iter(digests_of([one for one in listed if one is not None]))
    for one in listed:
        found.update(b"-" if one is None else next(numbers).to_bytes(8, "little"))
    text: str = found.hexdigest()
    return text


def _octets(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if distributed(tensor) else tensor
    flat = local.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


class Parcel:
    """A value as a description in JSON and bytes, to be sent to another rank.

    Args:
        value: tensors, bytes and plain values in dicts, lists and tuples.

    Raises:
        TypeError: it contains another type.
    """

    def __init__(self, value: Any) -> None:
        self._content: list[bytes] = []
        self.form = json.dumps(self._describe(value))

    @property
    def content(self) -> bytes:
        """The bytes of all tensors."""
        return b"".join(self._content)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            octets = _octets(value)
            self._content.append(octets)
            kind = str(value.dtype).removeprefix("torch.")
            return ["tensor", kind, list(value.shape), value.is_cuda, len(octets)]
        if type(value) is bytes:
            self._content.append(value)
            return ["bytes", len(value)]
        if type(value) is dict:
            return ["dict", [[self._describe(one), self._describe(other)] for one, other in value.items()]]
        if type(value) in (list, tuple):
            return [type(value).__name__, [self._describe(one) for one in value]]
        if type(value) in _PLAIN:
            return ["plain", value]
        raise TypeError(f"{type(value).__name__} cannot be sent to another rank")


def size_of(form: Any) -> int:
    """Return the number of bytes of content that a description stands for."""
    kind, *rest = form
    if kind in ("tensor", "bytes"):
        return int(rest[-1])
    if kind == "dict":
        return sum(size_of(one) + size_of(other) for one, other in rest[0])
    return sum(map(size_of, rest[0])) if kind in ("list", "tuple") else 0


def unpack(form: Any, content: bytes) -> Any:
    """Return the value of a parcel; CUDA tensors are put on the current device."""
    at = 0

    def build(one: Any) -> Any:
        nonlocal at
        kind, *rest = one
        if kind in ("tensor", "bytes"):
            octets = content[at : at + rest[-1]]
            at += rest[-1]
            return octets if kind == "bytes" else _tensor(octets, rest)
        if kind == "dict":
            return {build(name): build(value) for name, value in rest[0]}
        if kind == "plain":
            return rest[0]
        return [build(value) for value in rest[0]] if kind == "list" else tuple(map(build, rest[0]))

    return build(form)


def _tensor(octets: bytes, description: Sequence[Any]) -> torch.Tensor:
    kind, shape, on_device, _ = description
    dtype = getattr(torch, kind)
    flat = torch.frombuffer(bytearray(octets), dtype=dtype) if octets else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).cuda() if on_device else flat.reshape(shape)


def trade(value: Any, pairs: Sequence[tuple[int, int]], exchange: Exchange, timeout: float) -> Any:
    """Return the value of the other rank of a pair, on each of the two; None on ranks of no pair.

    All ranks of the default group call it. Bytes go through a temporary gloo group, which a job
    without incidents does not have.

    Args:
        value: of this rank.
        pairs: of ranks, no rank twice.
        exchange: between all ranks.
        timeout: seconds to wait for each other.

    Raises:
        ExchangeFailed: a rank did not answer.
        TypeError: the value cannot be sent.
    """
    partners = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    partner = partners.get(exchange.rank)
    parcel = Parcel(value) if partner is not None else None
    forms = exchange.gather("swap", "" if parcel is None else parcel.form, timeout)
    group = dist.new_group(backend="gloo")
    try:
        exchange.gather("swap group", "", timeout)  # a rank that leaves too early breaks the group
        if parcel is None or partner is None:
            return None
        form = json.loads(forms[partner])
        return unpack(form, _send_and_receive(parcel.content, size_of(form), partner, group, timeout))
    finally:
        dist.destroy_process_group(group)


def _send_and_receive(
    content: bytes, size: int, partner: int, group: dist.ProcessGroup, timeout: float
) -> bytes:
    given = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)
    taken = torch.empty(size or 1, dtype=torch.uint8)
    works = [dist.isend(given, partner, group), dist.irecv(taken, partner, group)]
    try:
        for work in works:
            if work is not None:
                work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        raise ExchangeFailed(f"swap of data with rank {partner}: lost ({error})") from error
    return _octets(taken)[:size]


def apart(one: float | None, other: float | None) -> float:
    """Return the relative difference of two losses; 0 if there are none."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return relative_difference(one, other)


def digests(seen: Observation, told: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return by rank what it computed from its own data: the loss, and of a single rank the gradients."""
    return tuple(
        f"{'-' if loss is None else loss.hex()} {one.get('digest', '')}"
        for loss, one in zip(seen.losses, told, strict=True)
    )


def owners(seen: Observation, finding: Finding) -> tuple[int, ...]:
    """Return the ranks whose own numbers are bad; none if reduced gradients are bad on all."""
    world = len(seen.losses)
    if world == 1 or finding.check in (Check.NAN_IN_LOSS, Check.RANK_OUTLIER):
        return finding.ranks
    bad = tuple(
        rank for rank, loss in enumerate(seen.losses) if loss is not None and not abs(loss) < float("inf")
    )
    return bad or (finding.ranks if len(finding.ranks) < world else ())


def finding_of(incident: Mapping[str, Any]) -> Finding:
    """Return the finding of a recorded incident."""
    step = int(incident["step"])
    what = str(incident.get("check", "a result"))
    value = float(incident.get("value") or "nan")
    return Finding(Check.NAN_IN_LOSS, Action.RAISE, step, (), what, value, f"{what} in step {step}", step)
