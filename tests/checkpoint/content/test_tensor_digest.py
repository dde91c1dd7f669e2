"""Digests on a device: what changes them, and how often the host waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from xxhash import xxh3_64_intdigest

from outlast.checkpoint.content import tensor_digest
from outlast.checkpoint.content.tensor_digest import _on_host, _sums, digest_of_copy, digests_of
from tests.support.calls import Calls, until_a_number_is_read


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tensor_digest, "_CHUNK", 256)
    tensor_digest._odd_numbers.cache_clear()
    yield
    tensor_digest._odd_numbers.cache_clear()


def _of(tensor: torch.Tensor) -> list[int]:
    return _on_host([_sums(tensor)])[0]


@given(octets=st.binary(min_size=1, max_size=700), offset=st.integers(0, 3), data=st.data())
def test_any_bit_and_any_change_of_places_is_seen(octets: bytes, offset: int, data: st.DataObject) -> None:
    one = torch.frombuffer(bytearray(bytes(offset) + octets), dtype=torch.uint8)[offset:]
    before = _of(one)
    assert before == _of(one.clone())
    assert len(before) == -(-len(octets) // 256)
    at, bit = data.draw(st.integers(0, len(octets) - 1)), data.draw(st.integers(0, 7))
    other = one.clone()
    other[at] ^= 1 << bit
    assert _of(other) != before
    low = data.draw(st.integers(0, len(octets) - 1))
    if octets[low] != octets[at]:
        swapped = one.clone()
        swapped[low], swapped[at] = one[at], one[low]
        assert _of(swapped) != before


def test_digests_of_large_tensors_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digest, "_CHUNK", 16 << 20)
    with FakeTensorMode(), Calls() as seen:
        tensors = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(5)]
        with until_a_number_is_read():  # the first number that is read
            digests_of(tensors)
    assert (seen.counts["sum"], seen.counts["cat"]) == (10, 1)


def _in_order(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.randn(5, 3)),
        torch.randn(5, 3).t(),
        torch.randn(3)[::2],
        torch.randn(1).expand(4),
        torch.randn(9)[4:],
        torch.zeros(3, dtype=torch.complex64).add_(1 + 2j).conj(),
        torch.zeros(3, dtype=torch.complex64).add_(1 + 2j).conj().imag,
        torch.randn(1).as_strided((1,), (7,)),
        torch.zeros(0),
        torch.randn(2, 2).as_subclass(torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.Tensor),
    ],
    ids=["plain", "turned", "steps", "expanded", "offset", "conj", "neg", "odd stride", "empty", "subclass"],
)
def test_a_digest_on_the_host_is_that_of_the_elements_in_order(tensor: torch.Tensor) -> None:
    assert digests_of([tensor]) == [xxh3_64_intdigest(_in_order(tensor))]


def test_of_a_plain_tensor_on_the_host_no_other_tensor_is_made() -> None:
    tensors = [torch.nn.Parameter(torch.randn(7)) for _ in range(9)]
    with Calls() as seen:
        digests_of(tensors)
    assert not seen.counts


def test_the_default_device_of_a_script_changes_nothing() -> None:
    tensor = torch.arange(300, dtype=torch.uint8)
    expected = _of(tensor)
    tensor_digest._odd_numbers.cache_clear()
    with torch.device("meta"):
        assert _of(tensor) == expected
        (octets,) = tensor_digest._fetched([tensor])
    assert torch.equal(octets, tensor)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("threads", [map, ThreadPoolExecutor(3).map])
def test_a_copy_has_the_digest_of_its_tensor_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, threads: Any
) -> None:
    monkeypatch.setattr(tensor_digest, "_PIECE", 64)
    tensors = [torch.arange(nbytes, dtype=torch.uint8), torch.arange(2 * nbytes, dtype=torch.uint8)[::2]]
    numbers = digests_of(tensors, threads)
    assert numbers == [digest_of_copy(one.contiguous(), one) for one in tensors]
    assert numbers == digests_of([one.clone() for one in tensors])
    changed = tensors[0].clone()
    changed[nbytes // 2] ^= 1
    assert digests_of([changed]) != numbers[:1]
