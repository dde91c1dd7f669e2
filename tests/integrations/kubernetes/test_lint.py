"""Each mistake in a manifest is found in its line, and a file without mistakes is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.errors import ExitCode, UsageError
from outlast.integrations.findings import Level
from outlast.integrations.kubernetes import cli as kubernetes_cli
from outlast.integrations.kubernetes.lint import lint

pytest.importorskip("yaml", reason="PyYAML is not installed")

GOOD = """\
apiVersion: v1
kind: Service
metadata: {name: mesh}
spec:
  clusterIP: None
---
apiVersion: batch/v1
kind: Job
metadata: {name: gpt}
spec:
  parallelism: 4
  completions: 4
  completionMode: Indexed
  backoffLimitPerIndex: 6
  maxFailedIndexes: 2
  successPolicy:
    rules: [{succeededCount: 2}]
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes: {operator: In, values: [2, 65, 66, 74, 93]}
      - action: Ignore
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
  template:
    spec:
      subdomain: mesh
      restartPolicy: Never
      terminationGracePeriodSeconds: 180
      containers:
        - name: main
          image: r/gpt:1
          command: [outlast, run, --run-dir=/ckpt/gpt, train.py]
          env:
            - {name: NCCL_DEBUG, value: WARN}
          resources:
            limits: {memory: 900Gi, nvidia.com/gpu: 8}
          volumeMounts:
            - {name: shm, mountPath: /dev/shm}
            - {name: ckpt, mountPath: /ckpt}
      volumes:
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: 200Gi}
        - name: ckpt
          persistentVolumeClaim: {claimName: ckpt}
"""
SET_HEAD = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: gpt}
spec:
  network: {enableDNSHostnames: true}
  failurePolicy:
    maxRestarts: 3
    rules: [{name: a, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}]
  replicatedJobs:
    - name: node
      template:
"""
JOB = GOOD.partition("metadata: {name: gpt}\n")[2]
GOOD_SET = SET_HEAD + "".join(f"        {line}\n" for line in JOB.splitlines())
RUN = "[outlast, run, --run-dir=/ckpt/gpt, train.py]"

CASES = [
    ("      terminationGracePeriodSeconds: 180\n", "", 25, "short-grace"),
    ("Seconds: 180", "Seconds: 30", 28, "short-grace"),
    ("restartPolicy: Never", "restartPolicy: OnFailure", 27, "restart-policy"),
    ("      restartPolicy: Never\n", "", 25, "restart-policy"),
    ("{medium: Memory, sizeLimit: 200Gi}", "{}", 30, "no-shm"),
    ("            - {name: shm, mountPath: /dev/shm}\n", "", 30, "no-shm"),
    (", sizeLimit: 200Gi", "", 41, "shm-unbounded"),
    ("sizeLimit: 200Gi", "sizeLimit: 1Ti", 41, "shm-over-memory"),
    ("          env:", "          livenessProbe: {exec: {}}\n          env:", 33, "liveness-kills"),
    ("{name: NCCL_DEBUG, value: WARN}", "{name: HF_TOKEN, value: abc}", 34, "secret-in-env"),
    (RUN, '[bash, -c, "cd /w; outlast run --run-dir=/ckpt/a train.py"]', 32, "shell-between"),
    ("--run-dir=/ckpt/gpt", "--run-dir=/tmp/gpt", 30, "run-folder-in-pod"),
    ("--run-dir=/ckpt/gpt, ", "", 30, "run-folder-in-pod"),
    ("persistentVolumeClaim: {claimName: ckpt}", "emptyDir: {}", 30, "run-folder-in-pod"),
    ("backoffLimitPerIndex: 6", "backoffLimit: 0", 14, "no-retries"),
    ("backoffLimitPerIndex: 6", "backoffLimitPerIndex: 0", 14, "no-retries"),
    ("backoffLimitPerIndex: 6", "backoffLimit: 6", 14, "shared-retries"),
    ("  podFailurePolicy:", "  podFailurePolicyX:", 10, "no-failure-policy"),
    (", 93]", "]", 18, "exit-codes"),
    ("action: FailJob", "action: Count", 18, "exit-codes"),
    ("DisruptionTarget", "Ready", 18, "disruption"),
    ("      subdomain: mesh\n", "", 25, "no-service"),
    ("clusterIP: None", "type: ClusterIP", 26, "no-service"),
    ("completionMode: Indexed", "completionMode: NonIndexed", 13, "not-indexed"),
    ("parallelism: 4", "parallelism: 2", 11, "not-at-once"),
    ("  successPolicy:\n    rules: [{succeededCount: 2}]\n", "", 10, "no-success-policy"),
]
SET_CASES = [
    ("enableDNSHostnames: true", "enableDNSHostnames: false", 5, "no-service"),
    ("enableDNSHostnames: true", "publishNotReadyAddresses: false", 5, "no-service"),
    ("    maxRestarts: 3\n", "", 6, "no-retries"),
    ("action: FailJobSet", "action: RestartJobSet", 6, "exit-codes"),
    ("[PodFailurePolicy]", "[BackoffLimitExceeded]", 6, "exit-codes"),
    ("restartPolicy: Never", "restartPolicy: Always", 29, "restart-policy"),
]


