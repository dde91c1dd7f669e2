"""The documentation builds as a web site: strictly, whole, and without anything from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
pytest.importorskip("material", reason="mkdocs-material is not installed (extra docs)")
import markdown
from markdown_it import MarkdownIt

from docs import site_hooks

PAGES = sorted([*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in site_hooks.ROOT_PAGES)])
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link rel=\"(?:stylesheet|icon|preconnect)\")[^>]*(?:src|href)=\"([^\"]*)"
)
PARTS = ("li", "tr", "pre", "blockquote", "h1", "h2", "h3")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        folder,
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def parts(html: str) -> dict[str, int]:
    return {name: len(re.findall(rf"<{name}[ >]", html)) for name in PARTS}


def test_every_document_is_a_page_and_in_the_navigation(site: Path) -> None:
    told = (site / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        address = str(Path(site_hooks.page_uri(page) or "").with_suffix(".html"))
        assert (site / address).exists(), address
        assert f'href="{address}"' in told, address


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    texts = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    loaded = {one for text in texts for one in LOADED.findall(text)}
    assert len(loaded) > 3
    assert [one for one in loaded if re.match(r"(?:[a-z]+:)?//", one)] == []


def test_the_search_finds_a_page_by_its_words(site: Path) -> None:
    assert "rank_killed" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_each_page_has_the_lists_and_tables_that_it_has_on_github() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        ours = site_hooks.for_site(text, page, site_hooks.page_uri(page) or "")
        shown = markdown.markdown(ours, extensions=["tables", "pymdownx.superfences"])
        assert parts(shown) == parts(MarkdownIt("commonmark").enable("table").render(text)), page


@pytest.mark.parametrize(
    ("place", "text", "shown"),
    [
        ("README.md", "[a](docs/how-to/save.md#b)", "[a](../how-to/save.md#b)"),
        ("README.md", "![a](docs/pictures/demo.svg)", "![a](../pictures/demo.svg)"),
        ("README.md", "[a](ARCHITECTURE.md)", "[a](architecture.md)"),
        ("docs/index.md", "[a](../GLOSSARY.md)", "[a](project/glossary.md)"),
        ("docs/how-to/save.md", "[a](rerun.md)", "[a](rerun.md)"),
        ("docs/how-to/save.md", "[a](../../bench/plan.py)", "a (`bench/plan.py`)"),
        ("docs/how-to/save.md", "[bench/plan.py](../../bench/plan.py)", "bench/plan.py"),
        ("docs/how-to/save.md", "[a](#b) [c](https://example.org)", "[a](#b) [c](https://example.org)"),
        ("docs/how-to/save.md", "```python runnable\n[a](b.md)\n```", "```python\n[a](b.md)\n```"),
    ],
)
def test_links_and_fences_are_rewritten_for_the_site(place: str, text: str, shown: str) -> None:
    source = ROOT / place
    assert site_hooks.for_site(text, source, site_hooks.page_uri(source) or "") == shown
