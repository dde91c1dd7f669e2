"""Tensors come to a device through windows; here the device is the host."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from outlast.checkpoint.content import transfers
from outlast.checkpoint.content.transfers import Move, copy_to_devices, octets_of

KINDS = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool, torch.float8_e4m3fn)


def source_of(dice: random.Random, most: int) -> torch.Tensor:
    """Return random bytes as a tensor, in some order of memory."""
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    kind = dice.choice(KINDS)
    shape = [dice.randrange(0 if dice.random() < 0.1 else 1, most) for _ in range(dice.randrange(3))]
    octets = torch.randint(
        0, 2, (torch.Size(shape).numel() * kind.itemsize,), dtype=torch.uint8, generator=generator
    )
    plain = octets.view(kind).view(shape)
    return plain.t() if len(shape) == 2 and dice.random() < 0.5 else plain


@pytest.mark.parametrize(
    ("window", "small"), [(64 << 20, 1 << 20), (4096, 512), (1000, 100), (64, 1), (128, 10**9)]
)
def test_every_byte_comes_to_its_place(
    window: int, small: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(transfers, "BLOCK", window)
    monkeypatch.setattr(transfers, "SMALL", small)
    dice = random.Random(seed)
    for threads in (1, 3):
        sources = [source_of(dice, 40) for _ in range(60)]
        moves = [(torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), one) for one in sources]
        for target, _ in moves:
            octets_of(target).fill_(0xFF)
        copy_to_devices(moves, threads)
        for target, source in moves:
            assert torch.equal(octets_of(target), octets_of(source))


def test_a_target_is_written_where_it_is_and_nothing_beside_it() -> None:
    whole = torch.zeros(10, 16)
    moves: list[Move] = [(whole[at], torch.full((16,), float(at))) for at in range(1, 9)]
    copy_to_devices(moves, 1)
    assert whole.sum(1).tolist() == [0.0, *(16.0 * at for at in range(1, 9)), 0.0]
    parameter = torch.nn.Parameter(torch.zeros(3))
    copy_to_devices([(parameter, torch.ones(3))], 1)
    assert (parameter.tolist(), parameter.grad_fn) == ([1.0] * 3, None)


def test_no_more_than_two_windows_are_made_and_one_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "BLOCK", 1 << 12)
    made: list[int] = []
    registered = transfers._pinned

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return registered(nbytes, device)

    monkeypatch.setattr(transfers, "_pinned", counted)
    for nbytes, expected in ((100, [128]), (4096, [4096]), (4097, [4096] * 2), (1 << 16, [4096] * 2)):
        made.clear()
        source = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        target = torch.empty_like(source)
        copy_to_devices([(target, source)], 2)
        assert torch.equal(target, source)
        assert made == expected


class Event:
    """Says what a device did before it."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._number = log, len([one for one in log if one.startswith("new")])
        log.append(f"new {self._number}")

    def synchronize(self) -> None:
        self._log.append(f"wait {self._number}")

    def record(self) -> None:
        self._log.append(f"sent {self._number}")


def test_a_window_is_filled_again_only_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls for a device that works beside the host, which none of this machine is."""
    monkeypatch.setattr(transfers, "BLOCK", 1 << 10)
    log: list[str] = []
    make = transfers._Window.__init__

    def made(self: transfers._Window, nbytes: int, device: torch.device) -> None:
        make(self, nbytes, device)
        self._read = Event(log)

    fill = transfers.copy_slices
    monkeypatch.setattr(transfers._Window, "__init__", made)
    monkeypatch.setattr(transfers, "copy_slices", lambda *rest: (log.append("fill"), fill(*rest))[1])
    source = torch.arange(5000, dtype=torch.int64).to(torch.uint8)
    target = torch.empty_like(source)
    copy_to_devices([(target, source)], 1)
    assert torch.equal(target, source)
    turns = [["wait 0", "fill", "sent 0"], ["wait 1", "fill", "sent 1"]]
    last = ["wait 0", "wait 1"]
    assert log == ["new 0", "new 1", *itertools.chain(*(turns[at % 2] for at in range(5))), *last]
