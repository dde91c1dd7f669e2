"""What an API server that knows the published schemas would refuse.

Schemas: batch/v1 and v1 from kubernetes-validate (strict: an unknown field is an error), JobSet and Kubeflow
Trainer from kubeflow-trainer-api. From a JobSet, or a TrainJob and its runtime, the Job is made that their
controllers would make, and that is checked, too, also for what schemas do not say: pkg/apis/batch/validation
and pkg/apis/core/validation, at 1.33, as far as manifests of a training need it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)
trainer_api = pytest.importorskip("kubeflow_trainer_api", reason="kubeflow-trainer-api is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

FOLDER = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
TRAINER, JOBSET = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
RESOURCES = {
    ("v1", "Secret"): "secrets",
    ("v1", "Service"): "services",
    ("batch/v1", "Job"): "jobs",
    (JOBSET, "JobSet"): "jobsets",
    (TRAINER, "TrainJob"): "trainjobs",
    (TRAINER, "TrainingRuntime"): "trainingruntimes",
}
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
QUANTITY = {"anyOf": [{"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|[KMGTP]i?)?$"}, {"type": "number"}]}
OWN_SCHEMAS = {
    "IoK8sApimachineryPkgApiResourceQuantity": QUANTITY,
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["integer", "string"]},
}


@cache
def schema(kind: str) -> dict[str, Any]:
    """Return the published schema of a kind; an unknown field is an error in all of them."""
    if kind not in MODELS:
        name = f"{kind.lower()}-batch-v1.json" if kind == "Job" else f"{kind.lower()}-v1.json"
        loaded: dict[str, Any] = json.loads((FOLDER / name).read_text())
        return loaded
    from kubeflow_trainer_api import models

    found: dict[str, Any] = getattr(models, MODELS[kind]).model_json_schema(by_alias=True)
    found["$defs"].update(OWN_SCHEMAS)
    for one in (found, *found["$defs"].values()):
        if "properties" in one:
            one["additionalProperties"] = False
            one["properties"] = {name: _not_null(value) for name, value in one["properties"].items()}
    return found


def _not_null(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional field without the null that the models add to it."""
    others = [one for one in wanted.get("anyOf", ()) if one != {"type": "null"}]
    return others[0] if len(others) == 1 else wanted


@cache
def definitions() -> Any:
    """Return what the schemas of Kubernetes' own kinds refer to."""
    from referencing import Registry, Resource

    return Registry().with_resource(
        "/api/_definitions.json",
        Resource.from_contents(json.loads((FOLDER / "_definitions.json").read_text())),
    )


def schema_problems(content: dict[str, Any]) -> list[str]:
    wanted = schema(content["kind"])
    checker = jsonschema.validators.validator_for(wanted)(wanted, registry=definitions())
    return [f"{one.json_path}: {one.message[:300]}" for one in checker.iter_errors(content)]


def jobs_of(content: dict[str, Any], kept: dict[tuple[str, str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the Jobs that the controllers of an object would make."""
    kind, name = content["kind"], content["metadata"]["name"]
    if kind == "Job":
        yield content
    elif kind == "JobSet":
        for one in content["spec"]["replicatedJobs"]:
            spec = copy.deepcopy(one["template"]["spec"])
            spec.setdefault("completionMode", "Indexed")
            pod = spec["template"]["spec"]
            pod.setdefault("subdomain", name)
            metadata = {"name": f"{name}-{one['name']}-0"}
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    elif kind == "TrainJob":
        runtime = kept[("trainingruntimes", content["spec"]["runtimeRef"]["name"])]
        spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
        trainer = content["spec"]["trainer"]
        job = spec["replicatedJobs"][0]["template"]["spec"]
        job["completions"] = job["parallelism"] = trainer["numNodes"]
        container = next(one for one in job["template"]["spec"]["containers"] if one["name"] == "node")
        container.update({key: trainer[key] for key in ("image", "command", "args")})
        if "resourcesPerNode" in trainer:
            container["resources"] = trainer["resourcesPerNode"]
        yield from jobs_of({"kind": "JobSet", "metadata": content["metadata"], "spec": spec}, kept)


def problems(contents: list[dict[str, Any]]) -> list[str]:
    """Return what an API server would refuse in the objects of a file, in their order."""
    kept = {(RESOURCES[one["apiVersion"], one["kind"]], one["metadata"]["name"]): one for one in contents}
    wrong = [line for one in contents for line in schema_problems(one)]
    jobs = [] if wrong else [job for one in contents for job in jobs_of(one, kept)]
    return wrong + [line for job in jobs for line in (*schema_problems(job), *job_problems(job))]


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
