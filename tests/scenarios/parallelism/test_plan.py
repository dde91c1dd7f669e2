"""``outlast plan``, from outside: what a job does after losses."""

from __future__ import annotations

import json
import subprocess
import sys


def test_shares_are_of_the_best_layout_on_all_nodes_even_where_it_is_not_that_of_today() -> None:
    model = ("--model", "gpt3-345m", "--global-batch", "64", "--nodes", "1x8,1x8*0.5")
    today = ("--tp", "1", "--pp", "2", "--dp", "4")
    command = [sys.executable, "-m", "outlast", "plan", *model, *today, "--lost", "0,1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    none, one = (json.loads(line) for line in done.stdout.splitlines())
    assert none["best"]["layout"]["tp"] == 4
    assert (none["lost"], none["share"]) == (0, 1.0)
    assert one["share"] == one["best"]["tokens"] / none["best"]["tokens"]
