"""What is wrong in a manifest of a long training job: line, consequence and cure of each mistake.

Pure: a text in, findings out.
"""

from __future__ import annotations

from outlast.integrations import kubernetes_job_rules, kubernetes_rules
from outlast.integrations.kubernetes_workload import workloads
from outlast.integrations.kubernetes_yaml import read
from outlast.integrations.slurm_finding import Finding


def lint(text: str, save_seconds: float = 60.0) -> list[Finding]:
    """Return what is wrong in a manifest, by line.

    Args:
        text: the file, YAML or JSON.
        save_seconds: how long a save takes; the grace period has to be longer.

    Raises:
        UsageError: it cannot be read, or no job of a known kind is in it.
    """
    rules = (*kubernetes_rules.RULES, *kubernetes_job_rules.RULES)
    found = [one for job in workloads(read(text), save_seconds) for rule in rules for one in rule(job)]
    return sorted(found, key=lambda one: (one.line, one.rule))
