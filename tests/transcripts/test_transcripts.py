"""Golden transcripts: what the commands print, one file a capability; no other test holds a sentence.

A transcript is a text file. ``file NAME`` and the lines after it, each with ``| `` in front, make a file
in an empty folder. ``$ COMMAND`` runs a command there, in bash; below it stands what it printed, each line
with ``> `` in front, and ``exit CODE`` unless that is 0. Other lines are comments. Times, sizes,
identifiers, the folder and the spaces of tables are normalised; remarks that depend on the load are left out.

``python -m pytest tests/transcripts --rewrite-transcripts`` writes them anew; read the difference.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
SECONDS = 120.0
NORMALISED = (
    (r"^\[outlast\] +\S+s  ", "[outlast] "),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?( ?UTC|Z)?", "TIME"),
    (r"\b\d\d:\d\d:\d\d\b", "TIME"),
    (r"\b\d+(\.\d+)? ?(us|ms|s)\b", "N s"),
    (r"\b\d+(\.\d+)? ?([KMGT]i?B|bytes)\b", "N B"),
    (r"\b\d+\.\d+\b", "N"),
    (r"\b(pid|port|process) \d+", r"\1 N"),
    (r"\b127\.0\.0\.1:\d+", "127.0.0.1:N"),
    (r"\b[0-9a-f]{12,}\b", "ID"),
    (r"[█▏▎▍▌▋▊▉░▒▓]+", ""),
    (r"─+", "-"),
    (r"(?<=\S) {2,}", "  "),
)


NOW_AND_THEN = ("OMP_NUM_THREADS=1", "takes longer than usual")  # depends on the machine and on its load


def normalised(text: str, folder: Path) -> list[str]:
    """Return the lines without what differs from run to run."""
    text = text.replace(str(folder), "HERE").replace(socket.gethostname(), "HOST")
    lines = []
    for written in text.splitlines():
        line = written
        for pattern, other in NORMALISED:
            line = re.sub(pattern, other, line)
        if not any(one in line for one in NOW_AND_THEN):
            lines.append(line.rstrip())
    return lines


def play(script: str, folder: Path) -> str:
    """Return a transcript with what its commands print now."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["COLUMNS"] = "120"
    found: list[str] = []
    name = ""
    for line in script.splitlines():
        if line.startswith("> ") or line == ">" or re.fullmatch(r"exit \d+", line):
            continue
        found.append(line)
        if line.startswith("file "):
            name = line.removeprefix("file ")
            (folder / name).write_text("")
        elif line.startswith("|"):
            with open(folder / name, "a") as file:
                file.write(line[2:] + "\n")
        elif line.startswith("$ "):
            done = subprocess.run(
                ["bash", "-c", line[2:]],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            )
            found += [f"> {one}".rstrip() for one in normalised(done.stdout.decode(), folder)]
            found += [f"exit {done.returncode}"] * (done.returncode != 0)
    return "\n".join(found) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_commands_print_what_the_transcript_has(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    answered = play(path.read_text(), tmp_path)
    if request.config.getoption("--rewrite-transcripts"):
        path.write_text(answered)
    assert answered == path.read_text()
