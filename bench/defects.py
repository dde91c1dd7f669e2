"""defects: whether the tests find defects that the product had, put back one by one.

Each file bench/defects/NAME.diff puts one back. Its first line names its capabilities (folders of
tests/scenarios, the likeliest first), its second one the defect, a third one, where there is one, a test
that finds it. In a copy of this tree that test runs first; if it passes, the scenarios of these capabilities
up to the first failure, then the rest of `make test`; only what survives gets the long tests. A line of JSON
names the test that found it, the part, and the seconds. With --out, defects that the file has are left out,
so that a run goes on where it was stopped. "applies": false: it no longer fits; "broken": its tests
cannot be collected.

    python bench/defects.py --out defects.jsonl            all of them
    python bench/defects.py ledger-charges-the-living      one
    python bench/defects.py --check                        only whether each still applies
    python bench/defects.py --quick --out defects.jsonl    only the named tests; what survives is not written
    python bench/defects.py none                           a copy without a defect: nothing may be found
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFECTS = ROOT / "bench" / "defects"
NONE = "none"
PART_SECONDS = 3600.0
DEADLINE = 60  # seconds for what a test waits for: with a defect it often never comes
_BROKEN = (2, 3, 4)  # exit codes of pytest where tests cannot be collected: that finds nothing
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def copy_of(name: str, folder: Path) -> bool:
    """Copy the tracked files of this tree, with one defect put back; return whether its diff applies."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for each in filter(None, tracked.stdout.split("\0")):
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / each, folder / each, follow_symlinks=False)
    if name == NONE:
        return True
    diff = DEFECTS / f"{name}.diff"
    done = subprocess.run(["patch", "-p1", "-s", "-f", "-i", str(diff)], cwd=folder, check=False)
    return done.returncode == 0


def applies(name: str) -> bool:
    """Return whether a diff fits this tree."""
    command = ["patch", "-p1", "-s", "-f", "--dry-run", "-i", str(DEFECTS / f"{name}.diff")]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0


def heading(name: str) -> tuple[list[str], str, str]:
    """Return the capabilities and the words of a defect, and a test that finds it, "" if none is named."""
    if name == NONE:
        return [], NONE, ""
    first, second, third, *_ = (DEFECTS / f"{name}.diff").read_text().splitlines()
    test = third.removeprefix("test: ") if third.startswith("test: ") else ""
    return first.removeprefix("capabilities: ").split(), second, test


def parts(folder: Path, capabilities: list[str], test: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what runs, in order: a name and arguments of pytest."""
    if test:
        yield "named test", [test]
    own = [f"tests/scenarios/{one}" for one in capabilities if (folder / "tests/scenarios" / one).is_dir()]
    if own:
        yield "scenarios", ["-m", "not long", *own]
    yield "make test", ["-m", "not long", "tests"]
    yield "long", ["-m", "long", "tests"]


def finder(folder: Path, arguments: list[str], processes: int) -> tuple[str, int]:
    """Run tests up to the first failure; return the test that failed, "" when none did, and pytest's code."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--dist", "loadfile", "-n", str(processes)]
    # The copy stands before the tree that is installed, in every process that a test starts.
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "TMPDIR": str(folder / "tmp")}
    environment["TESTS_DEADLINE"] = str(DEADLINE)
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PART_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end in {PART_SECONDS:.0f} s", 124
    found = _FAILED.search(done.stdout)
    return found[1] if found else "", done.returncode


def judge(name: str, processes: int, quick: bool = False) -> dict[str, Any]:
    """Return what became of one defect."""
    capabilities, words, named = heading(name)
    result: dict[str, Any] = {"defect": name, "words": words, "applies": True, "found": False}
    with tempfile.TemporaryDirectory(prefix="defect-", dir=ROOT.parent) as scratch:  # tests hide /tmp
        folder = Path(scratch)
        (folder / "tmp").mkdir()
        if not copy_of(name, folder):
            return {**result, "applies": False}
        began = time.monotonic()
        for part, arguments in parts(folder, capabilities, named):
            if quick and part != "named test":
                break
            test, code = finder(folder, arguments, 0 if part == "named test" else processes)
            if code in _BROKEN:
                return {**result, "broken": f"pytest ended with {code} in {part}"}
            if code not in (0, 5):  # 5: no test
                seconds = round(time.monotonic() - began, 1)
                load = round(os.getloadavg()[0], 1)
                return {**result, "found": True, "part": part, "by": test, "seconds": seconds, "load": load}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Judge defects; print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processes", type=int, default=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in DEFECTS.glob("*.diff"))
    lines = options.out.read_text().splitlines() if options.out and options.out.exists() else []
    known = {json.loads(line)["defect"] for line in lines}
    for name in (one for one in names if one not in known):
        if options.check:
            result: dict[str, Any] = {"defect": name, "applies": applies(name)}
        else:
            result = judge(name, options.processes, options.quick)
        print(json.dumps(result), flush=True)
        if options.out and not options.check and (result["found"] or not options.quick):
            with open(options.out, "a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
