"""The documents say what is so: links lead somewhere, code runs, commands parse, claims name their proof."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import ExitCode
from tests.source_tree import ROOT
from tests.support import warm

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``info`` is what stands after the fence ("python runnable")."""

    place: str
    info: tuple[str, ...]
    text: str


def blocks(*languages: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            info = tuple(match.group(1).split())
            if info[:1] and info[0] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(f"{document.relative_to(ROOT)}:{line}", info, match.group(2)))
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each ``outlast`` command up to ">"; in a console block, of those after a prompt."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.info[0] == "console" and not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"\w+=.*|env", words[0]):
            words = words[1:]
        if words[:1] == ["outlast"]:
            yield words[1 : words.index(">") if ">" in words else None]


RUNNABLE = [block for block in blocks("python") if "runnable" in block.info]
SHELL = [
    pytest.param(words, id=block.place)
    for block in blocks("console", "bash", "sh")
    for words in commands(block)
]


def test_every_relative_link_leads_somewhere() -> None:
    assert {one: broken for one in DOCUMENTS if (broken := list(broken_links(one)))} == {}


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# One two\n[x](b.md) [y](#one-two) [z](#three) [w](https://example.org)\n"
    )
    assert [one.partition(": ")[0] for one in broken_links(tmp_path / "a.md")] == ["b.md", "#three"]


def test_python_in_the_documents_compiles() -> None:
    for block in blocks("python"):
        compile(block.text, block.place, "exec")


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.place)
def test_python_that_is_marked_runnable_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(block.text)
    if '"torch" not in sys.modules' in block.text:  # about the start itself
        subprocess.run([sys.executable, "snippet.py"], timeout=110, check=True)
        return
    run = warm.run([tmp_path / "snippet.py"], 110)
    assert run.returncode == 0, run.stderr


class Parsed(Exception):
    """A command line was understood; nothing is carried out."""


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Give a command line to ``outlast`` and stop where it has been parsed."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: list[str], namespace: None = None) -> None:
        parse(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    try:
        cli.main(words)
    except Parsed:
        return True
    except SystemExit:
        return False
    return False


@pytest.mark.parametrize("words", SHELL)
def test_a_command_in_the_documents_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert understood(words, monkeypatch)


@pytest.mark.parametrize(
    "line", ["run --no-such-option x.py", "run", "chaos inject", "report --no-such-option x", "demo x", "x"]
)
def test_a_wrong_command_would_be_seen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not understood(line.split(), monkeypatch)


def test_every_document_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target.partition("#")[0]).resolve() for target in LINK.findall(index)}
    missing = [path for path in ROOT.glob("docs/**/*.md") if path.name != "index.md" and path not in linked]
    assert missing == []


def claims() -> list[tuple[str, list[str]]]:
    """Return the rows of the README's table of what is survived, each with the paths it names as proof."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it survives")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [(row, re.findall(r"`((?:tests|bench)/[^`]+)`", row)) for row in rows[1:]]


def test_every_claim_of_the_readme_names_its_proof() -> None:
    found = claims()
    assert len(found) >= 8
    assert [row for row, proofs in found if not proofs] == []
    paths = [path.partition("::")[0] for _, proofs in found for path in proofs]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_exit_codes_are_documented_once_each() -> None:
    table = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    told = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert told == [int(code) for code in ExitCode if code != ExitCode.SIGNAL_BASE]


def named_modules(text: str) -> list[str]:
    """Return the modules that a document names in backticks, such as ``hang/policy/monitor``."""
    package = ROOT / "src" / "outlast"
    folders = "|".join(sorted(path.name for path in package.iterdir() if (path / "__init__.py").exists()))
    return re.findall(rf"`((?:{folders})/[a-z_/]+)`", text)


@pytest.mark.parametrize(("document", "least"), [("ARCHITECTURE.md", 50), ("CONTRIBUTING.md", 10)])
def test_every_module_that_a_document_names_exists(document: str, least: int) -> None:
    named = named_modules((ROOT / document).read_text(encoding="utf-8"))
    package = ROOT / "src" / "outlast"
    assert len(named) > least
    there = [(package / f"{name}.py").exists() or (package / name).is_dir() for name in named]
    assert [name for name, exists in zip(named, there, strict=True) if not exists] == []


def test_the_ways_through_the_code_count_their_modules_and_hops() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Ways through the code")[2].partition("\n## ")[0]
    ways = [line.strip("|").split("|") for line in section.splitlines() if "→" in line]
    assert len(ways) >= 2
    for way, modules, hops in ways:
        names = named_modules(way)
        assert (len(names), len(set(names)), way.count("→")) == (int(modules), int(modules), int(hops)), way


def defined(module: str) -> set[str]:
    """Return the functions, classes and methods that a module defines."""
    tree = ast.parse((ROOT / "src" / "outlast" / f"{module}.py").read_text(encoding="utf-8"))
    found = {one.name for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef):
            found |= {f"{kind.name}.{one.name}" for one in kind.body if isinstance(one, ast.FunctionDef)}
    return found


def test_the_lists_of_a_save_and_a_load_name_functions_and_count_modules_and_rounds() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Ways through")[2]
    lists = re.findall(
        r"^### From [^:\n]+: (\d+) modules, \d+ processes, (\d+) rounds$(.*?)(?=^##)", section, re.M | re.S
    )
    assert len(lists) == 2
    for modules, rounds, text in lists:
        items = re.findall(r"^\d+\. `([a-z_/]+)`: ((?:`[\w.]+`(?:, )?)+)\.", text, re.M)
        assert (len(items), len(set(dict(items)))) == (int(modules), int(modules))
        assert len(re.findall(r'round "', text)) == int(rounds)
        missing = [
            (name, one) for name, all_ in items for one in all_.split(", ") if one[1:-1] not in defined(name)
        ]
        assert missing == []
