"""The reference has every command, option, key of the configuration, variable and public name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields

import pytest

import outlast
from outlast import cli, settings
from outlast.completion import BELOW, HIDDEN, leaves, parser_of
from outlast.integrations import frameworks
from tests.source_tree import ROOT
from tests.test_public_api import FACADES

PAGES = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reference/*.md")}
_OF_SESSIONS = {"bind"}  # of a guard; only sessions call it


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a parser, each spelling with underscores or a "no" left out."""
    words = [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
    return [word for word in words if word != "--help" and "_" not in word and not word.startswith("--no-ft")]


def commands() -> dict[str, list[str]]:
    """Return the options of every command."""
    found: dict[str, list[str]] = {}
    for name in cli.COMMANDS:
        for path, parser in leaves(name, parser_of([name], cli.COMMANDS)):
            found[path] = options_of(parser)
    for words in BELOW:
        found[" ".join(words)] = options_of(parser_of(words, cli.COMMANDS))
    return {path: words for path, words in found.items() if path not in HIDDEN}


def page_of(path: str, pages: Mapping[str, str]) -> str:
    """Return the page that has a heading, or a row of a table, for a command; "": none has."""
    command, _, below = path.partition(" ")
    for text in pages.values():
        heading = re.search(rf"^#+ .*`?outlast {command}\b", text, re.MULTILINE)
        if heading and (not below or re.search(rf"(^\| `|outlast {command} ){below}\b", text, re.MULTILINE)):
            return text
    return ""


def missing(wanted: Mapping[str, list[str]], pages: Mapping[str, str]) -> list[str]:
    """Return every command and option that the pages lack."""
    found = []
    for path, words in wanted.items():
        page = page_of(path, pages)
        if not page:
            found.append(f"outlast {path}")
        found += [f"outlast {path} {word}" for word in words if not re.search(rf"{word}(?![\w-])", page)]
    return found


def members(kind: type) -> list[str]:
    """Return the public methods and properties of a class, those of a context manager left out."""
    return [name for name, _ in inspect.getmembers(kind) if not name.startswith("_")]


def test_every_command_and_option_is_in_the_reference() -> None:
    assert missing(commands(), PAGES) == []


@pytest.mark.parametrize(
    ("text", "replacement", "lost"),
    [
        ("outlast preflight", "outlast inspect", "outlast preflight"),
        ("--bandwidth-to", "--bandwidth", "outlast preflight --bandwidth-to"),
        ("`quarantine RUN NAME", "`aside RUN NAME", "outlast ckpt quarantine"),
        ("--dry-run", "--dry", "outlast slurm submit --dry-run"),
    ],
)
def test_a_command_that_the_reference_lacks_would_be_seen(text: str, replacement: str, lost: str) -> None:
    pages = {name: page.replace(text, replacement) for name, page in PAGES.items()}
    assert lost in missing(commands(), pages)


def test_every_key_of_the_configuration_is_in_the_reference() -> None:
    page = PAGES["options.md"]
    lost = [f"[{table}]" for table in settings.TABLES if f"`[{table}]`" not in page]
    lost += [
        f"{table}.{spec.name}"
        for table, kind in settings.TABLES.items()
        for spec in fields(kind)
        if f"\n| `{spec.name}` |" not in page
    ]
    assert lost == []


def test_every_variable_of_users_is_in_the_reference() -> None:
    assert [name for name in sorted(settings.FOR_USERS) if f"`{name}`" not in PAGES["options.md"]] == []


@pytest.mark.parametrize("module", FACADES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    names = importlib.import_module(module).__all__
    page = PAGES["python-api.md"] + PAGES["slurm.md"] + PAGES["preflight.md"]
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


@pytest.mark.parametrize(
    "kind", [outlast.Session, outlast.Guard, frameworks.follow], ids=lambda one: one.__name__
)
def test_what_a_script_calls_is_in_the_reference(kind: type | Callable[..., object]) -> None:
    page = PAGES["python-api.md"]
    assert re.search(rf"^## .*{kind.__name__}$", page, re.MULTILINE)
    names = members(kind) if isinstance(kind, type) else list(inspect.signature(kind).parameters)
    assert [name for name in names if name not in _OF_SESSIONS and not re.search(rf"\b{name}\b", page)] == []
