"""The product that a rank computes between two steps: what its agent reads of it, and of the steps beside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader
from outlast.stragglers.agent import TimesOfRanks
from outlast.stragglers.policy.gathering import SectionTimes, joined
from outlast.stragglers.policy.rows import BENCHMARK, Kind
from outlast.stragglers.worker.benchmark import ENTRIES, compute
from outlast.stragglers.worker.windows import Windows


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[HeartbeatReader]:
    one = HeartbeatReader(tmp_path / "page", rank=3, generation=1, spawned=time.monotonic())
    one.times.ask(2)
    yield one
    one.close()


def trained(reader: HeartbeatReader) -> dict[str, SectionTimes]:
    """Return the sections of some steps, with the product between two of them."""
    page = HeartbeatPage.open(reader.path)
    windows = Windows(page)
    for step in range(1, 14):
        with page.section("forward"):
            time.sleep(0.1)
        page.heartbeat(step)
        if step == 6:
            compute(page)
    windows.close()
    times = TimesOfRanks(1)
    times.begin(1, {3: reader})
    report = times.look(0.0)
    assert report is not None
    return {one.section: one for one in joined(report.windows).sections}


def test_the_agent_reads_how_long_products_took(reader: HeartbeatReader) -> None:
    state = torch.get_rng_state()
    found = trained(reader)
    product = found[BENCHMARK]
    assert product.kind is Kind.COMPUTE
    assert 1 < product.count <= 1 + ENTRIES
    assert 0 < product.median <= product.p90 <= product.longest
    assert found["step"].longest < product.total, "it is no part of a step"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_product_that_cannot_be_computed_is_said_and_training_goes_on(
    reader: HeartbeatReader, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_device("meta")
    try:
        found = trained(reader)
    finally:
        torch.set_default_device(None)
    assert found["forward"].count > 5
    assert found[BENCHMARK].count == 1
    assert (
        "[outlast] this rank was not compared by a product: Cannot copy out of meta"
        in capsys.readouterr().err
    )
