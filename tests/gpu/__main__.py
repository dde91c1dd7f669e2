"""Runs each test that needs a GPU in a process of its own, with its own limit; prints JSON lines.

    python -m tests.gpu [--list]

An error of CUDA stays with its process, so no test shares one with another. Exit code 1: a test failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch

_WHERE = ("tests/gpu", "tests/health/jobs")  # only these have such tests
_LIMIT = 240.0  # seconds; of each test, the start of its process included
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def main() -> int:
    """Run them and return the exit code."""
    parser = argparse.ArgumentParser(description="Runs each test that needs a GPU in a process of its own.")
    parser.add_argument("--list", action="store_true", help="print the names of the tests, and run none")
    listing = parser.parse_args().list
    if not torch.cuda.is_available() and not listing:
        print(f"no GPU: torch {torch.__version__} finds none on this machine, so no test was run")
        return 0
    collected = subprocess.run(
        [*_PYTEST, "--collect-only", "-m", "gpu", *_WHERE],
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=True,
    )
    names = [line for line in collected.stdout.splitlines() if "::" in line]
    if listing:
        print("\n".join(names))
        return 0
    return int(any([not _passes(name) for name in names]))


def _passes(name: str) -> bool:
    began = time.monotonic()
    try:
        done = subprocess.run([*_PYTEST, name], capture_output=True, text=True, timeout=_LIMIT, check=False)
        outcome, told = ("passed" if done.returncode == 0 else "failed"), done.stdout[-2000:]
    except subprocess.TimeoutExpired:
        outcome, told = "failed", f"no end within {_LIMIT:g} s"
    line = {"test": name, "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(line if outcome == "passed" else {**line, "told": told}), flush=True)
    return outcome == "passed"


if __name__ == "__main__":
    sys.exit(main())
