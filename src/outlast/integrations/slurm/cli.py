"""``outlast slurm``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from outlast import files, settings
from outlast.errors import ExitCode, RunFolderUnusable, ScriptNotFound, UsageError
from outlast.integrations.agent_command import carry_out, parse_command, with_stop_timeout
from outlast.integrations.findings import Level, add_lint
from outlast.integrations.requeue import Limits
from outlast.integrations.slurm import commands as slurm_commands
from outlast.integrations.slurm import supervise
from outlast.integrations.slurm.batch import LEAD, BatchFile, render
from outlast.integrations.slurm.lint import lint
from outlast.launcher.command.node_options import node_range
from outlast.launcher.command.options import folder_name

_FORWARDED = (
    "partition",
    "account",
    "qos",
    "gpus-per-node",
    "cpus-per-task",
    "mem",
    "exclude",
    "reservation",
)


def main(arguments: Sequence[str]) -> int:
    """Carry out ``outlast slurm ...`` and return its exit code.

    Raises:
        OutlastError: it cannot be done; each kind has its exit code.
    """
    return carry_out(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outlast slurm", description="Run a job under Slurm.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    submit = commands.add_parser(
        "submit",
        help="write a batch file and submit it",
        usage="outlast slurm submit [options] -- OUTLAST-RUN-OPTIONS SCRIPT ...",
        description="Write a batch file for an outlast run and submit it. What follows -- is outlast run's.",
    )
    submit.set_defaults(carry_out=_submit)
    submit.add_argument("--nodes", type=int, default=1)
    submit.add_argument("--time", default="", help="time limit of one allocation; default the partition's")
    submit.add_argument("--lead", type=float, default=LEAD, help="seconds from SIGTERM to the time limit")
    submit.add_argument("--job-name", default="")
    for name in _FORWARDED:
        submit.add_argument(f"--{name}", default=None, help="as sbatch's")
    submit.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="a further #SBATCH")
    submit.add_argument(
        "--srun", action="append", default=[], metavar="ARGUMENT", help="a further one of srun"
    )
    submit.add_argument("--setup", action="append", default=[], metavar="LINE", help="a shell line in front")
    submit.add_argument(
        "--file", default="", help="where it is written (default: slurm.sbatch in the run folder)"
    )
    submit.add_argument("--dry-run", action="store_true", help="print the file; write and submit nothing")
    _add_limits(submit)
    add_lint(commands, "a batch file of Slurm", lint)
    batch = commands.add_parser("supervise", help="the batch step of a job (in the file that submit writes)")
    batch.set_defaults(carry_out=_supervise)
    batch.add_argument("--run-dir", required=True)
    batch.add_argument("--srun", action="append", default=[], metavar="ARGUMENT")
    _add_limits(batch)
    node = commands.add_parser("step", help="what supervise starts on each node")
    node.set_defaults(carry_out=_step)
    node.add_argument("--notes", required=True)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    standard = Limits()
    parser.add_argument(
        "--max-no-progress",
        type=int,
        default=standard.no_progress,
        help=f"allocations in a row without a newer committed step (default {standard.no_progress})",
    )
    parser.add_argument("--max-requeues", type=int, default=standard.requeues, help="requeues in all")


def _limits(options: argparse.Namespace) -> Limits:
    limits = Limits(options.max_no_progress, options.max_requeues)
    if limits.no_progress < 1 or limits.requeues < 0:
        raise UsageError(
            "--max-no-progress: expected 1 or more, --max-requeues 0 or more; nothing was started"
        )
    return limits


def _submit(options: argparse.Namespace, command: list[str]) -> int:
    batch = _batch(options, command)
    text = render(batch)
    wrong = [one for one in lint(text, save_seconds=1.0) if one.level is Level.ERROR]
    if wrong:
        raise UsageError(
            "\n".join(["the batch file would be wrong; nothing was submitted", *map(str, wrong)])
        )
    if options.dry_run:
        sys.stdout.write(text)
        return ExitCode.OK
    path = Path(options.file or os.path.join(batch.run_dir, "slurm.sbatch"))
    try:
        files.make_run_folder(batch.run_dir)
        if options.file:
            path.write_text(text)
        else:
            files.write_whole(path, text.encode())
    except OSError as error:
        raise RunFolderUnusable(f"{error.filename}: {error.strerror}; nothing was submitted") from error
    job = slurm_commands.call(("sbatch", "--parsable", str(path)), "the id of a new job").strip()
    sys.stdout.write(f"{job.partition(';')[0]}\n")
    supervise.say(f"submitted {path}; its output: {batch.run_dir}/slurm-{job.partition(';')[0]}.out")
    return ExitCode.OK


def _batch(options: argparse.Namespace, command: list[str]) -> BatchFile:
    given = parse_command(command, settings.inherited(), partial(_hold_together, options.nodes))
    target: str = given.training_script
    if not (given.module or given.no_python or os.path.exists(target)):
        raise ScriptNotFound(
            f"script {target!r} does not exist (looked in {os.getcwd()}); nothing was submitted"
        )
    run_id = "" if given.rdzv_id == "none" else given.rdzv_id
    name = folder_name(run_id or re.sub(r"\.py$", "", os.path.basename(target.rstrip("/"))))
    run_dir = os.path.abspath(given.run_dir or os.path.join("outlast-runs", name))
    words = with_stop_timeout(command, given.script_at, options.lead)
    if given.run_dir is None:
        words = (f"--run-dir={run_dir}", *words)
    forwarded = [(name, getattr(options, name.replace("-", "_"))) for name in _FORWARDED]
    return BatchFile(
        command=words,
        run_dir=run_dir,
        python=sys.executable,
        name=options.job_name or name,
        nodes=options.nodes,
        time=options.time,
        lead=options.lead,
        limits=_limits(options),
        directives=(*(f"{name}={value}" for name, value in forwarded if value is not None), *options.sbatch),
        setup=tuple(options.setup),
        srun=tuple(options.srun),
    )


def _hold_together(nodes: int, given: argparse.Namespace, problems: list[str]) -> None:
    """Add what is wrong about a job that does not fit its allocation; without ``--nnodes`` it takes all."""
    spares = given.spares or 0
    if given.nnodes == "1:1" and not spares:
        return
    least, most = node_range(given.nnodes, problems)
    if nodes < least or nodes > most + spares:
        problems.append(
            f"--nodes={nodes}: the job takes {least} to {most + spares} (--nnodes={given.nnodes},"
            f" --spares={spares}), and an agent that it does not take ends the allocation"
        )


def _supervise(options: argparse.Namespace, command: list[str]) -> int:
    return supervise.supervise(options.run_dir, _limits(options), options.srun, command)


def _step(options: argparse.Namespace, command: list[str]) -> int:
    return supervise.step(options.notes, command)
