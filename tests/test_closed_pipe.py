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


def command(words: str, folder: Path) -> list[str]:
    (folder / "run").mkdir()
    shutil.copy(LOG, folder / "run" / "events.jsonl")
    return [sys.executable, "-m", "outlast", *words.replace("RUN", str(folder / "run")).split()]


@pytest.mark.parametrize(
    "words",
    ["--version", "plan --help", "metrics --rules", "completion bash", "report RUN --json", "top RUN --once"],
)
def test_a_command_whose_reader_has_gone_ends_quietly(words: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = command(words, tmp_path)
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "closed"),
    [("--version", ">&-"), ("report RUN", ">&- 2>&- <&-"), ("top RUN --once", ">&- 2>&- <&-")],
)
def test_a_command_whose_streams_are_closed_ends_quietly(words: str, closed: str, tmp_path: Path) -> None:
    line = ["sh", "-c", f"exec {shlex.join(command(words, tmp_path))} {closed}"]
    done = subprocess.run(line, capture_output=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
