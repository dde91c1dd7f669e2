"""The rules of ``outlast k8s lint`` on how pods are counted, named and started again."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.integrations.kubernetes_manifest import FINAL
from outlast.integrations.kubernetes_rules import Rule
from outlast.integrations.kubernetes_workload import Workload, mapping, sequence
from outlast.integrations.slurm_finding import Finding, error, warning


def retries(job: Workload) -> Iterator[Finding]:
    """Nothing is started again."""
    for name in ("backoffLimit", "backoffLimitPerIndex"):
        if job.job.get(name) == 0 and (name != "backoffLimit" or "backoffLimitPerIndex" not in job.job):
            because = "the first pod that fails ends the job, or its place in it"
            yield error(job.line(name), "no-retries", f"{name}: 0", because, "backoffLimitPerIndex: 6")
    if job.size > 1 and "backoffLimitPerIndex" not in job.job and job.job.get("backoffLimit") != 0:
        because = "all pods share one count: one bad node uses it up, and the job ends"
        fix = "backoffLimitPerIndex, and maxFailedIndexes: pods less the fewest nodes"
        yield warning(job.line("backoffLimit"), "shared-retries", "no backoffLimitPerIndex", because, fix)
    if job.above and not job.at((*job.above, "failurePolicy", "maxRestarts"), 0):
        because = "a JobSet is never started again: maxRestarts is 0 by default"
        line = job.document.line((*job.above, "failurePolicy", "maxRestarts"))
        yield warning(line, "no-retries", "no failurePolicy.maxRestarts", because, "maxRestarts: 3")


def exit_codes(job: Workload) -> Iterator[Finding]:
    """Exit codes are not told apart."""
    rules = [mapping(one) for one in sequence(mapping(job.job.get("podFailurePolicy")).get("rules"))]
    line = job.line("podFailurePolicy")
    if not rules:
        because = (
            "93 (do not requeue) and a wrong command line are started again; preemption counts as a failure"
        )
        fix = f"podFailurePolicy: FailJob for {', '.join(map(str, FINAL))}; Ignore for DisruptionTarget"
        yield error(line, "no-failure-policy", "no podFailurePolicy", because, fix)
        return
    final = {
        code
        for one in rules
        if one.get("action") == "FailJob" and mapping(one.get("onExitCodes")).get("operator") == "In"
        for code in sequence(mapping(one.get("onExitCodes")).get("values"))
    }
    missing = [int(code) for code in FINAL if code not in final]
    if missing:
        what = f"exit code {', '.join(map(str, missing))} does not end the job"
        because = "the same thing would come back: it is started again until the count is used up"
        yield error(line, "exit-codes", what, because, "action: FailJob, onExitCodes, operator: In")
    if final and job.above and not _fails_the_set(job):
        because = "the job fails with the reason PodFailurePolicy, and the JobSet starts it again"
        fix = "failurePolicy.rules: action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]"
        where = job.document.line((*job.above, "failurePolicy"))
        yield error(where, "exit-codes", "no rule for it in failurePolicy", because, fix)
    ignored = [
        mapping(condition).get("type")
        for one in rules
        if one.get("action") == "Ignore"
        for condition in sequence(one.get("onPodConditions"))
    ]
    if "DisruptionTarget" not in ignored:
        because = "a drained or preempted node counts as a failure of the job"
        fix = "action: Ignore, onPodConditions: [{type: DisruptionTarget}]"
        yield error(line, "disruption", "disruptions are not ignored", because, fix)


def _fails_the_set(job: Workload) -> bool:
    rules = sequence(job.at((*job.above, "failurePolicy", "rules")))
    return any(
        mapping(one).get("action") == "FailJobSet"
        and "PodFailurePolicy" in (*sequence(mapping(one).get("onJobFailureReasons")), *_any_reason(one))
        for one in rules
    )


def _any_reason(rule: object) -> tuple[str, ...]:
    return () if sequence(mapping(rule).get("onJobFailureReasons")) else ("PodFailurePolicy",)


def names(job: Workload) -> Iterator[Finding]:
    """Pods cannot find each other."""
    if job.size < 2:
        return
    if job.above:
        if job.at((*job.above, "network", "enableDNSHostnames")) is False:
            line = job.document.line((*job.above, "network", "enableDNSHostnames"))
            because = "no headless service is made: the endpoint's name leads nowhere"
            yield error(line, "no-service", "enableDNSHostnames: false", because, "enableDNSHostnames: true")
        if job.at((*job.above, "network", "publishNotReadyAddresses")) is False:
            line = job.document.line((*job.above, "network", "publishNotReadyAddresses"))
            because = (
                "a pod has a name only once it is ready, and it is ready only once it has met the others"
            )
            yield error(line, "no-service", "publishNotReadyAddresses: false", because, "true, the default")
        return
    domain = job.pod.get("subdomain")
    if domain is None or domain not in job.services:
        what = "no subdomain" if domain is None else f"no Service {domain} with clusterIP: None in the file"
        because = "pods have no names by which they find each other"
        fix = "a Service with clusterIP: None, and subdomain: its name"
        yield error(job.line("template", "spec", "subdomain"), "no-service", what, because, fix)


def indexes(job: Workload) -> Iterator[Finding]:
    """Pods have no place in the job, or not all of them run."""
    if job.size < 2:
        return
    if not job.above and job.job.get("completionMode") != "Indexed":
        because = "pods have neither a rank nor a name of their own"
        yield error(
            job.line("completionMode"), "not-indexed", "no completionMode: Indexed", because, "Indexed"
        )
    completions, parallelism = job.job.get("completions"), job.job.get("parallelism", 1)
    if isinstance(completions, int) and isinstance(parallelism, int) and parallelism < completions:
        what, because = f"{parallelism} of {completions} at once", "nodes wait for pods that are not started"
        yield error(job.line("parallelism"), "not-at-once", what, because, f"parallelism: {completions}")
    if "successPolicy" not in job.job:
        because = (
            "the job is done only when every pod was: one that waits for a node keeps a finished job open"
        )
        fix = "successPolicy: rules: [{succeededCount: the fewest nodes}]"
        yield warning(job.line("successPolicy"), "no-success-policy", "no successPolicy", because, fix)


RULES: tuple[Rule, ...] = (retries, exit_codes, names, indexes)
