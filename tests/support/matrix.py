"""Run the tests with several versions of Python and torch, and print a table of the results.

``make matrix`` starts it; ``MATRIX="--python 3.12 --torch 2.6"`` chooses pairs. Each pair gets an environment
of its own (5 GB where torch includes CUDA), which is removed afterwards. Interpreters are looked for on PATH,
in pyenv's folder and with uv. It needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import glob
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.4", "2.6", "2.9", "2.13")
LAUNCHER_TESTS = ("tests/launcher/command/test_parity_options.py", "tests/scenarios/launcher")
# Tests that start jobs, as in the Makefile.
SLOW = ("tests/adversary", "tests/chaos", "tests/scenarios", *glob.glob("tests/*/jobs", root_dir=ROOT))
INSTALL_TIME = 1800.0
TEST_TIME = 3600.0
NO_RELEASE = ("No matching distribution", "Could not find a version")


@dataclass(frozen=True)
class Pair:
    """A version of Python and one of torch, such as 3.12 and 2.6."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}"


def interpreter(version: str) -> str | None:
    """Return the path of an interpreter such as 3.12; None if there is none."""
    found = shutil.which(f"python{version}")
    # pyenv's shims are found, too, where pyenv has the version but does not select it.
    for path in filter(
        None, (found, *sorted(glob.glob(f"{Path.home()}/.pyenv/versions/{version}.*/bin/python")))
    ):
        told = run([path, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"], 60)
        if told.returncode == 0 and told.stdout.strip() == version:
            return path
    if shutil.which("uv"):
        told = run(["uv", "python", "find", version], 60)
        if told.returncode == 0:
            return told.stdout.strip()
    return None


def run(command: Sequence[str], patience: float) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; a command that takes too long counts as failed."""
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 124, "", f"not done after {late.timeout:.0f} s")


def install(pair: Pair, python: str, folder: Path) -> str:
    """Make an environment by the Makefile; return why there is none, or an empty text."""
    ready = folder / ".installed"
    made = run(
        ["make", f"PYTHON={python}", f"VENV={folder}", f"TORCH=torch=={pair.torch}.*", str(ready)],
        INSTALL_TIME,
    )
    if made.returncode == 0:
        return ""
    if any(words in made.stderr for words in NO_RELEASE):
        return "no release"
    return "not installed: " + (made.stderr.strip().splitlines() or ["?"])[-1]


def tested(python: Path, paths: Sequence[str], log: Path) -> str:
    """Run tests and return their result in words; their output goes into a file."""
    command = [str(python), "-m", "pytest", "-q", "--timeout=300", "-n", "2", "--dist", "loadfile", *paths]
    began = time.monotonic()
    done = run(command, TEST_TIME)
    log.write_text(done.stdout + done.stderr)
    counts = re.findall(
        r"(\d+) (passed|failed|errors?|skipped)", done.stdout.rpartition("\n=")[2] or done.stdout
    )
    last = ", ".join(f"{number} {word}" for number, word in counts[-4:])
    return f"{last or f'exit code {done.returncode}'} ({time.monotonic() - began:.0f} s)"


def row(pair: Pair, python: str, work: Path, options: argparse.Namespace) -> list[str]:
    """Return one row of the table: versions, and what the tests and the demo came to."""
    folder = work / pair.name
    try:
        if why := install(pair, python, folder):
            return [pair.python, pair.torch, why, "", ""]
        own = folder / "bin" / "python"
        versions = run(
            [str(own), "-c", "import sys, torch; print(sys.version.split()[0], torch.__version__)"], 300
        )
        fast = options.tests or ["tests", *(f"--ignore={path}" for path in SLOW)]
        cells = [tested(own, fast, options.logs / f"{pair.name}-fast.log")]
        cells.append(tested(own, options.launcher_tests, options.logs / f"{pair.name}-launcher.log"))
        demo = run([str(folder / "bin" / "outlast"), "demo"], TEST_TIME)
        (options.logs / f"{pair.name}-demo.log").write_text(demo.stdout + demo.stderr)
        cells.append("equal bit for bit" if demo.returncode == 0 else f"exit code {demo.returncode}")
        return [*(versions.stdout.split() or [pair.python, pair.torch]), *cells]
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Print one row for each pair; the exit code is 0 when all rows could be made."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions of Python")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions of torch")
    parser.add_argument("--tests", nargs="+", default=[], help="instead of all fast tests")
    parser.add_argument(
        "--launcher-tests", nargs="+", default=LAUNCHER_TESTS, help="process tests of the launcher"
    )
    parser.add_argument("--work", type=Path, help="folder for the environments; needs 5 GB")
    parser.add_argument(
        "--logs", type=Path, default=Path("matrix-logs"), help="folder for the output of the tests"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args(arguments)
    options.logs.mkdir(parents=True, exist_ok=True)
    work = options.work or Path(tempfile.mkdtemp(prefix="outlast-matrix-"))
    print(
        "| Python | torch | fast tests | launcher's process tests | demo |\n|---|---|---|---|---|", flush=True
    )
    complete = True
    for version in options.python:
        python = interpreter(version)
        for torch in options.torch:
            if python is None:
                cells = [version, torch, "no such interpreter", "", ""]
            else:
                cells = row(Pair(version, torch), python, work, options)
            complete = complete and bool(cells[-1])
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
