"""What ``outlast k8s render`` writes is what the published schemas and Kubernetes' own checks take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
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
from tests.integrations.kubernetes.refused import problems

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


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_the_api_server_takes_it_and_our_own_lint_finds_nothing(
    capsys: pytest.CaptureFixture[str], kind: str, options: list[str]
) -> None:
    text = rendered(capsys, f"--kind={kind}", *options)
    assert problems(objects(text)) == []
    assert [one.rule for one in lint(text, save_seconds=60)] == ["no-retries"] * (
        "--max-requeues=0" in options
    )


PLANTED = [
    ("restartPolicy: Never", "restartPolicy: OnFailure", "only Never is supported"),
    ("maxFailedIndexes: 2", "maxFailedIndexes: 9", "less than or equal to completions"),
    ("- 93", "- 7", "must be ordered"),
    ("startupProbe", "startUpProbe", "startUpProbe"),
    ("maxRestarts: 3", 'maxRestarts: "3"', "is not of type 'integer'"),
    ("mountPath: /outlast", "mountPath: /dev/shm", "mountPath: must be unique"),
]


@pytest.mark.parametrize(("old", "new", "why"), PLANTED)
def test_the_api_server_would_refuse_a_mistake(
    capsys: pytest.CaptureFixture[str], old: str, new: str, why: str
) -> None:
    text = rendered(capsys, "--gpus=8")
    assert old in text
    assert why in " ".join(problems(objects(text.replace(old, new))))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_kubectl_reads_it_as_we_do(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    text = rendered(capsys, f"--kind={kind}", "--gpus=8")
    command = ["kubectl", "label", "--local", "--kubeconfig", "/dev/null", "-o", "json", "-f", "-", "read=1"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads("[" + done.stdout.replace("}\n{", "}, {") + "]")
    wanted = objects(text)
    for one in wanted:
        one["metadata"].setdefault("labels", {})["read"] = "1"
    assert found == wanted


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
    (f"--name={'a' * 60}", "63"),
    ("--namespace=a.b", "--namespace=a.b"),
    ("--shm=lots", "--shm=lots"),
    ("--memory=100Gi", "--shm=200Gi"),
    ("--cpus=many", "--cpus=many"),
    ("--gpus=-1", "--gpus=-1"),
    ("--user=0", "--user=0"),
    ("--run-dir=/tmp/run", "--run-dir=/tmp/run"),
    ("--claim-path=here", "--claim-path=here"),
    ("--claim=A B", "--claim=A B"),
    ("--token-secret=A", "--token-secret=A"),
    ("--env=HF_TOKEN=abc", "HF_TOKEN"),
    ("--env=OUTLAST_NODE=x", "OUTLAST_NODE"),
    ("--env=PET_NNODES=x", "PET_NNODES"),
    ("--env=X", "--env=X"),
    ("--label=a b=c", "--label=a b=c"),
    ("--node-selector=a=b c", "--node-selector=a=b c"),
    ("--failure-domain=Zone=x", "--failure-domain=Zone=x"),
    ("--max-requeues=-1", "--max-requeues"),
    ("--image=a b", "--image=a b"),
]


OWN_WORDS = ["--nnodes=2", "--node_rank=1", "--rdzv-end=x", "--no-such", "--max-restarts=x"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *(([option, *SCRIPT], named) for option, named in WRONG),
        *((["--", option, "train.py"], option.partition("=")[0].replace("_", "-")) for option in OWN_WORDS),
        (["--", "--nproc-per-node=gpu", "train.py"], "--gpus"),
        ([], "train.py"),
    ],
)
def test_what_cannot_take_effect_is_an_error(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        kubernetes_cli.main(["render", *NEEDED, *words])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ODD = ["yes", "No", "1e3", "0x1", "1_0", "2026-01-01", "a: b", "- a", "a #b", "12:30:45", "~", "=", "<<"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_what_is_emitted_is_read_back(value: dict[str, Any]) -> None:
    pytest.importorskip("yaml")
    assert [one.content for one in read(emit(value))] == [value]
