"""What ``outlast k8s render`` is told, and what of it cannot be: nothing is written yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outlast.errors import UsageError
from outlast.integrations.agent_command import (
    FLUSH,
    SHORTEST_LEAD,
    given_twice,
    option_names,
    with_stop_timeout,
)

LEAD = (
    120.0  # seconds; the notice of a spot machine at the shortest of the large providers' that give minutes
)
PORT = 29500  # torchrun's
TOKEN_FOLDER = "/var/run/secrets/outlast"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True)
class Pods:
    """What each pod gets.

    Args:
        gpus: of each pod; 0: none.
        shm: size of the memory at /dev/shm, as ``200Gi``.
        memory, cpus: of the container; "": not said.
        user: number of the user that the container runs as; None: the image's.
        env: further variables, in order.
        node_selector: labels that a node must have.
        domains: kinds of failure domains, each with the pod's label that names it.
        labels: further labels of what is made.
    """

    image: str
    shm: str
    gpus: int = 0
    memory: str = ""
    cpus: str = ""
    user: int | None = None
    env: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    domains: tuple[tuple[str, str], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Storage:
    """What outlives a pod, and what it must not be without.

    Args:
        claim: the persistent volume claim that all pods share.
        path: where it is mounted.
        run_dir: the run folder in it.
        token_secret: the Secret whose key ``token`` is what agents know each other by.
    """

    claim: str
    path: str
    run_dir: str
    token_secret: str


@dataclass(frozen=True)
class Limits:
    """How often Kubernetes may start what ended.

    Args:
        node_restarts: pods that may fail in a row at one place of the job before the place stays empty.
        requeues: new starts of the whole job.
    """

    node_restarts: int = 6  # Kubernetes' own default of backoffLimit
    requeues: int = 3  # NVRx's max_no_progress_cycles


@dataclass(frozen=True)
class TrainingJob:
    """One training job under Kubernetes.

    Args:
        nodes: fewest and most nodes that train.
        spares: nodes beside them that wait.
        lead: seconds from SIGTERM to SIGKILL.
        command: the user's part of ``outlast run``'s command line.
        script_at: where the script stands in it.
        port: of the endpoint.
    """

    name: str
    pods: Pods
    storage: Storage
    nodes: tuple[int, int]
    command: tuple[str, ...]
    script_at: int
    spares: int = 0
    lead: float = LEAD
    namespace: str = ""
    port: int = PORT
    limits: Limits = field(default_factory=Limits)

    @property
    def size(self) -> int:
        """The number of pods."""
        return self.nodes[1] + self.spares

    @property
    def endpoint(self) -> str:
        """The name of pod 0, which JobSet's headless service gives it, and the port."""
        return f"{self.name}-node-0-0.{self.name}:{self.port}"

    @property
    def words(self) -> tuple[str, ...]:
        """The command line of every pod: the same, but for the index that Kubernetes fills in."""
        least, most = self.nodes
        user = with_stop_timeout(self.command, self.script_at, self.lead)
        return (
            *("outlast", "run", f"--nnodes={least}:{most}", f"--spares={self.spares}"),
            *((f"--nproc-per-node={self.pods.gpus}",) if self._ranks_follow_gpus() else ()),
            *(f"--rdzv-id={self.name}", f"--rdzv-endpoint={self.endpoint}"),
            *("--node-rank=$(JOB_COMPLETION_INDEX)", f"--token-file={TOKEN_FOLDER}/token"),
            f"--run-dir={self.storage.run_dir}",
            *(word.replace("$(", "$$(") for word in user),
        )

    def _ranks_follow_gpus(self) -> bool:
        return self.pods.gpus > 0 and "--nproc-per-node" not in option_names(self.command[: self.script_at])


