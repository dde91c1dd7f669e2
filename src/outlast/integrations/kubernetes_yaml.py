"""YAML as far as manifests need it: written without a dependency, read with PyYAML, lines kept."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.core.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*")
_UNPRINTABLE = re.compile(
    "[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_RESOLVED = re.compile(r"true|false|null|yes|no|on|off|y|n|nan|inf", re.IGNORECASE)


def emit(value: Mapping[str, Any]) -> str:
    """Return a document; what could be read as anything but a text is quoted as JSON does it."""
    return "\n".join(_mapping(value, 0)) + "\n"


def _mapping(value: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, inner in value.items():
        yield from _entry(f"{'  ' * depth}{_scalar(key)}:", inner, depth)


def _entry(head: str, inner: Any, depth: int) -> Iterator[str]:
    if isinstance(inner, Mapping) and inner:
        yield head
        yield from _mapping(inner, depth + 1)
    elif isinstance(inner, Sequence) and not isinstance(inner, str) and inner:
        yield head
        for item in inner:
            yield from _item(item, depth)
    else:
        yield f"{head} {_scalar(inner)}"


def _item(item: Any, depth: int) -> Iterator[str]:
    if not isinstance(item, Mapping) or not item:
        yield f"{'  ' * depth}- {_scalar(item)}"
        return
    lines = list(_mapping(item, depth + 1))
    yield f"{'  ' * depth}- {lines[0].lstrip()}"
    yield from lines[1:]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _RESOLVED.fullmatch(value):
        return value
    return _UNPRINTABLE.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"


@dataclass(frozen=True)
class Document:
    """One document of a file.

    Args:
        content: what it says.
        lines: the line of every mapping's key and every list's item, by path.
    """

    content: Any
    lines: Mapping[tuple[str | int, ...], int]

    def line(self, path: Sequence[str | int]) -> int:
        """Return the line of a path, or of what is nearest above it."""
        for length in range(len(path), -1, -1):
            found = self.lines.get(tuple(path[:length]))
            if found is not None:
                return found
        return 1


def read(text: str) -> list[Document]:
    """Return the documents of a file that are not empty.

    Raises:
        UsageError: it is no YAML, or PyYAML is not installed.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise UsageError("PyYAML is needed to read a manifest: pip install 'outlast[k8s]'") from error
    try:
        found = []
        for node in yaml.compose_all(text, Loader=yaml.SafeLoader):
            if node is None:
                continue
            loader = yaml.SafeLoader("")
            lines: dict[tuple[str | int, ...], int] = {(): node.start_mark.line + 1}
            lines.update(_lines(node, ()))
            found.append(Document(loader.construct_document(node), lines))
        return [one for one in found if one.content is not None]
    except yaml.YAMLError as error:
        raise UsageError(f"no YAML: {' '.join(str(error).split())}; nothing was checked") from error


def _lines(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
    if node.id == "mapping":
        for key, inner in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(inner, (*path, key.value))
    elif node.id == "sequence":
        for index, inner in enumerate(node.value):
            yield (*path, index), inner.start_mark.line + 1
            yield from _lines(inner, (*path, index))
