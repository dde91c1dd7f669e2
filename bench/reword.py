"""reword: how many tests break when messages of the product are reworded.

A message is a string of the source with at least three words that is raised, logged, printed, returned or
passed on: no docstring, no pattern, nothing that is compared or looked up. Small words are replaced by others
of the same kind ("the" by "that", "is" by "was"), so that its meaning, its values and its form stay.

    python bench/reword.py FOLDER                     copy this tree to FOLDER, 20 messages reworded
    python bench/reword.py FOLDER --count 5 --seed 3  five others
    python bench/reword.py FOLDER --count all         all of them
    python bench/reword.py --list                     name all of them

Then run the tests in FOLDER: what fails there and not here holds the wording of a message.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("src/outlast")
OTHER = {
    **{"the": "that", "a": "one", "an": "one", "is": "was", "are": "were", "was": "is", "of": "from"},
    **{"to": "into", "and": "plus", "or": "else", "has": "had", "have": "had", "not": "never"},
    **{"for": "towards", "in": "within", "on": "upon", "its": "their", "it": "this", "that": "which"},
    **{"by": "through", "with": "beside", "from": "of", "after": "following", "before": "ahead of"},
    **{"cannot": "can never", "must": "shall", "be": "become", "this": "such", "no": "not any"},
}
_WORD = re.compile(r"[A-Za-z][a-z']*")
_SMALL = re.compile(r"(?<![\w<{/.=-])(" + "|".join(OTHER) + r")(?![\w>}/.=-])")
_PATTERNS = {
    "compile",
    "match",
    "search",
    "fullmatch",
    "sub",
    "split",
    "startswith",
    "endswith",
    "find",
    "get",
}


@dataclass(frozen=True)
class Message:
    """A message: where its parts stand in a file, as offsets in bytes, and its text."""

    file: str
    line: int
    text: str
    parts: tuple[tuple[int, int], ...]


def messages(root: Path = ROOT) -> list[Message]:
    """Return the messages of a tree's source."""
    found: list[Message] = []
    for path in sorted((root / SOURCE).rglob("*.py")):
        content = path.read_bytes()
        found += _of_file(str(path.relative_to(root)), content)
    return found


def _of_file(file: str, content: bytes) -> Iterator[Message]:
    tree = ast.parse(content)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        inside = isinstance(parents.get(node), ast.JoinedStr | ast.FormattedValue)
        if not isinstance(node, ast.Constant | ast.JoinedStr) or inside or not _is_message(node, parents):
            continue
        text = _text(node)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        written = content[begin:end].decode()
        if len(_WORD.findall(text)) < 3 or text.count(" ") < 2 or not _SMALL.search(written):
            continue
        parts = tuple(
            (begin + len(written[: one.start()].encode()), begin + len(written[: one.end()].encode()))
            for one in _SMALL.finditer(written)
            if _is_text(written, one.start())
        )
        if parts:
            yield Message(file, node.lineno, text, parts)


def _is_text(written: str, offset: int) -> bool:
    """Return whether an offset of a literal is in its text, not in a value that is filled in."""
    before = written[:offset].replace("{{", "").replace("}}", "")
    return before.count("{") == before.count("}")


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)


def _is_message(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    child, parent = node, parents.get(node)
    while parent is not None:
        if isinstance(parent, ast.Expr) and parent.value is node:
            return False  # a docstring
        if isinstance(parent, ast.Compare | ast.Subscript | ast.Match):
            return False
        if isinstance(parent, ast.Dict) and child in parent.keys:
            return False
        if isinstance(parent, ast.Call):
            named = parent.func
            name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
            if name in _PATTERNS:
                return False
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return True
        child, parent = parent, parents.get(parent)
    return False  # a constant of a module: often what others write


def _reworded(content: bytes, parts: tuple[tuple[int, int], ...]) -> bytes:
    for begin, end in sorted(parts, reverse=True):
        content = content[:begin] + OTHER[content[begin:end].decode()].encode() + content[end:]
    return content


def main() -> None:
    """Copy the tree with reworded messages; print them as JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--count", default="20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    found = messages()
    if options.list:
        for one in found:
            print(f"{one.file}:{one.line}: {one.text}")
        return
    if options.folder is None or options.folder.exists():
        sys.exit("reword: name a folder that does not exist yet")
    chosen = (
        found if options.count == "all" else random.Random(options.seed).sample(found, int(options.count))
    )
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        target = options.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    for file in {one.file for one in chosen}:
        target = options.folder / file
        parts = tuple({part for one in chosen if one.file == file for part in one.parts})
        target.write_bytes(_reworded((ROOT / file).read_bytes(), parts))
        compile(target.read_bytes(), file, "exec")
    for one in chosen:
        print(json.dumps({"message": one.text, "file": one.file, "line": one.line}))


if __name__ == "__main__":
    main()
