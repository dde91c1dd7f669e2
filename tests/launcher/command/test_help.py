"""The pages of help: what they show, and that nothing that runs a job is imported to print them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from outlast.config import RESTARTS_PER_DAY, FaultToleranceOptions
from outlast.launcher.command.parser import make_parser

SCRIPT = """
import json, sys
from outlast import cli
try:
    code = cli.main({words})
except SystemExit as end:
    code = end.code
sys.stderr.write(json.dumps([code, sorted(sys.modules)]))
"""
HEAVY = {"asyncio", "dataclasses", "inspect", "msgspec", "numpy", "socket", "subprocess", "torch"}
FOR_A_PAGE = {"outlast", "outlast._lazy", "outlast._version", "outlast.cli", "outlast.errors"}
OF_RUN = {"outlast.launcher", "outlast.launcher.command", "outlast.launcher.command.parser"}


def imported(*words: str) -> tuple[str, set[str]]:
    """Return what ``outlast`` prints with these words, and the modules that it has imported then."""
    command = [sys.executable, "-c", SCRIPT.format(words=list(words))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    code, modules = json.loads(run.stderr)
    assert code == 0
    return run.stdout, set(modules)


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "outlast"}


@pytest.mark.parametrize(
    ("words", "allowed"),
    [(("--help",), FOR_A_PAGE), (("--version",), FOR_A_PAGE), (("run", "--help"), FOR_A_PAGE | OF_RUN)],
    ids=["outlast", "version", "run"],
)
def test_a_page_of_help_imports_only_what_it_needs(words: tuple[str, ...], allowed: set[str]) -> None:
    page, modules = imported(*words)
    assert "outlast" in page
    assert ours(modules) <= allowed
    assert sorted(modules.intersection(HEAVY)) == []


def test_run_help_after_other_options_is_the_same_page() -> None:
    assert imported("run", "--nnodes=1", "--help")[0] == imported("run", "--help")[0]


def test_help_shows_each_option_once_and_an_example() -> None:
    text = make_parser({}).format_help()
    assert "outlast run --standalone --nproc-per-node=4 train.py" in text
    shown = re.findall(r"--[a-z][\w-]*", text.partition("positional arguments")[2])
    assert len(set(shown)) > 50
    assert [word for word in shown if "_" in word] == ["--a_b"]  # of the sentence that explains it
    assert "-t, --tee TEE" in text.replace("\n", " ").replace("  ", " ")


def test_help_shows_what_most_jobs_need_first() -> None:
    usual, _, advanced = make_parser({}).format_help().partition("\nadvanced: ")
    assert all(f" {name} " in usual for name in ("--nproc-per-node", "--run-dir", "--config", "--tee"))
    assert len(re.findall(r"^  .*--[a-z]", usual, re.MULTILINE)) <= 20
    assert "--ft-safety-factor" in advanced


def test_help_tells_the_defaults_of_the_configuration() -> None:
    texts = {action.dest: action.help or "" for action in make_parser({})._actions}
    told = {}
    for spec in fields(FaultToleranceOptions):
        default = spec.default
        if (
            isinstance(default, (int, float))
            and not isinstance(default, bool)
            and spec.name != "max_restarts"
        ):
            told[spec.name] = default
            assert texts[f"ft_{spec.name}"].endswith(f" {default:g}"), spec.name
    assert len(told) > 4
    assert f" {FaultToleranceOptions.max_restarts})" in texts["max_restarts"]
    assert f"{RESTARTS_PER_DAY}" in texts["ft_max_restarts_per_day"]
