"""Replacing the node of a slow rank needs a node to replace it with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outlast.errors import UsageError
from outlast.launcher.command.options import parse_run


def test_replacing_a_node_needs_a_spare(tmp_path: Path) -> None:
    config = tmp_path / "outlast.toml"
    config.write_text('[stragglers]\naction = "replace"\n')
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(UsageError, match=r"replace.*spare"):
        parse_run(["--config", str(config), str(script)], dict(os.environ))
