"""``outlast slurm``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast import settings
from outlast.errors import ExitCode, RunFolderUnusable, ScriptNotFound, UsageError
from outlast.integrations.requeue import Limits
from outlast.integrations.slurm import commands as slurm_commands
from outlast.integrations.slurm import supervise
from outlast.integrations.slurm.batch import LEAD, BatchFile, render, with_stop_timeout
from outlast.integrations.slurm.lint import Finding, Level, lint, summary
from outlast.launcher.command import torchrun_options
from outlast.launcher.command.node_options import node_range
from outlast.launcher.command.options import folder_name, make_parser

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
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    carry_out: Callable[[argparse.Namespace, list[str]], int] = options.carry_out
    return carry_out(options, given[cut + 1 :])


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
    check = commands.add_parser("lint", help="find the mistakes in a batch file")
    check.set_defaults(carry_out=_lint)
    check.add_argument("file", metavar="FILE", help="a batch file; - for standard input")
    check.add_argument("--save-seconds", type=float, default=60.0, help="how long a save takes (default 60)")
    check.add_argument("--strict", action="store_true", help="a warning is an error")
    check.add_argument("--json", action="store_true", help="one JSON object a finding")
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
        Path(batch.run_dir).mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise RunFolderUnusable(f"{error.filename}: {error.strerror}; nothing was submitted") from error
    job = slurm_commands.call(("sbatch", "--parsable", str(path)), "the id of a new job").strip()
    sys.stdout.write(f"{job.partition(';')[0]}\n")
    supervise.say(f"submitted {path}; its output: {batch.run_dir}/slurm-{job.partition(';')[0]}.out")
    return ExitCode.OK


def _batch(options: argparse.Namespace, command: list[str]) -> BatchFile:
    if not command:
        raise UsageError("nothing to run: give outlast run's command line after --, as in -- train.py")
    parser = make_parser(settings.inherited())
    torchrun_options.refuse_unknown(command, parser)
    given = parser.parse_args(command)
    _hold_together(given, options.nodes, parser.problems)
    if parser.problems:
        raise UsageError(
            "\n".join(["the command line cannot be carried out; nothing was submitted", *parser.problems])
        )
    target: str = given.training_script
    if not (given.module or given.no_python or os.path.exists(target)):
        raise ScriptNotFound(
            f"script {target!r} does not exist (looked in {os.getcwd()}); nothing was submitted"
        )
    script_at = len(command) - len(given.training_script_args) - 1
    run_id = "" if given.rdzv_id == "none" else given.rdzv_id
    name = folder_name(run_id or re.sub(r"\.py$", "", os.path.basename(target.rstrip("/"))))
    run_dir = os.path.abspath(given.run_dir or os.path.join("outlast-runs", name))
    words = with_stop_timeout(command, script_at, options.lead)
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


def _hold_together(given: argparse.Namespace, nodes: int, problems: list[str]) -> None:
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


def _lint(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_more(rest)
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{options.file}: cannot be read ({error}); expected a batch file of Slurm"
        ) from error
    found = lint(text, options.save_seconds)
    for one in found:
        sys.stdout.write((json.dumps(one.to_json()) if options.json else _shown(options.file, one)) + "\n")
    if not options.json:
        sys.stdout.write(summary(found) + "\n")
    levels = {one.level for one in found}
    bad = Level.ERROR in levels or (options.strict and bool(levels))
    return ExitCode.FAILED if bad else ExitCode.OK


def _shown(file: str, found: Finding) -> str:
    return f"{file}:{found}"


def _supervise(options: argparse.Namespace, command: list[str]) -> int:
    return supervise.supervise(options.run_dir, _limits(options), options.srun, command)


def _step(options: argparse.Namespace, command: list[str]) -> int:
    return supervise.step(options.notes, command)


def _nothing_more(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"lint takes nothing after --, found {' '.join(rest)}")
