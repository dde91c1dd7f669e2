"""``outlast k8s``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast.errors import ExitCode, UsageError
from outlast.integrations.kubernetes.job import (
    LEAD,
    PORT,
    Limits,
    Pods,
    Storage,
    TrainingJob,
    node_range,
    pairs,
)
from outlast.integrations.kubernetes.lint import lint
from outlast.integrations.kubernetes.manifest import Kind, render
from outlast.integrations.slurm.lint import Level, summary
from outlast.launcher.command import torchrun_options
from outlast.launcher.command.options import make_parser

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
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    carry_out: Callable[[argparse.Namespace, list[str]], int] = options.carry_out
    return carry_out(options, given[cut + 1 :])


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
    check = commands.add_parser("lint", help="find the mistakes in a manifest")
    check.set_defaults(carry_out=_lint)
    check.add_argument("file", metavar="FILE", help="a manifest; - for standard input")
    check.add_argument("--save-seconds", type=float, default=60.0, help="how long a save takes (default 60)")
    check.add_argument("--strict", action="store_true", help="a warning is an error")
    check.add_argument("--json", action="store_true", help="one JSON object a finding")
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
        script_at=script_index(command),
    )


def script_index(command: Sequence[str]) -> int:
    """Return where the script stands in the user's part of ``outlast run``'s command line.

    Raises:
        UsageError: there is none, or an option is unknown or malformed.
    """
    if not command:
        raise UsageError("nothing to run: give outlast run's command line after --, as in -- train.py")
    parser = make_parser({})
    torchrun_options.refuse_unknown(command, parser)
    given = parser.parse_args(list(command))
    if parser.problems:
        raise UsageError(
            "\n".join(["the command line cannot be carried out; nothing was written", *parser.problems])
        )
    return len(command) - len(given.training_script_args) - 1


def _lint(options: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise UsageError(f"lint takes nothing after --, found {' '.join(rest)}")
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{options.file}: cannot be read ({error}); expected a manifest") from error
    found = lint(text, options.save_seconds)
    for one in found:
        sys.stdout.write((json.dumps(one.to_json()) if options.json else f"{options.file}:{one}") + "\n")
    if not options.json:
        sys.stdout.write(summary(found) + "\n")
    levels = {one.level for one in found}
    return ExitCode.FAILED if Level.ERROR in levels or (options.strict and levels) else ExitCode.OK