def found(text: str) -> set[tuple[int, str]]:
    return {(one.line, one.rule) for one in lint(text)}


ONE_NODE = GOOD.replace("completions: 4", "completions: 1").replace("      subdomain: mesh\n", "")
SHELLS = ["outlast run --run-dir=/ckpt/a t.py", "cd /w; exec outlast run --run-dir=/ckpt/a t.py"]


@pytest.mark.parametrize(
    "text", [GOOD, GOOD_SET, ONE_NODE, *(GOOD.replace(RUN, f'[bash, -c, "{line}"]') for line in SHELLS)]
)
def test_nothing_is_found_in_a_good_file(text: str) -> None:
    assert lint(text) == []


@pytest.mark.parametrize(
    ("good", "old", "new", "line", "rule"),
    [*((GOOD, *one) for one in CASES), *((GOOD_SET, *one) for one in SET_CASES)],
)
def test_a_planted_mistake_is_found(good: str, old: str, new: str, line: int, rule: str) -> None:
    assert old in good
    assert found(good.replace(old, new)) == {(line, rule)}


def test_a_training_runtime_is_looked_into() -> None:
    head = "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainingRuntime\nmetadata: {name: a}\nspec:\n"
    inner = GOOD_SET.partition("spec:\n")[2]
    text = f"{head}  mlPolicy: {{numNodes: 4}}\n  template:\n    spec:\n"
    text += "".join(f"    {line}\n" for line in inner.splitlines())
    assert lint(text) == []
    line = text[: text.index("terminationGrace")].count("\n") + 1
    assert found(text.replace("Seconds: 180", "Seconds: 30")) == {(line, "short-grace")}


def test_what_a_trainjob_says_of_the_container_counts(capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--name=gpt", "--image=r/gpt:1", "--nnodes=2", "--claim=ckpt", "--shm=1Gi", "--kind=trainjob"]
    assert kubernetes_cli.main(["render", *needed, "--", "train.py"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert lint(text) == []
    moved = text.replace("--run-dir=/outlast", "--run-dir=/tmp")
    assert {rule for _, rule in found(moved)} == {"run-folder-in-pod"}


def test_a_longer_save_needs_a_longer_grace_period() -> None:
    assert [one.rule for one in lint(GOOD, save_seconds=200)] == ["short-grace"]


def test_a_json_manifest_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"kind": "Job", "spec": {"backoffLimit": 0, "template": {"spec": {}}}}))
    assert kubernetes_cli.main(["lint", "--json", str(path)]) == ExitCode.FAILED
    rules = [json.loads(line)["rule"] for line in capsys.readouterr().out.splitlines()]
    assert {"no-retries", "short-grace", "restart-policy", "no-failure-policy"} == set(rules)


def test_a_warning_is_an_error_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD.replace(", sizeLimit: 200Gi", ""))
    assert {one.level for one in lint(path.read_text())} == {Level.WARNING}
    assert kubernetes_cli.main(["lint", str(path)]) == ExitCode.OK
    assert kubernetes_cli.main(["lint", "--strict", str(path)]) == ExitCode.FAILED


@pytest.mark.parametrize(
    ("text", "named"), [("a: [", "YAML"), ("kind: Deployment", "Deployment"), ("", r"\[\]"), ("- 1", "''")]
)
def test_a_file_without_a_job_is_refused(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        lint(text)


@pytest.mark.parametrize(
    "text", ["kind: Job", "kind: Job\nspec: 1", "kind: JobSet\nspec: {replicatedJobs: [1]}"]
)
def test_a_job_without_content_breaks_nothing(text: str) -> None:
    assert Level.ERROR in {one.level for one in lint(text)}
