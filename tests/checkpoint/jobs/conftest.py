from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory_nodes import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    found.saver.hang_up()
    found.saver.kill()
