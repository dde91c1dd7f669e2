"""Tests of GLOSSARY.md: at most 60 terms, none defined twice, and no forbidden word in the source."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import ROOT, Source, sources


def rows() -> list[list[str]]:
    """Return the cells of every row of every table: term, meaning, elsewhere called, do not say."""
    lines = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if row[0] != "term" and not set(row[0]) <= set("-")]


def ruled_out() -> list[str]:
    return [word for row in rows() for word in re.findall(r"`([^`]+)`", row[3])]


def words_of(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and text of every name that the file defines, every comment and every docstring."""
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(str(node.value.value).splitlines(), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def spellings(name: str) -> str:
    """Return a text with the parts of compound names apart: ``max_stall``, ``MaxStall`` -> ``max stall``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower()


def violations(root: Path, words: list[str]) -> list[str]:
    pattern = re.compile("|".join(rf"\b{re.escape(word)}s?\b" for word in words))
    return [
        f"{source.path}:{line}: '{match.group()}' in {text.strip()!r}"
        for source in sources(root, "src")
        for line, text in words_of(source)
        for match in [pattern.search(spellings(text))]
        if match
    ]


def test_there_are_at_most_sixty_terms_each_with_one_meaning_and_none_ruled_out() -> None:
    terms = [row[0] for row in rows()]
    assert 40 < len(terms) <= 60
    assert sorted(set(terms)) == sorted(terms)
    assert [row for row in rows() if len(row) != 4 or not row[1]] == []
    assert set(terms).isdisjoint(ruled_out())


def test_the_source_says_nothing_that_the_glossary_rules_out() -> None:
    assert violations(ROOT, ruled_out()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def find_founder(): ...\n", 1),
        ("lastChair = 1\n", 1),
        ('"""Starts when the worker stalled."""\n', 1),
        ("x = 1  # put on the blacklist\n", 1),
        ("class A:\n    def f(self, relaunch): ...\n", 1),
        ("def f(self):\n    self.snapshots = []\n", 1),
        ("installed = 'snapshot'\n", 0),
    ],
)
def test_a_planted_word_is_found_but_in_strings(text: str, found: int, tmp_path: Path) -> None:
    (tmp_path / "src" / "outlast").mkdir(parents=True)
    (tmp_path / "src" / "outlast" / "x.py").write_text(text)
    assert len(violations(tmp_path, ruled_out())) == found
