"""The table of published rules beside ours in docs/explanation/planning.md is what the benchmark computes."""

from __future__ import annotations

import re
import runpy
import sys
from typing import Any

import pytest

from tests.source_tree import ROOT

RULES = ("paper", "recovery_utils", "recover", "ours")
LETTERS = {"layers": "(a)", "global batch": "(b)", "no layout": "(c)"}


def cell(found: dict[str, Any]) -> str:
    """Return what the table says of a record's rule."""
    layout = ", ".join(re.findall(r"\d+", found["layout"])) or "none"
    refused = found.get("refused", "")
    if refused:
        return f"{layout} {next(letter for words, letter in LETTERS.items() if refused.startswith(words))}"
    return f"{layout}: {found['share']:.2f}"


def test_each_row_of_the_document_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    seed = runpy.run_path(str(ROOT / "bench" / "plan.py"))["seed"]
    computed = [[str(one["gpus"]), *(cell(one[rule]) for rule in RULES)] for one in seed()]
    text = (ROOT / "docs" / "explanation" / "planning.md").read_text()
    table = text.partition("| GPUs | paper |")[2].partition("\n\n")[0].splitlines()[2:]
    said = [[word.strip() for word in row.strip("|").split("|")] for row in table if "V100s" not in row]
    assert said == computed
