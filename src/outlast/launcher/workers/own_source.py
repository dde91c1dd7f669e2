"""Whether a script may use torch, as far as its source says; one that does not starts before its import.

A wrong answer costs time and nothing else. A rank that was started early and imports torch all the same does
so itself, as under torchrun; one that waited for torch has waited in vain.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from outlast.launcher.command.options import LaunchOptions, ScriptKind

_MOST_BYTES = 1 << 20
_MOST_FILES = 50
_BY_NAME = frozenset({"importlib", "pkgutil", "runpy"})  # a name that is not in the source may be imported


def starts_early(options: LaunchOptions) -> bool:
    """Return whether the first ranks need nothing that the zygote imports."""
    one_node, script = not options.nodes.several, options.script
    return (
        one_node
        and not options.preload
        and script.kind is ScriptKind.FILE
        and not may_use_torch(script.target)
    )


def may_use_torch(script: str) -> bool:
    """Return False if a script imports only Python's modules and files beside it, and none names torch.

    Args:
        script: path of a file; an archive, a folder or what cannot be read may use torch.
    """
    folder = os.path.dirname(os.path.realpath(script))
    todo, seen = [script], {script}
    while todo:
        imported = _imports(todo.pop())
        if imported is None:
            return True
        for name in imported:
            beside = os.path.join(folder, f"{name}.py")
            if os.path.isfile(beside):
                if beside not in seen:
                    seen.add(beside)
                    todo.append(beside)
            elif name not in sys.stdlib_module_names or name in _BY_NAME:
                return True
        if len(seen) > _MOST_FILES:
            return True
    return False


def _imports(path: str) -> set[str] | None:
    """Return the packages that a source imports; None: it names torch, or nothing can be said."""
    try:
        if not os.path.isfile(path):
            return None
        with Path(path).open("rb") as file:
            source = file.read(_MOST_BYTES + 1)
        if len(source) > _MOST_BYTES or b"torch" in source:
            return None
        return set(_named(ast.parse(source)))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]  # "": relative, which is no name of a module
