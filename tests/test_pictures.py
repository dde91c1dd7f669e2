"""The pictures in the documents show what a command wrote, and load nothing."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import make_pictures
from tests.source_tree import ROOT
from tests.support import browser

MOST_BYTES = 100_000


def words(picture: Path) -> str:
    """Return the text of a picture; rich writes each space as one that does not break."""
    text = picture.read_text(encoding="utf-8")
    shown = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", text))
    return html.unescape(shown).replace("\xa0", " ")


@pytest.mark.parametrize("name", make_pictures.COMMANDS)
def test_a_picture_is_whole_small_and_shown(name: str) -> None:
    picture = make_pictures.PICTURES / name
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert len(text.encode()) < MOST_BYTES
    assert re.findall(r"url\(\W*http[^)]*|href=\S*", text) == []
    assert make_pictures.COMMANDS[name] in words(picture)
    pages = (ROOT / "README.md", ROOT / "docs/tutorial/first-fault.md")
    assert any(name in page.read_text() for page in pages)


def test_the_picture_of_the_page_is_small_and_shown() -> None:
    content = (make_pictures.PICTURES / make_pictures.PAGE).read_bytes()
    assert (content[:4], content[8:12]) == (b"RIFF", b"WEBP")
    assert len(content) < MOST_BYTES
    assert make_pictures.PAGE in (ROOT / "README.md").read_text()


@pytest.mark.skipif(browser.PROGRAM is None, reason="Chromium is not installed")
def test_a_picture_of_a_page_is_made_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<body style='background: red'>")
    assert make_pictures.photo(page)[8:12] == b"WEBP"


def test_a_picture_is_made_of_a_real_command(tmp_path: Path) -> None:
    make_pictures.make({"help.svg": "outlast --help"}, tmp_path / "new")
    told = words(tmp_path / "new" / "help.svg")
    assert "$ outlast --help" in told
    asked = [sys.executable, "-m", "outlast", "--help"]
    real = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    for word in real.split()[:20]:
        assert word in told


def test_a_command_that_fails_makes_no_picture(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        make_pictures.make({"a.svg": "outlast report nowhere"}, tmp_path / "new")
    assert not (tmp_path / "new").exists()
