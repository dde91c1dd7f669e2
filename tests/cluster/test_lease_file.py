"""The file that says which generation may commit on a node, as processes of the node read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.cluster.lease_file import LeaseFile, allowed, boot_time, wait_for
from outlast.errors import StaleGeneration


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\1" * 20, b"\0" * 16 + b"\1\1\1\1"], ids=len)
def test_a_file_that_never_becomes_whole_allows_nobody_to_commit(tmp_path: Path, content: bytes) -> None:
    """Its agent was killed before it had written."""
    path = tmp_path / "lease"
    path.write_bytes(content)
    path.chmod(0o600)
    assert allowed(str(path)) == (0, 0.0)
    with pytest.raises(StaleGeneration):
        wait_for(str(path), 3, 0.05)


def test_what_an_agent_allows_is_read(tmp_path: Path) -> None:
    lease = LeaseFile(tmp_path / "lease")
    lease.allow(3, boot_time() + 600)
    generation, left = allowed(str(lease.path))
    assert generation == 3
    assert 0 < left <= 600
    lease.close()
    assert allowed(str(lease.path))[0] == 0
