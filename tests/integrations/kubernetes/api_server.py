"""An API server over HTTP that knows the published schemas and answers as a real one would.

Schemas: batch/v1 and v1 from kubernetes-validate (strict: an unknown field is an error), JobSet and Kubeflow
Trainer from kubeflow-trainer-api. What schemas do not say is in ``job_checks``. From a JobSet, or a TrainJob
and its runtime, the Job is made that their controllers would make, and that is checked, too.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.kubernetes.job_checks import job_problems

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


class ApiServer:
    """Serves until the block ends; what was made is in ``kept``, by resource and name."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict[str, Any]] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(*owner.get(self.path.partition("?")[0]))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._say(*owner.create(self.path.partition("?")[0], json.loads(body)))

            def _say(self, status: int, answer: dict[str, Any]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        parts = path.strip("/").split("/")
        versions = sorted({version for version, _ in RESOURCES})
        if path == "/version":
            return 200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [_group(version) for version in versions if "/" in version]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = "/".join(parts[1:])
        if version in versions:
            return 200, _resources(version)
        found = self.kept.get((parts[-2], parts[-1])) if len(parts) > 2 else None
        return (200, found) if found else _status(404, "NotFound", f"{path} not found")

    def create(self, path: str, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        resource = path.rstrip("/").rpartition("/")[2]
        if RESOURCES.get((content.get("apiVersion", ""), content.get("kind", ""))) != resource:
            return _status(400, "BadRequest", f"{content.get('apiVersion')} {content.get('kind')} at {path}")
        name = content["metadata"]["name"]
        if (resource, name) in self.kept:
            return _status(409, "AlreadyExists", f'{resource} "{name}" already exists')
        wrong = schema_problems(content)
        if not wrong:
            wrong = [
                line
                for job in jobs_of(content, self.kept)
                for line in (*schema_problems(job), *job_problems(job))
            ]
        if wrong:
            return _status(422, "Invalid", f'{content["kind"]} "{name}" is invalid: {"; ".join(wrong)}')
        self.kept[(resource, name)] = content
        return 201, content


def _group(version: str) -> dict[str, Any]:
    both = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [both], "preferredVersion": both}


def _resources(version: str) -> dict[str, Any]:
    found = [
        {
            "name": name,
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": ["create", "get"],
        }
        for (one, kind), name in RESOURCES.items()
        if one == version
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return code, {**answer, "message": message, "reason": reason, "code": code}
