"""What the lints of the schedulers have in common: findings, and the command that shows them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from outlast.errors import ExitCode, UsageError


class Level(Enum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One mistake.

    Args:
        line: where, from 1; for what is missing, where it would stand.
        rule: its name in the documents.
        what: what was found.
        because: what happens because of it.
        fix: what to write.
    """

    line: int
    rule: str
    level: Level
    what: str
    because: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.line}: {self.level.value}: {self.what} [{self.rule}]\n"
            f"    so: {self.because}\n    fix: {self.fix}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**self.__dict__, "level": self.level.value}


def error(line: int, rule: str, what: str, because: str, fix: str) -> Finding:
    """Return a finding that is wrong in every job."""
    return Finding(line, rule, Level.ERROR, what, because, fix)


def warning(line: int, rule: str, what: str, because: str, fix: str) -> Finding:
    """Return a finding that may be meant."""
    return Finding(line, rule, Level.WARNING, what, because, fix)


def add_lint(
    commands: Any, kind: str, lint: Callable[[str, float], Sequence[Finding]]
) -> argparse.ArgumentParser:
    """Add the command ``lint`` to those of a scheduler.

    Args:
        commands: what ``add_subparsers`` returned.
        kind: of the file, as "a manifest".
        lint: returns the findings in a text, by line, where a save takes so many seconds.
    """
    parser: argparse.ArgumentParser = commands.add_parser("lint", help=f"find the mistakes in {kind}")
    parser.add_argument("file", metavar="FILE", help=f"{kind}; - for standard input")
    parser.add_argument("--save-seconds", type=float, default=60.0, help="how long a save takes (default 60)")
    parser.add_argument("--strict", action="store_true", help="a warning is an error")
    parser.add_argument("--json", action="store_true", help="one JSON object a finding")

    def carry_out(options: argparse.Namespace, rest: Sequence[str]) -> int:
        if rest:
            raise UsageError(f"lint takes nothing after --, found {' '.join(rest)}")
        try:
            text = sys.stdin.read() if options.file == "-" else Path(options.file).read_bytes().decode()
        except (OSError, UnicodeDecodeError) as failure:
            raise UsageError(f"{options.file}: cannot be read ({failure}); expected {kind}") from failure
        found = lint(text, options.save_seconds)
        for one in found:
            sys.stdout.write((json.dumps(one.to_json()) if options.json else f"{options.file}:{one}") + "\n")
        if not options.json:
            sys.stdout.write(_summary(found) + "\n")
        levels = {one.level for one in found}
        return ExitCode.FAILED if Level.ERROR in levels or (options.strict and levels) else ExitCode.OK

    parser.set_defaults(carry_out=carry_out)
    return parser


def _summary(found: Sequence[Finding]) -> str:
    if not found:
        return "nothing found"
    errors = sum(one.level is Level.ERROR for one in found)
    return f"{errors} error(s), {len(found) - errors} warning(s)"
