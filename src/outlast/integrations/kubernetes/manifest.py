"""The manifests that ``outlast k8s render`` writes: from a training job to objects, nothing else.

Sources: batch/v1 Job at Kubernetes 1.33, where per-index limits and the success policy are stable;
jobset.x-k8s.io/v1alpha2; trainer.kubeflow.org/v1alpha1.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from outlast.errors import ExitCode, UsageError
from outlast.integrations.kubernetes.documents import emit
from outlast.integrations.kubernetes.job import TOKEN_FOLDER, TrainingJob, problems

FINAL: tuple[int, ...] = (
    ExitCode.USAGE,
    ExitCode.CHECKPOINT_REFUSED,
    ExitCode.SCRIPT_NOT_FOUND,
    ExitCode.SAVE_FAILED,
    ExitCode.DO_NOT_REQUEUE,
)
OF_ONE_NODE: tuple[int, ...] = (ExitCode.NODE_UNFIT, ExitCode.RUN_FOLDER_UNUSABLE)
_STARTED = "ls -d /dev/shm/outlast-*-*"  # the agent's runtime folder
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"


class Kind(Enum):
    """What is written."""

    JOBSET = "jobset"
    TRAINJOB = "trainjob"


def render(job: TrainingJob, kind: Kind) -> str:
    """Return the file.

    Raises:
        UsageError: it would be wrong; names everything that is.
    """
    header = (
        "# Written by outlast k8s render. One pod a node; all run the same command.\n"
        f"# Needs the Secret {job.storage.token_secret} (key: token) and the claim {job.storage.claim}.\n"
    )
    return header + "---\n".join(emit(one) for one in objects(job, kind))


def objects(job: TrainingJob, kind: Kind) -> list[dict[str, Any]]:
    """Return the objects of the file, in the order in which they are made.

    Raises:
        UsageError: they would be wrong; names everything that is.
    """
    wrong = problems(job)
    if wrong:
        raise UsageError("\n".join(["the manifest would be wrong; nothing was written", *wrong]))
    return [_jobset(job)] if kind is Kind.JOBSET else [_runtime(job), _trainjob(job)]


def _metadata(job: TrainingJob, **labels: str) -> dict[str, Any]:
    found = {**labels, **dict(job.pods.labels)}
    return {
        "name": job.name,
        **({"namespace": job.namespace} if job.namespace else {}),
        **({"labels": found} if found else {}),
    }


def _jobset(job: TrainingJob) -> dict[str, Any]:
    size = {"parallelism": job.size, "completions": job.size}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": _set_spec(job, {"spec": {**size, **_job_spec(job, _container(job, job.words))}}),
    }


def _trainjob(job: TrainingJob) -> dict[str, Any]:
    trainer = {
        "image": job.pods.image,
        "numNodes": job.size,
        "command": list(job.words[:1]),
        "args": list(job.words[1:]),
        **_resources("resourcesPerNode", job),
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }


def _runtime(job: TrainingJob) -> dict[str, Any]:
    """Return the runtime without a ``torch`` policy, whose PET_* variables would contradict the options."""
    template = {"metadata": {"labels": {_STEP_LABEL: "trainer"}}, "spec": _job_spec(job, _container(job, ()))}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, **{"trainer.kubeflow.org/framework": "torch"}),
        "spec": {"mlPolicy": {"numNodes": job.size}, "template": {"spec": _set_spec(job, template)}},
    }


def _set_spec(job: TrainingJob, template: Mapping[str, Any]) -> dict[str, Any]:
    final = {"name": "doNotRequeue", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {"maxRestarts": job.limits.requeues, "rules": [final]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": dict(template)}],
    }


def _job_spec(job: TrainingJob, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return how pods are counted: a place that fails is one node less, and MIN that finish are the job."""
    return {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": job.limits.node_restarts,
        "maxFailedIndexes": job.size - job.nodes[0],
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededCount": job.nodes[0]}]},
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/instance": job.name}},
            "spec": _pod_spec(job, container),
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    def codes(action: str, values: tuple[int, ...]) -> dict[str, Any]:
        wanted = {"containerName": "node", "operator": "In", "values": sorted(int(code) for code in values)}
        return {"action": action, "onExitCodes": wanted}

    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [codes("FailJob", FINAL), disrupted, codes("FailIndex", OF_ONE_NODE)]


def _pod_spec(job: TrainingJob, container: Mapping[str, Any]) -> dict[str, Any]:
    pods = job.pods
    user = (
        {}
        if pods.user is None
        else {"runAsNonRoot": True, "runAsUser": pods.user, "runAsGroup": pods.user, "fsGroup": pods.user}
    )
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": job.name}},
    }
    tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    secret = {
        "secretName": job.storage.token_secret,
        "defaultMode": 0o400,
        "items": [{"key": "token", "path": "token"}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.lead),
        "automountServiceAccountToken": False,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        **({"nodeSelector": dict(pods.node_selector)} if pods.node_selector else {}),
        **({"tolerations": [tolerated]} if pods.gpus else {}),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [dict(container)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shm}},
            {"name": "run", "persistentVolumeClaim": {"claimName": job.storage.claim}},
            {"name": "token", "secret": secret},
        ],
    }


def _container(job: TrainingJob, words: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": "node",
        "image": job.pods.image,
        **({"command": list(words[:1]), "args": list(words[1:])} if words else {}),
        "env": _env(job),
        **_resources("resources", job),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "startupProbe": {
            "exec": {"command": ["sh", "-c", _STARTED]},
            **{"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 60},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "run", "mountPath": job.storage.path},
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
        ],
    }


def _env(job: TrainingJob) -> list[dict[str, Any]]:
    def field_of(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    found = [field_of("OUTLAST_NODE", "spec.nodeName")]
    domains = []
    for kind, label in job.pods.domains:
        variable = f"DOMAIN_{kind.upper().replace('-', '_')}"
        found.append(field_of(variable, f"metadata.labels['{label}']"))
        domains.append(f"{kind}=$({variable})")
    if domains:
        found.append({"name": "OUTLAST_FAILURE_DOMAINS", "value": ",".join(domains)})
    found += [{"name": name, "value": value.replace("$(", "$$(")} for name, value in job.pods.env]
    return found


def _resources(key: str, job: TrainingJob) -> dict[str, Any]:
    asked = {
        **({"cpu": job.pods.cpus} if job.pods.cpus else {}),
        **({"memory": job.pods.memory} if job.pods.memory else {}),
        **({"nvidia.com/gpu": str(job.pods.gpus)} if job.pods.gpus else {}),
    }
    limits = {name: amount for name, amount in asked.items() if name != "cpu"}
    both = {**({"limits": limits} if limits else {}), **({"requests": asked} if asked else {})}
    return {key: both} if both else {}
