"""``outlast k8s``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outlast.errors import ExitCode
from outlast.integrations.agent_command import carry_out, node_range, parse_command
from outlast.integrations.findings import add_lint
from outlast.integrations.kubernetes.job import (
    LEAD,
    PORT,
    Limits,
    Pods,
    Storage,
    TrainingJob,
    pairs,
)
from outlast.integrations.kubernetes.lint import lint
from outlast.integrations.kubernetes.manifest import Kind, render

_HELP = {
    "name": "of the job; its run id, too",
    "image": "container image with outlast and the script in it",
    "nnodes": "nodes that train: N, or MIN:MAX",
    "claim": "persistent volume claim that all pods share",
    "shm": "size of /dev/shm, as 200Gi: what the memory tier and data loaders need",
}


def main(arguments: Sequence[str]) -> int:
    """Carry out ``outlast k8s ...`` and return its exit code.

    Raises:
        OutlastError: it cannot be done; each kind has its exit code.
    """
    return carry_out(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outlast k8s", description="Run a job under Kubernetes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    write = commands.add_parser(
        "render",
        help="write a manifest",
        usage="outlast k8s render [options] -- OUTLAST-RUN-OPTIONS SCRIPT ...",
        description="Write a JobSet, or a TrainJob and its runtime, to standard output.",
    )
    _add_render(write)
    add_lint(commands, "a manifest", lint)
    return parser


def _add_render(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.set_defaults(carry_out=_render)
    for name, text in _HELP.items():
        parser.add_argument(f"--{name}", required=True, help=text)
    parser.add_argument("--kind", choices=[kind.value for kind in Kind], default=Kind.JOBSET.value)
    parser.add_argument("--spares", type=int, default=0, help="nodes beside them that wait (default 0)")
    parser.add_argument("--gpus", type=int, default=0, help="of each pod, and its ranks (default 0)")
    parser.add_argument("--lead", type=float, default=LEAD, help=f"seconds to save in (default {LEAD:.0f})")
    parser.add_argument("--namespace", default="", help="default: kubectl's")
    parser.add_argument("--claim-path", default="/outlast", help="where it is mounted (default /outlast)")
    parser.add_argument("--run-dir", default="", help="run folder in it (default <claim-path>/<name>)")
    parser.add_argument("--token-secret", default="", help="Secret with the key token (default <name>-token)")
    parser.add_argument("--memory", default="", help="of the container, /dev/shm included")
    parser.add_argument("--cpus", default="", help="that the container asks for")
    parser.add_argument(
        "--user", type=int, default=None, help="number of the container's user (default the image's)"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"of the endpoint (default {PORT})")
    for name, shape, text in (
        ("env", "NAME=VALUE", "a further variable"),
        ("node-selector", "LABEL=VALUE", "a label that nodes must have"),
        ("failure-domain", "KIND=LABEL", "the pod's label that names what a node shares with others"),
        ("label", "LABEL=VALUE", "a further label of the job"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], metavar=shape, help=text)
    parser.add_argument(
        "--max-node-restarts",
        type=int,
        default=limits.node_restarts,
        help=f"failures of one pod's place (default {limits.node_restarts})",
    )
    parser.add_argument(
        "--max-requeues",
        type=int,
        default=limits.requeues,
        help=f"new starts of the whole job (default {limits.requeues})",
    )


def _render(options: argparse.Namespace, command: list[str]) -> int:
    sys.stdout.write(render(_job(options, command), Kind(options.kind)))
    return ExitCode.OK


def _job(options: argparse.Namespace, command: list[str]) -> TrainingJob:
    path = options.claim_path.rstrip("/")
    return TrainingJob(
        name=options.name,
        namespace=options.namespace,
        nodes=node_range(options.nnodes),
        spares=options.spares,
        lead=options.lead,
        port=options.port,
        limits=Limits(options.max_node_restarts, options.max_requeues),
        pods=Pods(
            image=options.image,
            shm=options.shm,
            gpus=options.gpus,
            memory=options.memory,
            cpus=options.cpus,
            user=options.user,
            env=pairs("--env", options.env),
            node_selector=pairs("--node-selector", options.node_selector),
            domains=pairs("--failure-domain", options.failure_domain),
            labels=pairs("--label", options.label),
        ),
        storage=Storage(
            claim=options.claim,
            path=path,
            run_dir=options.run_dir or f"{path}/{options.name}",
            token_secret=options.token_secret or f"{options.name}-token",
        ),
        command=tuple(command),
        script_at=parse_command(command, {}).script_at,
    )
