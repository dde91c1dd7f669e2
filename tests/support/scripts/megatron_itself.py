"""Runs megatron_core.py: what megatron-core spawns for a save must not run the script again."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("megatron_core.py")))
