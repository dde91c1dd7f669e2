"""Commands whose output nobody reads any more end as Unix tools do: quietly, with 141."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE

LOG = Path(__file__).parent / "observe" / "data" / "eventful.jsonl"
COMMANDS = [
    "--help",
    "--version",
    "plan --help",
    "plan --model gpt3-7.1b --global-batch 512 --gpus 64",
    "plan --model gpt3-7.1b --global-batch 512 --gpus 64 --json",
    "metrics --rules",
    "metrics RUN",
    "completion bash",
    "report",
    "report RUN",
    "report RUN --json",
    "stragglers RUN",
    "top RUN --once",
    "top RUN --json",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_reader_has_gone_ends_quietly(command: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(LOG, tmp_path / "run" / "events.jsonl")
    words = [str(tmp_path / "run") if word == "RUN" else word for word in command.split()]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=DEADLINE,
        check=False,
        cwd=tmp_path,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("command", ["--version", "completion bash", "report RUN", "top RUN --once"])
def test_a_command_whose_streams_are_closed_ends_quietly(command: str, closed: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(LOG, tmp_path / "run" / "events.jsonl")
    words = [str(tmp_path / "run") if word == "RUN" else word for word in command.split()]
    done = subprocess.run(
        ["sh", "-c", f"exec {shlex.join([sys.executable, '-m', 'outlast', *words])} {closed}"],
        capture_output=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
