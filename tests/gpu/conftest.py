"""Tests here need a GPU; without one they are skipped. Those that take ``device`` run on the CPU, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and _device_of(item) == "cuda":
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def _device_of(item: pytest.Item) -> object:
    called = getattr(item, "callspec", None)
    return "cuda" if called is None else called.params.get("device", "cuda")
