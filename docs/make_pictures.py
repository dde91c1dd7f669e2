"""Make the pictures of the documentation: what commands wrote, as SVG, and a page as Chromium shows it.

    python docs/make_pictures.py

It runs the demo, asks for the report of its run, and writes docs/pictures/. Nothing in a picture is typed by
hand. It takes a minute on an idle machine. If a command fails, it makes no picture and raises. Without
Chromium the picture of the page stays as it was.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
COLUMNS = 96
PICTURES = Path(__file__).resolve().parent / "pictures"
COMMANDS = {
    "demo.svg": "outlast demo --dir first-fault",
    "report.svg": "outlast report first-fault/faults/run",
}
PAGE, PAGE_OF = "dashboard.webp", "outlast report first-fault/faults/run --html page.html"
_WIDTH, _HEIGHT = 1100, 1250  # of the page
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


def photo(page: Path) -> bytes:
    """Return the upper part of a page as Chromium shows it, as WebP."""
    from tests.support import browser

    with browser.opened(page.parent / "chromium") as tab:
        size = {"width": _WIDTH, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        tab.open(f"file://{page}")
        found = tab.call("Page.captureScreenshot", format="webp", quality=80)
    return base64.b64decode(found["data"])


def make(commands: Mapping[str, str], out: Path, page_of: str = "") -> None:
    """Run commands one after another in one new folder, and write a picture of each.

    Args:
        commands: by the names of their pictures.
        out: folder of the pictures.
        page_of: command that writes page.html, of which a picture is made, too; empty: none.
    """
    with tempfile.TemporaryDirectory(prefix="outlast-pictures-") as name:
        folder = Path(name)
        drawn = {name: picture(command, run(command, folder)).encode() for name, command in commands.items()}
        if page_of:
            run(page_of, folder)
            drawn[PAGE] = photo(folder / "page.html")
    out.mkdir(parents=True, exist_ok=True)
    for name, content in drawn.items():
        (out / name).write_bytes(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    make(COMMANDS, parser.parse_args().out, PAGE_OF if shutil.which("chromium") else "")
