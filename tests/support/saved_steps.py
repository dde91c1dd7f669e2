"""Runs of the script that saves steps: made, restored and looked at, by files and by lines of JSON alone."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS

SCRIPT = SCRIPTS / "saves_steps.py"
TENSORS, DOCUMENT = "rank-00000-of-00001.safetensors", "rank-00000-of-00001.json"
DIGESTS = "rank-00000-of-00001.digests"
FILES = (TENSORS, DIGESTS, DOCUMENT, "MANIFEST.json", "COMMIT")


def name_of(step: int, generation: int = 0) -> str:
    return f"step-{step:09}.g{generation}"


def steps_of(run: Path) -> list[int]:
    """Return the steps of the copies on disk."""
    return sorted(int(path.name[5:14]) for path in (run / "checkpoints").glob("step-*"))


def said(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def ran(*words: str | Path, code: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Run the script; return what it said."""
    given = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    done = warm.run([SCRIPT, *words, *given], DEADLINE)
    assert done.returncode == code, done.stderr
    return said(done.stdout)


def made(run: Path, *steps: int, **options: Any) -> dict[int, str]:
    """Make a run with a copy of each step; return what each holds."""
    lines = ran(run, f"save={','.join(map(str, steps))}", **options)
    assert [one["saved"] for one in lines[1:]] == [True] * len(steps), lines
    return {one["step"]: one["content"] for one in lines[1:]}


def restored(*runs: Path, **options: Any) -> dict[Path, dict[str, Any]]:
    """Restore runs in one process; return what was said of each."""
    return {Path(one["run"]): one for one in ran(*runs, **options)}


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    text = (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""
    whole = text[: text.rfind("\n") + 1]  # the last line may be on its way
    return [one for one in said(whole) if one["kind"] == kind]


def flip(path: Path, bit: int = -1) -> None:
    """Flip a bit, the last one if none is named."""
    content = bytearray(path.read_bytes())
    bit %= len(content) * 8
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def content(root: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a folder."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def outlast(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of outlast, which starts in milliseconds."""
    return warm.run([SCRIPTS / "outlast_command.py", *words], DEADLINE)


def verified(run: Path) -> int:
    """Return the exit code of a look at every byte of a run's copies."""
    return outlast("ckpt", "verify", run, "--all").returncode


def killed(*words: str | Path, **options: Any) -> list[dict[str, Any]]:
    return ran(*words, code=-signal.SIGKILL, **options)
