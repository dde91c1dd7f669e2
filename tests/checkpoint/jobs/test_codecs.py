"""Tensors that are more than their bytes are saved through a codec; see the scenarios of states."""

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


def test_a_codec_that_is_missing_at_the_load_is_named(tmp_path: Path) -> None:
    register_codec(Quantized, take_apart, put_together, name="int8")
    checkpointer(tmp_path).save(1, {"model": Module(Quantized, 1)}, "a test")
    codecs._CODECS.clear()
    other = Module(Quantized, 2)
    before = content(other)
    with pytest.raises(CheckpointMismatch, match="int8"):
        checkpointer(tmp_path, generation=2).restore({"model": other})
    assert content(other) == before


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(UsageError, match="Tensor"):
        register_codec(dict)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Quantized"):
        register_codec(Quantized, take_apart)
    with pytest.raises(UsageError, match="__tensor_flatten__"):
        register_codec(Quantized)
