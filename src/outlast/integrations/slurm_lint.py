"""What is wrong in a batch file of a long training job: line, consequence and cure of each mistake.

Pure: a text in, findings out. The rules are in :mod:`outlast.integrations.slurm_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.integrations import slurm_rules
from outlast.integrations.slurm_finding import Finding, Level
from outlast.integrations.slurm_script import parse

__all__ = ["Finding", "Level", "lint", "summary"]


def lint(text: str, save_seconds: float = 60.0) -> list[Finding]:
    """Return what is wrong in a batch file, by line.

    Args:
        text: the file.
        save_seconds: how long a save takes; the lead has to be longer.
    """
    script = parse(text)
    found = [one for rule in slurm_rules.RULES for one in rule(script, save_seconds)]
    return sorted(found, key=lambda one: (one.line, one.rule))


def summary(found: Sequence[Finding]) -> str:
    """Return one line on all findings."""
    if not found:
        return "nothing found"
    errors = sum(one.level is Level.ERROR for one in found)
    return f"{errors} error(s), {len(found) - errors} warning(s)"
