"""``outlast ray``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import secrets
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from outlast.errors import ExitCode, UsageError
from outlast.integrations.agent_command import carry_out, node_range, parse_command
from outlast.integrations.ray.driver import ClusterJob, RayUnavailable, drive, problems

_TIMEOUT = 30.0  # seconds
_MOST_BYTES = 65536


def main(arguments: Sequence[str]) -> int:
    """Carry out ``outlast ray ...`` and return its exit code.

    Raises:
        OutlastError: it cannot be done; each kind has its exit code.
    """
    return carry_out(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outlast ray", description="Run a job on a Ray cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, do, text, address in (
        ("run", _run, "run a job from here, which is in the cluster", "of the cluster (default auto)"),
        ("submit", _submit, "hand a job over to the cluster", "of its dashboard, as http://head:8265"),
    ):
        one = commands.add_parser(
            name,
            help=text,
            usage=f"outlast ray {name} [options] -- OUTLAST-RUN-OPTIONS SCRIPT ...",
            description=f"{text[0].upper()}{text[1:]}. One agent a node; what follows -- is outlast run's.",
        )
        one.set_defaults(carry_out=do)
        one.add_argument("--address", required=name == "submit", default="auto", help=address)
        _add_job(one)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    standard = ClusterJob("", (1, 1), "", (), 0)
    parser.add_argument("--nnodes", required=True, help="nodes that train: N, or MIN:MAX")
    parser.add_argument("--run-dir", required=True, help="run folder, which all nodes see")
    parser.add_argument("--name", default="", help="run id (default: the run folder's name)")
    parser.add_argument("--spares", type=int, default=0, help="nodes beside them that wait (default 0)")
    parser.add_argument("--gpus", type=int, default=0, help="of each node, and its ranks (default 0)")
    parser.add_argument("--cpus", type=int, default=standard.cpus, help="of each node (default 1)")
    parser.add_argument(
        "--lead", type=float, default=standard.lead, help=f"seconds to end in (default {standard.lead:.0f})"
    )
    parser.add_argument(
        "--placement-timeout",
        type=float,
        default=standard.placement_timeout,
        help=f"seconds to wait for the nodes (default {standard.placement_timeout:.0f})",
    )
    parser.add_argument(
        "--max-node-restarts",
        type=int,
        default=standard.restarts,
        help=f"failures in a row of one node's place (default {standard.restarts})",
    )


def _job(options: argparse.Namespace, command: list[str]) -> ClusterJob:
    name = options.name or options.run_dir.rstrip("/").rpartition("/")[2]
    job = ClusterJob(
        name=name,
        nodes=node_range(options.nnodes),
        run_dir=options.run_dir,
        command=tuple(command),
        script_at=parse_command(command, {}).script_at,
        spares=options.spares,
        gpus=options.gpus,
        cpus=options.cpus,
        address=options.address,
        placement_timeout=options.placement_timeout,
        restarts=options.max_node_restarts,
        lead=options.lead,
    )
    wrong = problems(job)
    if wrong:
        raise UsageError("\n".join(["the job cannot be started as it is", *wrong]))
    return job


def _run(options: argparse.Namespace, command: list[str]) -> int:
    return drive(_job(options, command))


def _submit(options: argparse.Namespace, command: list[str]) -> int:
    job = _job(options, command)
    if not re.match(r"https?://", options.address):
        raise UsageError(f"--address={options.address}: expected http://HOST:PORT, the dashboard's")
    words = [
        *("outlast", "ray", "run", f"--nnodes={options.nnodes}", f"--run-dir={job.run_dir}"),
        *(f"--name={job.name}", f"--spares={job.spares}", f"--gpus={job.gpus}", f"--cpus={job.cpus}"),
        *(f"--lead={job.lead:g}", f"--placement-timeout={job.placement_timeout:g}"),
        *(f"--max-node-restarts={job.restarts}", "--", *job.command),
    ]
    url = f"{options.address.rstrip('/')}/api/jobs/"
    submission = f"{job.name}-{secrets.token_hex(4)}"
    content = {"entrypoint": shlex.join(words), "submission_id": submission, "metadata": {"name": job.name}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(content).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            submitted = str(json.loads(answer.read(_MOST_BYTES))["submission_id"])
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(_MOST_BYTES).decode(errors="replace").strip()
        raise RayUnavailable(f"{url}: refused with {error.code}: {said}; nothing was started") from error
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RayUnavailable(
            f"{url}: {error}; expected the id of a new job; "
            f"ray job list shows whether {submission} was started"
        ) from error
    sys.stdout.write(f"{submitted}\n")
    return ExitCode.OK
