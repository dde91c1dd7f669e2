"""The rules of ``outlast k8s lint`` on pods: each looks for one kind of mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from outlast.integrations.kubernetes_job import is_secret, size_of
from outlast.integrations.kubernetes_workload import Workload, mapping, sequence, value_at, words_of
from outlast.integrations.slurm_batch import FLUSH
from outlast.integrations.slurm_finding import Finding, error, warning

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
            f"a save takes {job.save_seconds:g} s, and {FLUSH:.0f} s are for what follows the ranks' end: "
            "what was not saved is trained again",
            f"terminationGracePeriodSeconds: {needed:.0f} or more",
        )


def restart_policy(job: Workload) -> Iterator[Finding]:
    """The kubelet starts containers again, whatever they exited with."""
    found = job.pod.get("restartPolicy", "Always")
    if found != "Never":
        yield error(
            job.line("template", "spec", "restartPolicy"),
            "restart-policy",
            f"restartPolicy: {found}",
            "exit codes are not looked at (93, do not requeue, is started again); "
            "podFailurePolicy is refused",
            "restartPolicy: Never; podFailurePolicy says what is started again",
        )


def shared_memory(job: Workload) -> Iterator[Finding]:
    """The memory tier and the data loaders have 64 MiB."""
    volumes = {
        mapping(one).get("name"): (index, mapping(one).get("emptyDir"))
        for index, one in enumerate(sequence(job.pod.get("volumes")))
    }
    for path, container in job.containers:
        mount = next((one for one in _mounts(container) if one.get("mountPath") == "/dev/shm"), None)
        index, volume = volumes.get(mount.get("name"), (0, None)) if mount else (0, None)
        if not isinstance(volume, Mapping) or volume.get("medium") != "Memory":
            because = "/dev/shm has 64 MiB: states cannot be staged, and data loaders die of SIGBUS"
            fix = "an emptyDir with medium: Memory and a sizeLimit, mounted at /dev/shm"
            yield error(job.line(*path), "no-shm", "no memory volume at /dev/shm", because, fix)
            continue
        limit = volume.get("sizeLimit")
        memory = value_at(container, ("resources", "limits", "memory"))
        line = job.line("template", "spec", "volumes", index)
        if limit is None:
            because = "the volume may take all of the pod's memory; the kernel then kills a rank"
            yield warning(line, "shm-unbounded", "no sizeLimit", because, "sizeLimit: what the states need")
        elif memory is not None and (size_of(str(limit)) or 0) >= (size_of(str(memory)) or float("inf")):
            because = (
                "what lies there counts as the container's memory: the kernel kills a rank when it fills"
            )
            yield error(
                line, "shm-over-memory", f"sizeLimit {limit}, memory {memory}", because, "more memory"
            )


def _mounts(container: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [mapping(one) for one in sequence(container.get("volumeMounts"))]


def liveness(job: Workload) -> Iterator[Finding]:
    """A busy node is taken for a dead one."""
    for path, container in job.containers:
        if "livenessProbe" in container:
            yield error(
                job.line(*path, "livenessProbe"),
                "liveness-kills",
                "a livenessProbe",
                "the kubelet kills a rank whose processor is busy; a dead agent ends its container without a "
                "probe, and a hung one is found by the agents of the other nodes",
                "leave it out; a startupProbe may end a pod that never begins",
            )


def secrets(job: Workload) -> Iterator[Finding]:
    """A secret can be read by whoever may read the job."""
    for path, container in job.containers:
        for index, one in enumerate(sequence(container.get("env"))):
            name = str(mapping(one).get("name", ""))
            if mapping(one).get("value") and is_secret(name):
                yield error(
                    job.line(*path, "env", index),
                    "secret-in-env",
                    f"{name} as a literal",
                    "it can be read by whoever may read the job, and is in every copy of this file",
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
                "SIGTERM reaches the shell, which is process 1 and ignores it: no rank saves",
                "command: [outlast, run, ...], or exec in front of it",
            )


def run_folder(job: Workload) -> Iterator[Finding]:
    """The checkpoints go with the pod."""
    kept = {
        mapping(one).get("name")
        for one in sequence(job.pod.get("volumes"))
        if not {"emptyDir", "configMap", "secret", "downwardAPI", "projected"} & set(mapping(one))
    }
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
            because = "a new pod finds no checkpoint; what was trained is gone"
            fix = "--run-dir in a mounted persistentVolumeClaim that all pods share"
            yield error(
                job.line(*path), "run-folder-in-pod", f"{folder} is on no lasting volume", because, fix
            )


RULES: tuple[Rule, ...] = (grace, restart_policy, shared_memory, liveness, secrets, shell, run_folder)
