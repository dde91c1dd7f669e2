"""What ``outlast k8s render`` writes is what the published schemas and Kubernetes' own checks take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ExitCode, UsageError
from outlast.integrations.kubernetes import cli as kubernetes_cli
from outlast.integrations.kubernetes.documents import emit, read
from outlast.integrations.kubernetes.lint import lint
from outlast.integrations.kubernetes.manifest import FINAL, OF_ONE_NODE
from outlast.launcher import runtime
from tests.integrations.kubernetes.api_server import RESOURCES, ApiServer

NEEDED = ["--name=gpt", "--image=r/gpt:1", "--nnodes=2:4", "--claim=ckpt", "--shm=200Gi"]
SCRIPT = ["--", "train.py", "--lr", "1e-3"]
OPTIONS = [
    [],
    ["--nnodes=1"],
    ["--spares=2", "--gpus=8", "--lead=300", "--namespace=team"],
    ["--memory=900Gi", "--cpus=64", "--user=1000", "--env=NCCL_DEBUG=WARN"],
    ["--node-selector=gpu.product=H100", "--label=kueue.x-k8s.io/queue-name=a", "--max-requeues=0"],
    ["--failure-domain=zone=topology.kubernetes.io/zone", "--failure-domain=rack=example.org/rack"],
    ["--token-secret=t", "--claim-path=/mnt/c", "--run-dir=/mnt/c/runs/a", "--port=2950"],
]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as started:
        yield started


def rendered(capsys: pytest.CaptureFixture[str], *options: str, script: list[str] = SCRIPT) -> str:
    assert kubernetes_cli.main(["render", *NEEDED, *options, *script]) == ExitCode.OK
    return capsys.readouterr().out


def objects(text: str) -> list[dict[str, Any]]:
    return [one.content for one in read(text)]


def job_of(text: str) -> dict[str, Any]:
    content = next(one for one in objects(text) if one["kind"] in ("JobSet", "TrainingRuntime"))
    spec = content["spec"] if content["kind"] == "JobSet" else content["spec"]["template"]["spec"]
    found: dict[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]
    return found


def post(server: ApiServer, content: dict[str, Any]) -> tuple[int, str]:
    version = content["apiVersion"]
    prefix = "api" if version == "v1" else "apis"
    resource = RESOURCES[(version, content["kind"])]
    url = f"{server.url}/{prefix}/{version}/namespaces/default/{resource}"
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_the_api_server_takes_it(
    server: ApiServer, capsys: pytest.CaptureFixture[str], kind: str, options: list[str]
) -> None:
    server.kept.clear()
    for content in objects(rendered(capsys, f"--kind={kind}", *options)):
        assert post(server, content) == (201, json.dumps(content))
        assert post(server, content)[0] == 409


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_our_own_lint_finds_nothing(
    capsys: pytest.CaptureFixture[str], kind: str, options: list[str]
) -> None:
    found = lint(rendered(capsys, f"--kind={kind}", *options), save_seconds=60)
    assert [one for one in found if not ("--max-requeues=0" in options and "maxRestarts" in one.what)] == []


PLANTED = [
    ("restartPolicy: Never", "restartPolicy: OnFailure", "only Never is supported"),
    ("backoffLimitPerIndex: 6", "backoffLimit: 6", "required when maxFailedIndexes"),
    ("completionMode: Indexed", "completionMode: NonIndexed", "requires indexed"),
    ("maxFailedIndexes: 2", "maxFailedIndexes: 9", "less than or equal to completions"),
    ("- 93", "- 7", "must be ordered"),
    ("containerName: node", "containerName: main", "there is no main"),
    ("terminationGracePeriodSeconds", "terminationGracePeriod", "terminationGracePeriod"),
    ("startupProbe", "startUpProbe", "startUpProbe"),
    ("maxRestarts: 3", 'maxRestarts: "3"', "is not of type 'integer'"),
    ("mountPath: /outlast", "mountPath: /dev/shm", "mountPath: must be unique"),
    ("sizeLimit", "size", "size"),
    (
        'nvidia.com/gpu: "8"\n              securityContext',
        'nvidia.com/gpu: "4"\n              securityContext',
        "overcommitted",
    ),
]


@pytest.mark.parametrize(("old", "new", "why"), PLANTED)
def test_the_api_server_would_refuse_a_mistake(
    server: ApiServer, capsys: pytest.CaptureFixture[str], old: str, new: str, why: str
) -> None:
    server.kept.clear()
    text = rendered(capsys, "--gpus=8")
    assert old in text
    status, answer = post(server, objects(text.replace(old, new))[0])
    assert (status, why in answer) == (422, True), answer


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_kubectl_creates_it(
    server: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    server.kept.clear()
    text = rendered(capsys, f"--kind={kind}", "--gpus=8")
    command = ["kubectl", "--server", server.url, "--kubeconfig", "/dev/null", "--cache-dir", str(tmp_path)]

    def create() -> subprocess.CompletedProcess[str]:
        words = [*command, "create", "--validate=false", "-f", "-"]
        return subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)

    first = create()
    assert (first.returncode, first.stdout.count("created")) == (0, len(objects(text))), first.stderr
    again = create()
    assert (again.returncode, "already exists" in again.stderr) == (1, True)


def test_every_exit_code_has_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    first, disrupted, one_node = job_of(rendered(capsys))["podFailurePolicy"]["rules"]
    assert (first["action"], tuple(first["onExitCodes"]["values"])) == ("FailJob", tuple(map(int, FINAL)))
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (one_node["action"], tuple(one_node["onExitCodes"]["values"])) == ("FailIndex", OF_ONE_NODE)
    counted = {ExitCode.FAILED, ExitCode.RUN_FOLDER_BUSY, ExitCode.STALE_GENERATION, ExitCode.SIGNAL_BASE}
    counted.add(ExitCode.PREEMPTED)  # what Kubernetes took away it starts again
    assert {ExitCode.OK, *FINAL, *OF_ONE_NODE, *counted} == set(ExitCode)


def test_a_job_may_lose_nodes_down_to_the_fewest(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(rendered(capsys, "--spares=1"))
    assert (job["completions"], job["parallelism"], job["maxFailedIndexes"]) == (5, 5, 3)
    assert job["successPolicy"] == {"rules": [{"succeededCount": 2}]}


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_all_pods_run_one_command(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    made = objects(rendered(capsys, f"--kind={kind}", "--gpus=8", "--spares=1"))
    container = (
        made[1]["spec"]["trainer"]
        if kind == "trainjob"
        else made[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    )
    assert [*container["command"], *container["args"]] == [
        *("outlast", "run", "--nnodes=2:4", "--spares=1", "--nproc-per-node=8", "--rdzv-id=gpt"),
        *("--rdzv-endpoint=gpt-node-0-0.gpt:29500", "--node-rank=$(JOB_COMPLETION_INDEX)"),
        *("--token-file=/var/run/secrets/outlast/token", "--run-dir=/outlast/gpt"),
        *("--ft-workers-stop-timeout=90", "train.py", "--lr", "1e-3"),
    ]


def test_what_the_user_named_is_not_overruled(capsys: pytest.CaptureFixture[str]) -> None:
    script = ["--", "--nproc-per-node=4", "--shutdown-timeout=20", "train.py", "$(date)"]
    text = rendered(capsys, "--gpus=8", script=script)
    assert "--nproc-per-node=8" not in text
    assert "--ft-workers-stop-timeout" not in text
    assert "$$(date)" in text


def test_the_token_is_a_file_of_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    pod = job_of(rendered(capsys))["template"]["spec"]
    volume = next(one for one in pod["volumes"] if one["name"] == "token")
    assert (volume["secret"]["secretName"], volume["secret"]["defaultMode"]) == ("gpt-token", 0o400)
    assert not [one for one in pod["containers"][0]["env"] if "TOKEN" in one["name"]]


def test_the_startup_probe_looks_for_the_agents_runtime_folder(capsys: pytest.CaptureFixture[str]) -> None:
    container = job_of(rendered(capsys))["template"]["spec"]["containers"][0]
    assert "livenessProbe" not in container
    pattern = container["startupProbe"]["exec"]["command"][-1].removeprefix("ls -d ")
    folder = runtime.make()
    folder.rmdir()
    assert (str(folder.parent), fnmatch(str(folder), pattern)) == ("/dev/shm", True)


def test_failure_domains_are_read_from_the_pod(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, "--failure-domain=zone=topology.kubernetes.io/zone")
    env = {one["name"]: one for one in job_of(text)["template"]["spec"]["containers"][0]["env"]}
    label = {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    assert env["DOMAIN_ZONE"]["valueFrom"] == label
    assert env["OUTLAST_FAILURE_DOMAINS"]["value"] == "zone=$(DOMAIN_ZONE)"
    assert list(env).index("DOMAIN_ZONE") < list(env).index("OUTLAST_FAILURE_DOMAINS")


WRONG = [
    ("--nnodes=4:2", "--nnodes=4:2"),
    ("--nnodes=0", "--nnodes=0"),
    ("--spares=-1", "--spares=-1"),
    ("--lead=30", "--lead=30"),
    ("--lead=90.5", "--lead=90.5"),
    ("--port=80", "--port=80"),
    ("--name=GPT", "--name=GPT"),
    (f"--name={'a' * 60}", "63 are allowed"),
    ("--namespace=a.b", "--namespace=a.b"),
    ("--shm=lots", "--shm=lots"),
    ("--memory=100Gi", "counts as the container's memory"),
    ("--cpus=many", "--cpus=many"),
    ("--gpus=-1", "--gpus=-1"),
    ("--user=0", "--user=0"),
    ("--run-dir=/tmp/run", "would go with the pod"),
    ("--claim-path=here", "expected an absolute path"),
    ("--claim=A B", "--claim=A B"),
    ("--token-secret=A", "--token-secret=A"),
    ("--env=HF_TOKEN=abc", "a secret in its manifest"),
    ("--env=OUTLAST_NODE=x", "outlast's own"),
    ("--env=PET_NNODES=x", "outlast's own"),
    ("--env=X", "expected NAME=VALUE"),
    ("--label=a b=c", "expected a label"),
    ("--node-selector=a=b c", "expected a label"),
    ("--failure-domain=Zone=x", "expected KIND=LABEL"),
    ("--max-requeues=-1", "expected 0 or more"),
    ("--image=a b", "expected the name of an image"),
]


@pytest.mark.parametrize(("option", "why"), WRONG)
def test_an_option_that_cannot_take_effect_is_an_error(option: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        kubernetes_cli.main(["render", *NEEDED, option, *SCRIPT])


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], "nothing to run"),
        (["--", "--nnodes=2", "train.py"], "it cannot be given twice"),
        (["--", "--node_rank=1", "train.py"], "it cannot be given twice"),
        (["--", "--rdzv-end=x", "train.py"], "it cannot be given twice"),
        (["--", "--no-such", "train.py"], "unknown option"),
        (["--", "--max-restarts=x", "train.py"], "expected a whole number"),
        (["--", "--nproc-per-node=gpu", "train.py"], "give --gpus"),
    ],
)
def test_a_wrong_command_line_is_an_error(command: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        kubernetes_cli.main(["render", *NEEDED, *command])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    TEXTS,
    st.sampled_from(
        ["yes", "No", "1e3", "0x1", "1_0", "2026-01-01", "a: b", "- a", "a #b", "12:30:45", "~", "=", "<<"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_what_is_emitted_is_read_back(value: dict[str, Any]) -> None:
    pytest.importorskip("yaml")
    assert [one.content for one in read(emit(value))] == [value]
