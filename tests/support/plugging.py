"""Packages that register a part of their own, as pip would leave them: a module and its entry points."""

from __future__ import annotations

import re
from pathlib import Path

from tests.source_tree import ROOT


def documented(page: str, name: str) -> str:
    """Return the Python block of a page of the how-to guides that defines a class."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if f"class {name}" in block)
    return str(found)


def install(folder: Path, group: str, name: str, source: str, target: str) -> str:
    """Lay out a package that registers ``target`` of its module; return what PYTHONPATH has to name."""
    module = f"{name}_plugin"
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{target}\n")
    (folder / f"{module}.py").write_text(source)
    return str(folder)
