"""Tensors that are more than their bytes: saved through a codec, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint import register_codec
from outlast.checkpoint.content import codecs
from outlast.errors import CheckpointMismatch, UsageError
from tests.support.jobs import checkpointer
from tests.support.quantized import Quantized, put_together, take_apart


class Flat(Quantized):
    """Knows torch's own protocol."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _context: Any, _size: Any, _stride: Any) -> Flat:
        return Flat(inner["data8"], inner["scale"])


class Module(torch.nn.Module):
    def __init__(self, kind: type[Quantized], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(kind.of(torch.randn(8, 4)), requires_grad=False)
        self.plain = torch.nn.Parameter(torch.randn(3))


@pytest.fixture(autouse=True)
def no_codecs() -> Iterator[None]:
    before = dict(codecs._CODECS)
    yield
    codecs._CODECS.clear()
    codecs._CODECS.update(before)


def content(module: Module) -> list[bytes]:
    weight: Any = module.weight
    return [
        bytes(one.flatten().view(torch.uint8).tolist()) for one in (weight.data8, weight.scale, module.plain)
    ]


@pytest.mark.parametrize("kind", [Quantized, Flat])
def test_what_a_codec_takes_apart_comes_back_in_every_bit(kind: type[Quantized], tmp_path: Path) -> None:
    if kind is Quantized:
        register_codec(kind, take_apart, put_together)
    else:
        register_codec(kind)
    module, other = Module(kind, 1), Module(kind, 2)
    saver = checkpointer(tmp_path)
    assert saver.save(1, {"model": module}, "a test")
    assert content(other) != content(module)
    checkpointer(tmp_path, generation=2).restore({"model": other})
    assert content(other) == content(module)
    assert type(other.weight.data) is kind


def test_without_a_codec_it_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.weight.*Quantized.*register_codec"):
        checkpointer(tmp_path).save(1, {"model": Module(Quantized, 1)}, "a test")


def test_a_codec_that_is_missing_at_the_load_is_named(tmp_path: Path) -> None:
    register_codec(Quantized, take_apart, put_together, name="int8")
    checkpointer(tmp_path).save(1, {"model": Module(Quantized, 1)}, "a test")
    codecs._CODECS.clear()
    other = Module(Quantized, 2)
    before = content(other)
    with pytest.raises(CheckpointMismatch, match="codec int8, which this process has not registered"):
        checkpointer(tmp_path, generation=2).restore({"model": other})
    assert content(other) == before


def test_a_plain_tensor_is_not_taken_for_a_coded_one(tmp_path: Path) -> None:
    register_codec(Quantized, take_apart, put_together, name="int8")
    checkpointer(tmp_path).save(1, {"model": Module(Quantized, 1)}, "a test")
    other = Module(Quantized, 2)
    other.weight = torch.nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(
        CheckpointMismatch, match=r"weight is int8 float32\[8, 4\] in the checkpoint, float32\[8, 4\]"
    ):
        checkpointer(tmp_path, generation=2).restore({"model": other})


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a subclass of torch\.Tensor expected"):
        register_codec(dict)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one was given"):
        register_codec(Quantized, take_apart)
    with pytest.raises(UsageError, match="__tensor_flatten__"):
        register_codec(Quantized)
