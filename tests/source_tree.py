"""The project's own source as parsed files, for the tests that check rules on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("src", "tests", "bench", "examples")


@dataclass(frozen=True)
class Source:
    """A parsed file; ``name`` is dotted below src/, else empty."""

    path: str
    name: str
    text: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The first level below the package: ``recovery`` of ``outlast.recovery.policy.events``."""
        return [*self.name.split("."), ""][1]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def sources(root: Path, *folders: str) -> Iterator[Source]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            name = ".".join(relative.with_suffix("").parts[1:]) if folder == "src" else ""
            text = path.read_text(encoding="utf-8")
            yield Source(str(relative), name.removesuffix(".__init__"), text, ast.parse(text, str(relative)))


def imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module that a tree names in an import, ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a chain of names, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""
