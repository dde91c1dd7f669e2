"""Whether a script may use torch, as far as its source says; one that does not starts before its import.

One that uses torch, and neither its compiler nor a session, does not wait for the import of these. A wrong
answer costs time and nothing else. A rank that was started early and imports torch all the same does so
itself, as under torchrun; one that waited for torch has waited in vain.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from outlast.launcher.command.options import LaunchOptions, ScriptKind

_MOST_BYTES = 1 << 20
_MOST_FILES = 50
_KNOWN = frozenset({"torch", "numpy", "outlast"})
_NAMED_BY: dict[str, tuple[bytes, ...]] = {  # a source that needs a module has one of these words
    "torch._dynamo": (b"optim", b"compile", b"arallel", b"fsdp", b"dynamo", b"checkpoint", b"export"),
    "outlast.worker.session": (b"outlast",),
}
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
    sources = _sources(script, frozenset())
    return sources is None or any(b"torch" in one for one in sources)


def needless(options: LaunchOptions) -> tuple[str, ...]:
    """Return what the zygote imports besides torch and the script has no use for."""
    script = options.script
    sources = _sources(script.target, _KNOWN) if script.kind is ScriptKind.FILE else None
    if sources is None:
        return ()
    return tuple(
        module
        for module, words in _NAMED_BY.items()
        if not any(word in one.lower() for word in words for one in sources)
    )


def _sources(script: str, known: Collection[str]) -> list[bytes] | None:
    """Return the sources of a script and of files beside it; None: they import others, or it is not known.

    Args:
        script: path of a file.
        known: packages that may be imported, besides Python's.
    """
    folder = os.path.dirname(os.path.realpath(script))
    todo, seen, sources = [script], {script}, []
    while todo:
        source = _read(todo.pop())
        imported = None if source is None else _imports(source)
        if source is None or imported is None:
            return None
        sources.append(source)
        for name in imported:
            beside = os.path.join(folder, f"{name}.py")
            if os.path.isfile(beside):
                if beside not in seen:
                    seen.add(beside)
                    todo.append(beside)
            elif name in _BY_NAME or not (name in sys.stdlib_module_names or name in known):
                return None
        if len(seen) > _MOST_FILES:
            return None
    return sources


def _read(path: str) -> bytes | None:
    try:
        if not os.path.isfile(path):
            return None
        with Path(path).open("rb") as file:
            source = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError):
        return None
    return source if len(source) <= _MOST_BYTES else None


def _imports(source: bytes) -> set[str] | None:
    """Return the packages that a source imports; None: nothing can be said."""
    try:
        return set(_named(ast.parse(source)))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]  # "": relative, which is no name of a module