def pairs(option: str, given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return what stands on both sides of each ``=``.

    Raises:
        UsageError: one has none, or a name comes twice.
    """
    found: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name and equals) or name in found:
            raise UsageError(f"{option}={word}: expected NAME=VALUE, each name once; nothing was written")
        found[name] = value
    return tuple(found.items())


def size_of(quantity: str) -> float | None:
    """Return the bytes of one of Kubernetes' quantities, as ``200Gi``; None: it is none."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return None
    unit = match[2]
    factor = 1024.0 if unit.endswith("i") else 1000.0
    return float(match[1]) * float(factor ** _POWERS[unit.removesuffix("i")])


def is_secret(variable: str) -> bool:
    """Say whether a variable's name is that of a secret."""
    return bool(_SECRET.search(variable))


def problems(job: TrainingJob) -> list[str]:
    """Return what is wrong with it, one line each."""
    return [
        *_names(job),
        *_numbers(job),
        *_memory(job.pods),
        *_storage(job.storage),
        *_pods(job.pods),
        *_labels(job.pods),
        *_words(job),
    ]


def _names(job: TrainingJob) -> Iterator[str]:
    if not _LABEL.fullmatch(job.name):
        yield f"--name={job.name}: expected lower-case letters, digits and hyphens, a letter first"
    longest = len(f"{job.name}-node-0-{job.size - 1}-abcde")
    if longest > 63:
        yield f"--name={job.name}: the pods' names would have {longest} characters, 63 are allowed"
    if job.namespace and not _LABEL.fullmatch(job.namespace):
        yield f"--namespace={job.namespace}: expected lower-case letters, digits and hyphens"


def _numbers(job: TrainingJob) -> Iterator[str]:
    if job.spares < 0:
        yield f"--spares={job.spares}: expected 0 or more"
    if job.lead < SHORTEST_LEAD or job.lead != int(job.lead):
        yield (
            f"--lead={job.lead:g}: expected whole seconds, {SHORTEST_LEAD:.0f} or more; "
            f"{FLUSH:.0f} s of it are for what follows the ranks' end"
        )
    if not 1024 <= job.port <= 65535:
        yield f"--port={job.port}: expected 1024 to 65535"
    if job.limits.node_restarts < 0 or job.limits.requeues < 0:
        yield "--max-node-restarts and --max-requeues: expected 0 or more"


def _memory(pods: Pods) -> Iterator[str]:
    sizes = {"--shm": size_of(pods.shm), "--memory": size_of(pods.memory) if pods.memory else 0.0}
    for option, text in (("--shm", pods.shm), ("--memory", pods.memory)):
        size = sizes[option]
        if size is None or (text and size <= 0):
            yield f"{option}={text}: expected a size such as 200Gi"
    if pods.memory and (sizes["--shm"] or 0) >= (sizes["--memory"] or 0):
        yield (
            f"--shm={pods.shm}: what lies in /dev/shm counts as the container's memory, "
            f"of which there would be {pods.memory} (--memory)"
        )
    if pods.cpus and not re.fullmatch(r"[1-9]\d*|\d+m", pods.cpus):
        yield f"--cpus={pods.cpus}: expected a number, or thousandths as 500m"


def _storage(storage: Storage) -> Iterator[str]:
    for option, name in (("--claim", storage.claim), ("--token-secret", storage.token_secret)):
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) or len(name) > 253:
            yield f"{option}={name}: expected lower-case letters, digits, hyphens and dots"
    if not storage.path.startswith("/") or storage.path.rstrip("/") in ("", "/dev/shm"):
        yield f"--claim-path={storage.path}: expected an absolute path"
    if not f"{storage.run_dir}/".startswith(f"{storage.path.rstrip('/')}/"):
        yield (
            f"--run-dir={storage.run_dir}: not in {storage.path}, where the claim is mounted; "
            "its checkpoints would go with the pod"
        )


def _pods(pods: Pods) -> Iterator[str]:
    if not pods.image or re.search(r"\s", pods.image):
        yield f"--image={pods.image}: expected the name of an image"
    if pods.gpus < 0:
        yield f"--gpus={pods.gpus}: expected 0 or more"
    if pods.user is not None and pods.user < 1:
        yield f"--user={pods.user}: expected the number of a user who is not root"
    for name, _ in pods.env:
        if not _VARIABLE.fullmatch(name) or name.startswith(("OUTLAST_", "PET_")):
            yield f"--env={name}: expected the name of a variable that is not outlast's own"
        elif is_secret(name):
            yield (
                f"--env={name}: every account that may read the job can read a secret in its manifest; "
                "put it into a Secret and add env.valueFrom.secretKeyRef to the file"
            )


def _labels(pods: Pods) -> Iterator[str]:
    for option, given in (("--node-selector", pods.node_selector), ("--label", pods.labels)):
        for name, value in given:
            if not _QUALIFIED.fullmatch(name) or (value and not _VALUE.fullmatch(value)):
                yield f"{option}={name}={value}: expected a label and its value"
    for kind, label in pods.domains:
        if not _LABEL.fullmatch(kind) or not _QUALIFIED.fullmatch(label):
            yield f"--failure-domain={kind}={label}: expected KIND=LABEL, as zone=topology.kubernetes.io/zone"


def _words(job: TrainingJob) -> Iterator[str]:
    yield from given_twice(job.command[: job.script_at], "outlast k8s render")
    if job.pods.gpus == 0 and any(
        word in ("--nproc-per-node=gpu", "--nproc_per_node=gpu") for word in job.command[: job.script_at]
    ):
        yield "--nproc-per-node=gpu: the pods have none; give --gpus"
