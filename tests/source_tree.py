"""The project's own source as parsed files, for the tests that check rules on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("src", "tests", "bench", "examples")


@dataclass(frozen=True)
class Source:
    """A file, parsed when its tree is asked for; ``name`` is dotted below src/, else empty."""

    path: str
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[ast.AST, str]]:
        """Every module that an import names, ``from a import b`` as ``a.b``."""
        return [found for node in self.nodes for found in _named(node)]

    @property
    def unit(self) -> str:
        """The first level below the package: ``recovery`` of ``outlast.recovery.policy.events``."""
        return [*self.name.split("."), ""][1]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def sources(root: Path, *folders: str) -> Iterator[Source]:
    """Yield the files of some folders; the project's own are read and parsed once."""
    for folder in folders:
        yield from _own(folder) if root == ROOT else _read(root, folder)


@cache
def _own(folder: str) -> tuple[Source, ...]:
    return _read(ROOT, folder)


def _read(root: Path, folder: str) -> tuple[Source, ...]:
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        name = ".".join(relative.with_suffix("").parts[1:]) if folder == "src" else ""
        found.append(Source(str(relative), name.removesuffix(".__init__"), path.read_text(encoding="utf-8")))
    return tuple(found)


def _named(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
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
