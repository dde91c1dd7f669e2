"""What a rule of ``outlast slurm lint`` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outlast.integrations.slurm_script import Script


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


Rule = Callable[[Script, float], Iterable[Finding]]


def top(script: Script) -> int:
    """Return the line behind which a missing directive would stand."""
    return script.directives[-1].line if script.directives else 1


def error(line: int, rule: str, what: str, because: str, fix: str) -> Finding:
    """Return a finding that is wrong in every job."""
    return Finding(line, rule, Level.ERROR, what, because, fix)


def warning(line: int, rule: str, what: str, because: str, fix: str) -> Finding:
    """Return a finding that may be meant."""
    return Finding(line, rule, Level.WARNING, what, because, fix)
