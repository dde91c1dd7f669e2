"""Changing copies by hand so that all digests are right again, as whoever may write the folder can."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.content.rank_file import contents_of
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, rank_files
from outlast.fields import FORMAT_VERSION, DamagedCopy

DOCUMENT = rank_files(0, 1).document
SAID = {"random": "0" * 16, "rest": "1" * 16, "table": "2" * 16}  # digests of the contents of a document


def text_of(manifest: Any) -> str:
    """Return the text of a manifest from its JSON values."""
    return json.dumps(manifest, separators=(",", ":")) + "\n"


def rewrite(copy: Path, change: Callable[[Any], object]) -> None:
    """Change a manifest and commit it anew."""
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest)
    content = text_of(manifest).encode()
    (copy / MANIFEST).write_bytes(content)
    (copy / COMMIT).write_bytes(commit_line(FORMAT_VERSION, file_digest(content)))


def forge(copy: Path, change: Callable[[Any, Any], object]) -> None:
    """Change the JSON file and the manifest of a copy of one rank."""
    document = json.loads((copy / DOCUMENT).read_text())

    def both(manifest: Any) -> None:
        change(document, manifest)
        content = json.dumps(document).encode()
        (copy / DOCUMENT).write_bytes(content)
        manifest["own"][0][3:5] = [len(content), file_digest(content)]
        with suppress(DamagedCopy):
            manifest["contents"] = {name: [[1, one]] for name, one in contents_of("", document).items()}

    rewrite(copy, both)
