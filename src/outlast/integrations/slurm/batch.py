"""The batch file that ``outlast slurm submit`` writes: from options to text, nothing else."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from outlast.errors import UsageError
from outlast.integrations.agent_command import FLUSH, SHORTEST_LEAD
from outlast.integrations.requeue import Limits

LEAD = 180.0  # seconds from the signal to the time limit
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_OURS = (
    "requeue",
    "no-requeue",
    "signal",
    "open-mode",
    "ntasks",
    "ntasks-per-node",
    "nodes",
    "time",
    "output",
)


@dataclass(frozen=True)
class BatchFile:
    """What a batch file says.

    Args:
        command: the command line of ``outlast run``, with an absolute ``--run-dir``.
        run_dir: that folder.
        python: the interpreter.
        lead: seconds from SIGTERM to the time limit.
        directives: further ``#SBATCH`` options, as ``partition=gpu``.
        setup: shell lines in front, as ``module load cuda``.
        srun: further arguments of ``srun``.
    """

    command: tuple[str, ...]
    run_dir: str
    python: str
    name: str
    nodes: int = 1
    time: str = ""
    lead: float = LEAD
    limits: Limits = field(default_factory=Limits)
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    srun: tuple[str, ...] = field(default_factory=tuple)


def seconds_of(text: str) -> float | None:
    """Return the seconds of one of Slurm's times (MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM:SS); None: unlimited.

    Raises:
        ValueError: it is none of them.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}: expected minutes, MM:SS, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None or match[4] is not None:
        return float(days * 86400 + first * 3600 + second * 60 + third)
    return float(first * 60 + second)


def problems(batch: BatchFile) -> list[str]:
    """Return what is wrong with it, one line each."""
    found = []
    if batch.lead < SHORTEST_LEAD:
        found.append(
            f"--lead={batch.lead:.0f}: expected {SHORTEST_LEAD:.0f} or more; Slurm checks time limits every "
            f"30 s or so, and {FLUSH:.0f} s of it are for what follows the ranks' end"
        )
    if batch.nodes < 1:
        found.append(f"--nodes={batch.nodes}: expected a positive number")
    if batch.time:
        try:
            limit = seconds_of(batch.time)
        except ValueError as error:
            found.append(f"--time={error}")
        else:
            if limit is not None and limit < 2 * batch.lead:
                found.append(
                    f"--time={batch.time}: {limit:.0f} s, and the signal comes {batch.lead:.0f} s (--lead) "
                    "before its end: less than half of it would be left to train"
                )
    for directive in batch.directives:
        name = directive.lstrip("-").partition("=")[0].strip()
        if name in _OURS:
            found.append(f"{directive}: the file says that already; it cannot be given twice")
        if "\n" in directive:
            found.append(f"{directive!r}: expected one line")
    return found


def render(batch: BatchFile) -> str:
    """Return the text of the file.

    Raises:
        UsageError: it would be wrong; names everything that is.
    """
    wrong = problems(batch)
    if wrong:
        raise UsageError("\n".join(["the batch file would be wrong; nothing was submitted", *wrong]))
    directives = [
        f"--job-name={batch.name}",
        f"--nodes={batch.nodes}",
        "--ntasks-per-node=1",
        *([f"--time={batch.time}"] if batch.time else []),
        f"--signal=TERM@{batch.lead:.0f}",
        "--requeue",
        *(["--no-kill"] if batch.nodes > 1 else []),
        "--open-mode=append",
        f"--output={_in_directive(batch.run_dir)}/slurm-%j.out",
        *(directive if directive.startswith("-") else f"--{directive}" for directive in batch.directives),
    ]
    supervise = [
        batch.python,
        *("-m", "outlast", "slurm", "supervise", "--run-dir", batch.run_dir),
        *("--max-no-progress", str(batch.limits.no_progress), "--max-requeues", str(batch.limits.requeues)),
        *(f"--srun={argument}" for argument in batch.srun),
        *("--", *batch.command),
    ]
    lines = [
        "#!/bin/bash",
        "# Written by outlast slurm submit. One task a node: the agent there starts the ranks.",
        "# TERM goes to the ranks (no B:), who save; the batch step then asks for the next allocation.",
        *(f"#SBATCH {directive}" for directive in directives),
        "",
        *batch.setup,
        f"exec {shlex.join(supervise)}",
    ]
    return "\n".join(lines) + "\n"


def _in_directive(path: str) -> str:
    if re.search(r"\s|%", path):
        raise UsageError(
            f"--run-dir={path}: a space or a % cannot stand in #SBATCH --output; choose another folder"
        )
    return path
