"""What the documents say of Kubernetes and Ray is what the commands take."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast import cli
from outlast.integrations.kubernetes import cli as kubernetes_cli
from outlast.integrations.kubernetes import lint as kubernetes_rules
from outlast.integrations.kubernetes.lint import lint
from outlast.integrations.kubernetes.manifest import FINAL, OF_ONE_NODE
from outlast.integrations.ray import cli as ray_cli
from tests.source_tree import ROOT

HOW_TO, REFERENCE = ROOT / "docs" / "how-to", ROOT / "docs" / "reference"


def options_of(parser: argparse.ArgumentParser, command: str) -> set[str]:
    action = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    given = (option for one in action.choices[command]._actions for option in one.option_strings)
    return {option for option in given if option.startswith("--")} - {"--help"}


def rendered() -> Iterator[list[str]]:
    text = (HOW_TO / "run-on-kubernetes.md").read_text().replace("\\\n", " ")
    for line in re.findall(r"^\$ outlast (k8s render .*)$", text, re.MULTILINE):
        yield shlex.split(re.split(r" [>|] ", line)[0])


@pytest.mark.parametrize("words", list(rendered()), ids=" ".join)
def test_a_manifest_of_the_documents_is_rendered(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    assert cli.main(words) == 0
    assert lint(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("document", "parser", "command"),
    [("kubernetes.md", kubernetes_cli._parser(), "render"), ("ray.md", ray_cli._parser(), "run")],
    ids=["kubernetes", "ray"],
)
def test_the_reference_lists_every_option(
    document: str, parser: argparse.ArgumentParser, command: str
) -> None:
    table = re.findall(r"^\| `(--[a-z-]+)", (REFERENCE / document).read_text(), re.MULTILINE)
    assert set(table) == options_of(parser, command)


def test_the_reference_lists_every_rule() -> None:
    section = (REFERENCE / "kubernetes.md").read_text().partition("### What the lint finds")[2]
    lines = section.partition("\n## ")[0].splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    source = Path(kubernetes_rules.__file__ or "").read_text()
    names = set(re.findall(r'"([a-z]+(?:-[a-z]+)+|disruption)"', source))
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == names


@pytest.mark.parametrize("page", ["run-on-kubernetes.md", "run-on-ray.md"])
def test_the_exit_codes_in_the_documents_are_those_in_force(page: str) -> None:
    text = (HOW_TO / page).read_text()
    lists = [
        tuple(map(int, re.findall(r"\d+", one)))
        for one in re.findall(r"xit code ((?:\d+(?:, | or )?)+)", text)
    ]
    assert {tuple(map(int, FINAL)), tuple(map(int, OF_ONE_NODE))} <= set(lists)
