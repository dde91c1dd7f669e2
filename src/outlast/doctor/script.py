"""What ``outlast doctor`` reads of a training script without running it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis
from outlast.files import read_whole

_MOST_SCRIPT = 16 << 20
_DDP = {"DistributedDataParallel", "DDP"}
_THIRD = {"torch", "numpy", "outlast", "transformers", "accelerate", "datasets", "lightning", "yaml"}
# Imported before a script's folder is on the path.
_EARLY = {"abc", "codecs", "genericpath", "io", "os", "posixpath", "site", "stat", "test", "zipimport"}
_NAMED = {*sys.stdlib_module_names, *_THIRD} - {*sys.builtin_module_names, *_EARLY}


def compiled(script: Path) -> Sequence[Diagnosis]:
    """Compile the script without running it, and look at its parallel model and the files beside it."""
    try:
        tree = ast.parse(read_whole(script, _MOST_SCRIPT, follow=True), str(script))
        compile(tree, str(script), "exec", dont_inherit=True)
    except OSError as error:
        return [policy.script(str(script), error.strerror or str(error))]
    except SyntaxError as error:
        return [policy.script(str(script), f"line {error.lineno}: {error.msg}")]
    except (ValueError, RecursionError) as error:
        return [policy.script(str(script), str(error))]
    folder = script.resolve().parent
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _rebuilds(node)]
    return [
        policy.script(str(script), ""),
        policy.buckets(str(script), sorted(lines)),
        policy.modules(str(folder), sorted(_shadowing(folder))),
    ]


def _rebuilds(call: ast.Call) -> bool:
    """Say whether a call makes a DDP that rebuilds its buckets, as far as its words tell."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in _DDP or any(one.arg is None for one in call.keywords):
        return False
    given = {one.arg: one.value for one in call.keywords}
    static, unused = given.get("static_graph"), given.get("find_unused_parameters")
    if isinstance(static, ast.Constant) and static.value:
        return True
    return unused is None or (isinstance(unused, ast.Constant) and not unused.value)


def _shadowing(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".py")
            package = entry.is_dir() and Path(entry.path, "__init__.py").is_file()
            if name in _NAMED and (entry.name.endswith(".py") or package):
                yield entry.name
