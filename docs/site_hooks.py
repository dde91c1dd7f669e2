"""What mkdocs needs beside mkdocs.yml to show documents that are written for reading in the repository.

docs/index.md is the only list of the pages; the navigation is read from it. The documents in the repository's
root become pages, too. A link to a file that is no page, such as a test, becomes the file's path as text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ROOT_PAGES = {
    "README.md": ("Overview", "project/overview.md"),
    "ARCHITECTURE.md": ("Architecture", "project/architecture.md"),
    "GLOSSARY.md": ("Glossary", "project/glossary.md"),
    "CONTRIBUTING.md": ("Contributing", "project/contributing.md"),
    "CHANGELOG.md": ("Changelog", "project/changelog.md"),
    "SECURITY.md": ("Security", "project/security.md"),
}
_SECTION = re.compile(r"^\*\*(.+?)\*\*.*:$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[(.+?)\]\((.+?)\)", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_INFO = re.compile(r"^(```\w+) .*$", re.MULTILINE)


def navigation(index: str) -> Iterator[dict[str, object]]:
    """Yield the sections of docs/index.md, each with its pages, then the documents of the root."""
    yield {"Home": "index.md"}
    _, *sections = _SECTION.split(index)
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        yield {name: [{title.replace("`", ""): uri} for title, uri in _ENTRY.findall(text)]}
    yield {"Project": [{title: uri} for title, uri in ROOT_PAGES.values()]}


def page_uri(path: Path) -> str | None:
    """Return the address in the site of a file of the repository; None if the site does not have it."""
    if path.parent == ROOT and path.name in ROOT_PAGES:
        return ROOT_PAGES[path.name][1]
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else None


def for_site(markdown: str, source: Path, uri: str) -> str:
    """Return a document with links that lead within the site, and with fences that name a language only."""

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match.group()
        file = (source.parent / path).resolve()
        page = page_uri(file)
        if page is None:
            where = file.relative_to(ROOT).as_posix()
            return text if where in text else f"{text} (`{where}`)"
        relative = os.path.relpath(page, Path(uri).parent)
        return f"{picture}[{text}]({relative}{'#' if anchor else ''}{anchor})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : fence.start()]), _INFO.sub(r"\1", fence.group())]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = list(navigation((DOCS / "index.md").read_text(encoding="utf-8")))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root."""
    for name, (_, uri) in ROOT_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite a document for the site."""
    assert page.file.abs_src_path is not None
    return for_site(markdown, Path(page.file.abs_src_path), page.file.src_uri)
