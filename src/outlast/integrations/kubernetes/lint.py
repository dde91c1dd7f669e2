"""The rules of ``outlast k8s lint``: line, consequence and cure of each mistake in a manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from outlast.integrations.agent_command import FLUSH
from outlast.integrations.findings import Finding, error, warning
from outlast.integrations.kubernetes.documents import (
    Workload,
    mapping,
    read,
    sequence,
    value_at,
    words_of,
    workloads,
)
from outlast.integrations.kubernetes.job import is_secret, size_of
from outlast.integrations.kubernetes.manifest import FINAL


def lint(text: str, save_seconds: float = 60.0) -> list[Finding]:
    """Return what is wrong in a manifest, by line.

    Args:
        text: the file, YAML or JSON.
        save_seconds: how long a save takes; the grace period has to be longer.

    Raises:
        UsageError: it cannot be read, or no job of a known kind is in it.
    """
    rules = (*RULES, *JOB_RULES)
    found = [one for job in workloads(read(text), save_seconds) for rule in rules for one in rule(job)]
    return sorted(found, key=lambda one: (one.line, one.rule))


Rule = Callable[[Workload], Iterable[Finding]]
_STANDARD_GRACE = 30  # Kubernetes' default of terminationGracePeriodSeconds
_SHELL = re.compile(r"(^|/)(ba|da|z|k)?sh$")


def grace(job: Workload) -> Iterator[Finding]:
    """The pod is killed before its ranks have saved."""
    found = job.pod.get("terminationGracePeriodSeconds", _STANDARD_GRACE)
    needed = job.save_seconds + FLUSH
    if isinstance(found, (int, float)) and found < needed:
        said = "" if "terminationGracePeriodSeconds" in job.pod else ", Kubernetes' default"
        yield error(
            job.line("template", "spec", "terminationGracePeriodSeconds"),
            "short-grace",
            f"{found:g} s between SIGTERM and SIGKILL{said}",
            f"a save takes {job.save_seconds:g} s, and the launcher needs {FLUSH:.0f} s after the ranks; "
            "steps that were not saved are lost",
            f"terminationGracePeriodSeconds: {needed:.0f} or more",
        )


def restart_policy(job: Workload) -> Iterator[Finding]:
    """The kubelet starts containers again after every exit code."""
    found = job.pod.get("restartPolicy", "Always")
    if found != "Never":
        yield error(
            job.line("template", "spec", "restartPolicy"),
            "restart-policy",
            f"restartPolicy: {found}",
            "the kubelet ignores exit codes (it starts the pod again after 93, do not requeue), and "
            "Kubernetes refuses podFailurePolicy",
            "restartPolicy: Never; podFailurePolicy then decides which pods start again",
        )


def shared_memory(job: Workload) -> Iterator[Finding]:
    """The memory tier and the data loaders have 64 MiB."""
    volumes = {
        str(mapping(one).get("name")): (index, mapping(one).get("emptyDir"))
        for index, one in enumerate(sequence(job.pod.get("volumes")))
    }
    for path, container in job.containers:
        mount = next((one for one in _mounts(container) if one.get("mountPath") == "/dev/shm"), None)
        index, volume = volumes.get(str(mount.get("name")), (0, None)) if mount else (0, None)
        if not isinstance(volume, Mapping) or volume.get("medium") != "Memory":
            because = "/dev/shm has 64 MiB: states cannot be staged, and data loaders end with SIGBUS"
            fix = "an emptyDir with medium: Memory and a sizeLimit, mounted at /dev/shm"
            yield error(job.line(*path), "no-shm", "no memory volume at /dev/shm", because, fix)
            continue
        limit = volume.get("sizeLimit")
        memory = value_at(container, ("resources", "limits", "memory"))
        line = job.line("template", "spec", "volumes", index)
        if limit is None:
            because = "the volume can fill all of the pod's memory; then the kernel kills a rank"
            yield warning(
                line, "shm-unbounded", "no sizeLimit", because, "a sizeLimit as large as the states need"
            )
        elif memory is not None and (size_of(str(limit)) or 0) >= (size_of(str(memory)) or float("inf")):
            because = (
                "files there count as the container's memory: the kernel kills a rank when the volume fills"
            )
            yield error(
                line, "shm-over-memory", f"sizeLimit {limit}, memory {memory}", because, "more memory"
            )


def _mounts(container: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [mapping(one) for one in sequence(container.get("volumeMounts"))]


def liveness(job: Workload) -> Iterator[Finding]:
    """A probe kills a busy node."""
    for path, container in job.containers:
        if "livenessProbe" in container:
            yield error(
                job.line(*path, "livenessProbe"),
                "liveness-kills",
                "a livenessProbe",
                "the kubelet kills a rank whose processor is busy; a container ends without a probe when its "
                "agent dies, and the agents of other nodes find an agent that hangs",
                "no livenessProbe; a startupProbe can end a pod that never starts",
            )


def secrets(job: Workload) -> Iterator[Finding]:
    """Find secrets that every account with access to the job can read."""
    for path, container in job.containers:
        for index, one in enumerate(sequence(container.get("env"))):
            name = str(mapping(one).get("name", ""))
            if mapping(one).get("value") and is_secret(name):
                yield error(
                    job.line(*path, "env", index),
                    "secret-in-env",
                    f"{name} as a literal",
                    "every account that may read the job can read it, and it is in every copy of this file",
                    "a Secret, mounted as a file, or valueFrom.secretKeyRef",
                )


def shell(job: Workload) -> Iterator[Finding]:
    """A shell stands between the kubelet and the agent."""
    for path, container in job.containers:
        words = words_of(container)
        if not words or not _SHELL.search(words[0]):
            continue
        script = words[-1].strip()
        alone = not re.search(r"[;&|\n]", script)  # bash and dash replace themselves with an only command
        if (
            not alone
            and re.search(r"\b(outlast run|torchrun)\b", script)
            and not re.search(r"\bexec\b", script)
        ):
            yield error(
                job.line(*path, "command"),
                "shell-between",
                f"{words[0]} without exec",
                "only the shell gets SIGTERM, and as process 1 it ignores the signal: no rank saves",
                "command: [outlast, run, ...], or exec before outlast run",
            )


def run_folder(job: Workload) -> Iterator[Finding]:
    """The checkpoints are deleted with the pod."""
    kept = [
        mapping(one).get("name")
        for one in sequence(job.pod.get("volumes"))
        if not {"emptyDir", "configMap", "secret", "downwardAPI", "projected"} & set(mapping(one))
    ]
    for path, container in job.containers:
        words = " ".join(words_of(container))
        found = re.search(r"--run[-_]dir[= ](\S+)", words)
        if not re.search(r"\boutlast run\b", words):
            continue
        places = [
            str(one.get("mountPath", "")).rstrip("/") for one in _mounts(container) if one.get("name") in kept
        ]
        folder = found[1] if found else "the default of --run-dir"
        if not any(f"{folder}/".startswith(f"{place}/") for place in places):
            because = "a new pod finds no checkpoint and starts at step 0"
            fix = "--run-dir in a mounted persistentVolumeClaim that all pods share"
            yield error(
                job.line(*path), "run-folder-in-pod", f"{folder} is on no persistent volume", because, fix
            )


RULES: tuple[Rule, ...] = (grace, restart_policy, shared_memory, liveness, secrets, shell, run_folder)


def retries(job: Workload) -> Iterator[Finding]:
    """Failed pods, or the failed job, are not started again."""
    for name in ("backoffLimit", "backoffLimitPerIndex"):
        if job.job.get(name) == 0 and (name != "backoffLimit" or "backoffLimitPerIndex" not in job.job):
            because = "the first failure of a pod ends the job, or this index of it"
            yield error(job.line(name), "no-retries", f"{name}: 0", because, "backoffLimitPerIndex: 6")
    if job.size > 1 and "backoffLimitPerIndex" not in job.job and job.job.get("backoffLimit") != 0:
        because = "all pods share one limit: one bad node can reach it, and the job ends"
        fix = "backoffLimitPerIndex, and maxFailedIndexes: the number of pods minus the least number of nodes"
        yield warning(job.line("backoffLimit"), "shared-retries", "no backoffLimitPerIndex", because, fix)
    if job.above and not job.at((*job.above, "failurePolicy", "maxRestarts"), 0):
        because = "a JobSet is never started again: maxRestarts is 0 by default"
        line = job.document.line((*job.above, "failurePolicy", "maxRestarts"))
        yield warning(line, "no-retries", "no failurePolicy.maxRestarts", because, "maxRestarts: 3")


def exit_codes(job: Workload) -> Iterator[Finding]:
    """The job treats all exit codes alike."""
    rules = [mapping(one) for one in sequence(mapping(job.job.get("podFailurePolicy")).get("rules"))]
    line = job.line("podFailurePolicy")
    if not rules:
        because = (
            "Kubernetes starts the pod again after 93 (do not requeue) and a wrong command line, and counts "
            "a preemption as a failure"
        )
        fix = f"podFailurePolicy: FailJob for {', '.join(map(str, FINAL))}; Ignore for DisruptionTarget"
        yield error(line, "no-failure-policy", "no podFailurePolicy", because, fix)
        return
    final = [
        code
        for one in rules
        if one.get("action") == "FailJob" and mapping(one.get("onExitCodes")).get("operator") == "In"
        for code in sequence(mapping(one.get("onExitCodes")).get("values"))
    ]
    missing = [int(code) for code in FINAL if code not in final]
    if missing:
        what = f"exit code {', '.join(map(str, missing))} does not end the job"
        because = "the same failure comes back until the limit of retries is reached"
        yield error(line, "exit-codes", what, because, "action: FailJob, onExitCodes, operator: In")
    if final and job.above and not _fails_the_set(job):
        because = "the job fails with the reason PodFailurePolicy, and the JobSet starts it again"
        fix = "failurePolicy.rules: action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]"
        where = job.document.line((*job.above, "failurePolicy"))
        yield error(where, "exit-codes", "failurePolicy has no rule for it", because, fix)
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
            because = "there is no headless service, so the endpoint's name does not resolve"
            yield error(line, "no-service", "enableDNSHostnames: false", because, "enableDNSHostnames: true")
        if job.at((*job.above, "network", "publishNotReadyAddresses")) is False:
            line = job.document.line((*job.above, "network", "publishNotReadyAddresses"))
            because = (
                "a pod gets a name only when it is ready, and it is ready only after it has met the others"
            )
            yield error(line, "no-service", "publishNotReadyAddresses: false", because, "true, the default")
        return
    domain = job.pod.get("subdomain")
    if domain is None or domain not in job.services:
        what = "no subdomain" if domain is None else f"no Service {domain} with clusterIP: None in the file"
        because = "pods have no names, so they cannot find each other"
        fix = "a Service with clusterIP: None, and subdomain: its name"
        yield error(job.line("template", "spec", "subdomain"), "no-service", what, because, fix)


def indexes(job: Workload) -> Iterator[Finding]:
    """Pods have no index, or not all of them run."""
    if job.size < 2:
        return
    if not job.above and job.job.get("completionMode") != "Indexed":
        because = "pods have neither a rank nor a name"
        yield error(
            job.line("completionMode"), "not-indexed", "no completionMode: Indexed", because, "Indexed"
        )
    completions, parallelism = job.job.get("completions"), job.job.get("parallelism", 1)
    if isinstance(completions, int) and isinstance(parallelism, int) and parallelism < completions:
        what, because = (
            f"{parallelism} of {completions} at once",
            "running pods wait for pods that are not started",
        )
        yield error(job.line("parallelism"), "not-at-once", what, because, f"parallelism: {completions}")
    if "successPolicy" not in job.job:
        because = (
            "the job completes only when every pod has: a pod that waits for a node keeps a finished job open"
        )
        fix = "successPolicy: rules: [{succeededCount: the least number of nodes}]"
        yield warning(job.line("successPolicy"), "no-success-policy", "no successPolicy", because, fix)


JOB_RULES: tuple[Rule, ...] = (retries, exit_codes, names, indexes)
