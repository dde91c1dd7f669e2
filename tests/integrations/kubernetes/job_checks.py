"""What Kubernetes checks of a Job beyond its schema, as far as manifests of a training need it.

Sources: pkg/apis/batch/validation/validation.go and pkg/apis/core/validation/validation.go, at 1.33.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def job_problems(job: dict[str, Any]) -> list[str]:
    spec = job["spec"]
    return [*_names(job), *_counts(spec), *_policy(spec), *_pod(spec["template"])]


def _names(job: dict[str, Any]) -> Iterator[str]:
    name, completions = job["metadata"]["name"], job["spec"].get("completions", 1)
    if not LABEL.fullmatch(name) or len(f"{name}-{completions - 1}") > 63:
        yield f"metadata.name: {name}: pods could not have it as their host name"


def _counts(spec: dict[str, Any]) -> Iterator[str]:
    indexed = spec.get("completionMode") == "Indexed"
    for name in ("backoffLimitPerIndex", "maxFailedIndexes", "successPolicy"):
        if name in spec and not indexed:
            yield f"spec.{name}: requires indexed completion mode"
    if indexed and "completions" not in spec:
        yield "spec.completions: when completion mode is Indexed, completions must be specified"
    if "maxFailedIndexes" in spec:
        if "backoffLimitPerIndex" not in spec:
            yield "spec.backoffLimitPerIndex: required when maxFailedIndexes is specified"
        if spec["maxFailedIndexes"] > spec.get("completions", 0):
            yield "spec.maxFailedIndexes: must be less than or equal to completions"
    yield from _amounts(spec)


def _amounts(spec: dict[str, Any]) -> Iterator[str]:
    for rule in spec.get("successPolicy", {}).get("rules", ()):
        if not 1 <= rule.get("succeededCount", 1) <= spec.get("completions", 0):
            yield "spec.successPolicy.rules.succeededCount: must be between 1 and completions"
    for name in ("parallelism", "completions", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"):
        if spec.get(name, 0) < 0:
            yield f"spec.{name}: must be greater than or equal to 0"


def _policy(spec: dict[str, Any]) -> Iterator[str]:
    policy = spec.get("podFailurePolicy")
    if policy is None:
        return
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") != "Never":
        yield "spec.template.spec.restartPolicy: only Never is supported when podFailurePolicy is specified"
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield "spec.podReplacementPolicy: only Failed is supported when podFailurePolicy is specified"
    if not 0 < len(policy["rules"]) <= 20:
        yield "spec.podFailurePolicy.rules: between 1 and 20"
    for rule in policy["rules"]:
        if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield f"spec.podFailurePolicy.rules.action: unsupported value {rule['action']}"
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
            yield "spec.podFailurePolicy.rules.action: FailIndex requires backoffLimitPerIndex"
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "spec.podFailurePolicy.rules: one of onExitCodes and onPodConditions"
        yield from _exit_codes(rule.get("onExitCodes"), [one["name"] for one in pod["containers"]])


def _exit_codes(wanted: dict[str, Any] | None, containers: list[str]) -> Iterator[str]:
    if wanted is None:
        return
    values = wanted["values"]
    if values != sorted(set(values)) or not 0 < len(values) <= 255:
        yield "onExitCodes.values: must be ordered and unique, at most 255"
    if wanted["operator"] == "In" and 0 in values:
        yield "onExitCodes.values: must not be 0 for the In operator"
    if wanted.get("containerName") not in (None, *containers):
        yield f"onExitCodes.containerName: there is no {wanted['containerName']}"


def _pod(template: dict[str, Any]) -> Iterator[str]:
    pod = template["spec"]
    volumes = [one["name"] for one in pod.get("volumes", ())]
    if len(set(volumes)) != len(volumes):
        yield "volumes: names must be unique"
    for container in pod["containers"]:
        mounts = container.get("volumeMounts", ())
        paths = [one["mountPath"] for one in mounts]
        yield from (
            f"volumeMounts.name: not found: {one['name']}" for one in mounts if one["name"] not in volumes
        )
        if len(set(paths)) != len(paths):
            yield "volumeMounts.mountPath: must be unique"
        yield from _resources(container.get("resources", {}))
        if container.get("securityContext", {}).get("privileged"):
            yield "securityContext.privileged: not in this cluster"
        if not container.get("image"):
            yield "containers.image: required"
        for probe in ("livenessProbe", "startupProbe"):
            if container.get(probe, {}).get("successThreshold", 1) != 1:
                yield f"{probe}.successThreshold: must be 1"


def _resources(resources: dict[str, Any]) -> Iterator[str]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for name in {*limits, *requests}:
        if "/" in name and (name not in limits or requests.get(name, limits[name]) != limits[name]):
            yield f"resources.{name}: must be equal in limits and requests; it cannot be overcommitted"
