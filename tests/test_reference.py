"""The reference has every command, option, key of the configuration, variable and public name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

import pytest

import outlast
from outlast import cli, settings
from outlast.integrations import frameworks
from tests.source_tree import ROOT
from tests.test_public_api import FACADES

PAGES = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reference/*.md")}
_HIDDEN = {"slurm step"}  # what `outlast slurm supervise` starts; nobody else does
_OF_SESSIONS = {"bind"}  # of a guard; only sessions call it


class _Found(Exception):
    """Carries the parser of a command that was about to read its words."""


def parser_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Found(parser)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(_Found) as found:
            cli.main(words)
    parser: argparse.ArgumentParser = found.value.args[0]
    return parser


def leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command and its parser, or those of its subcommands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, inner in action.choices.items():
            yield from leaves(f"{name} {word}", inner)


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a parser, each spelling with underscores or a "no" left out."""
    words = [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
    return [word for word in words if word != "--help" and "_" not in word and not word.startswith("--no-ft")]


def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the options of every command."""
    found: dict[str, list[str]] = {}
    for name in cli.COMMANDS:
        for path, parser in leaves(name, parser_of([name], monkeypatch)):
            found[path] = options_of(parser)
    found["chaos run"] = options_of(parser_of(["chaos", "run"], monkeypatch))
    return {path: words for path, words in found.items() if path not in _HIDDEN}


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


def test_every_command_and_option_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(commands(monkeypatch), PAGES) == []


@pytest.mark.parametrize(
    ("text", "replacement", "lost"),
    [
        ("outlast preflight", "outlast inspect", "outlast preflight"),
        ("--bandwidth-to", "--bandwidth", "outlast preflight --bandwidth-to"),
        ("`quarantine RUN NAME", "`aside RUN NAME", "outlast ckpt quarantine"),
        ("--dry-run", "--dry", "outlast slurm submit --dry-run"),
    ],
)
def test_a_command_that_the_reference_lacks_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, text: str, replacement: str, lost: str
) -> None:
    pages = {name: page.replace(text, replacement) for name, page in PAGES.items()}
    assert lost in missing(commands(monkeypatch), pages)


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
