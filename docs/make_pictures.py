"""Make the pictures of the documentation: what commands wrote, each as an SVG.

    python docs/make_pictures.py

It runs the demo, asks for the report of its run, and writes docs/pictures/. Nothing in a picture is typed by
hand. It takes a minute on an idle machine. If a command fails, it makes no picture and raises.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 96
PICTURES = Path(__file__).resolve().parent / "pictures"
COMMANDS = {
    "demo.svg": "outlast demo --dir first-fault",
    "report.svg": "outlast report first-fault/faults/run",
}
# rich names a web font of a CDN in each picture; a monospace font of the reader's machine does as well.
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run(command: str, folder: Path) -> str:
    """Return what a command of outlast writes to a pipe, run in a folder.

    Raises:
        subprocess.CalledProcessError: it failed; its output has been printed.
    """
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    ended = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.stderr.write(ended.stdout)
    ended.check_returncode()
    return ended.stdout


def picture(command: str, output: str) -> str:
    """Return a terminal with a command and its output, as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    console.print(Text(output.rstrip("\n")))
    drawn = console.export_svg(title="", unique_id="outlast")
    return _WEB_FONT.sub("", drawn).replace("Fira Code", "ui-monospace")


def make(commands: Mapping[str, str], out: Path) -> None:
    """Run commands one after another in one new folder, and write a picture of each."""
    with tempfile.TemporaryDirectory(prefix="outlast-pictures-") as folder:
        drawn = {name: picture(command, run(command, Path(folder))) for name, command in commands.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    make(COMMANDS, parser.parse_args().out)
