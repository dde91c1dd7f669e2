"""Names of network interfaces that ``outlast doctor`` judges by the rules of the library that reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE

NCCL, GLOO, TENSORPIPE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("names", "right"),
    [
        ({NCCL: "eth97,lo", GLOO: "lo,eth97", TENSORPIPE: "lo"}, {NCCL, TENSORPIPE}),
        ({NCCL: "^eth97", GLOO: "^eth97", TENSORPIPE: "=lo"}, {NCCL}),
    ],
    ids=["lists", "signs"],
)
def test_nccl_needs_one_of_the_interfaces_and_gloo_needs_each_of_them(
    tmp_path: Path, names: dict[str, str], right: set[str]
) -> None:
    words = ("--json", "--no-rehearsal", "--run-dir", str(tmp_path / "run"), "--check", "interfaces")
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "doctor", *words],
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["found"].partition("=")[0] for one in found} == set(names), done.stderr
    assert {one["found"].partition("=")[0] for one in found if one["ok"]} == right
