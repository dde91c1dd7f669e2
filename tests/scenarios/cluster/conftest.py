from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    """Return what makes a job; its agents are gone afterwards."""
    made: list[Agents] = []

    def make(*args: Any, **more: Any) -> Agents:
        made.append(Agents(tmp_path / f"job-{len(made)}", *args, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()
