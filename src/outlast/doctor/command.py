"""``outlast doctor``: what would make a job fail or slow on this machine, each with its cure."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from outlast import settings
from outlast.config import Config
from outlast.doctor import agent, host, job, policy, rehearsal
from outlast.doctor.agent import Check, Disk
from outlast.doctor.policy import Diagnosis
from outlast.errors import ExitCode, NodeUnfit, UsageError
from outlast.health.agent import devices, preflight
from outlast.health.agent.preflight import PreflightOptions
from outlast.health.policy.preflight import Check as OfPreflight
from outlast.observe.runs import DEFAULT

_TIMEOUT = 60.0
_SAVE = 60.0  # seconds; what the lints assume where nothing was measured
# Checks by the name under which they are made, where several findings come of one look.
_TOGETHER = {"script": {"script", "ddp", "modules"}, "write": {"write", "saving", "timeouts"}}
_EXAMPLES = """\
examples:
  outlast doctor                        this machine, with the packaged example as the job
  outlast doctor train.py               and this script, which is read and not started
  outlast doctor --train train.py --lr 1  the script trains for a minute: its outputs are overwritten
  outlast doctor --no-rehearsal --job-file job.sh  nothing is started; a batch file is looked at
  outlast doctor --check shm --check open-files    these checks only"""


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast doctor ...`` and return its exit code.

    Raises:
        NodeUnfit: a job would fail; names the checks.
        UsageError: an option is wrong.
    """
    given = _parser().parse_args(arguments)
    if given.train and (given.script is None or not given.rehearse):
        raise UsageError(
            "--train: it rehearses with a SCRIPT, and not with --no-rehearsal; nothing was started"
        )
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(ExitCode.SIGNAL_BASE + number)
    )  # removes what it made
    deadline = time.monotonic() + given.timeout
    run_dir = given.run_dir or default_folder(given.script)
    environment = settings.inherited()
    ranks = _ranks(given.nproc_per_node, environment)
    only = frozenset(given.check or policy.CURES)
    options = PreflightOptions(
        run_dir=run_dir,
        skip=frozenset(one for one in OfPreflight if one.value not in only),
        nproc_per_node=given.nproc_per_node or str(ranks),
        ports=tuple(given.port),
        environment=environment,
    )
    config, found = job.configuration(given.config)
    probe = preflight.begin(options)
    disk = Disk.of(run_dir)
    wanted = agent.checks(disk, run_dir, given.script, environment, given.run_dir is not None)
    wanted = [
        one for one in (*wanted, *_of_the_host(ranks, environment)) if _TOGETHER.get(one[0], {one[0]}) & only
    ]
    found = [*found, *agent.examine(wanted, deadline)]
    found += [policy.cured(one) for one in preflight.quick(options, deadline)]
    found += [policy.cured(one) for one in preflight.finish(options, probe, deadline)]
    measured = job.earlier(run_dir)
    rehearsed = given.rehearse and bool(only & {*policy.PATHS, "leftovers"})
    script = given.script if given.train else None
    if rehearsed and script is not None and (held := _held(run_dir)):
        found += [policy.unrehearsed(path, held) for path in policy.PATHS]
    elif rehearsed and not any(one.fails for one in found):
        wish = rehearsal.Wish(
            script, tuple(given.arguments) if given.train else (), ranks, config, disk.place
        )
        told, of_rehearsal = rehearsal.carry_out(wish, deadline)
        found += told
        measured = measured if script is None or measured.source else of_rehearsal
    found += _of_the_job(given.job_file, config, environment, measured, disk.rate)
    return _end([one for one in found if one.check in only], given.json)


def _held(run_dir: Path) -> str:
    """Return why the script, which may be at work, is not started; empty: its run folder is not in use."""
    (found,) = agent.launcher_of(run_dir, "", named=False)
    return "" if found.ok else f"{found.found}; a second start would use its devices and its files"


def _end(found: Sequence[Diagnosis], as_json: bool) -> int:
    if as_json:
        sys.stdout.write("".join(json.dumps(one.to_json()) + "\n" for one in found))
    else:
        sys.stdout.write("".join(f"{text}\n" for one in found for text in _told(one)))
    failed = [one.check for one in found if one.fails]
    if failed:
        raise NodeUnfit(f"a job would fail on {os.uname().nodename}: {', '.join(dict.fromkeys(failed))}")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast doctor",
        usage="outlast doctor [OPTION ...] [SCRIPT [ARGUMENT ...]]",
        description="Find what would make a job fail or slow on this machine, and say what to do about it."
        " Exit code 0: nothing, or warnings; 69: a job would fail.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "script",
        type=Path,
        nargs="?",
        metavar="SCRIPT",
        help="the training script; it is read, and started only with --train",
    )
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")
    add(
        "--train",
        action="store_true",
        help="rehearse with SCRIPT: it TRAINS here for a minute, is killed and started again, and writes"
        " its files as always (default: the packaged example is rehearsed)",
    )
    add(
        "--run-dir", type=Path, help="run folder (default outlast-runs/<script>, without SCRIPT outlast-runs)"
    )
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        default="",
        help="ranks: a number, cpu, gpu or auto (default: the GPUs; without one 2, or 1 of 1 processor)",
    )
    add("--port", type=int, action="append", default=[], help="port to listen on; may be repeated")
    add("--config", type=Path, help="the file that outlast run gets with --config")
    add(
        "--job-file",
        type=Path,
        action="append",
        default=[],
        help="batch file of Slurm or manifest of Kubernetes; may be repeated (default: of this Slurm job)",
    )
    add(
        "--check",
        action="append",
        choices=sorted({*policy.CURES} - {"bandwidth"}),
        metavar="NAME",
        help="make this check only, as after a cure; may be repeated",
    )
    add("--no-rehearsal", dest="rehearse", action="store_false", help="start no job")
    add("--timeout", type=_seconds, default=_TIMEOUT, help=f"seconds for everything (default {_TIMEOUT:.0f})")
    add("--json", action="store_true", help="one JSON object a check")
    return parser


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to 3600")
    return found


def _ranks(text: str, environment: Mapping[str, str]) -> int:
    if not text:
        return devices.gpu_count(environment) or min(2, len(os.sched_getaffinity(0)))
    try:
        return devices.rank_count(text, environment)
    except ValueError:
        return 1  # the check of the devices reports it


def default_folder(script: Path | None) -> Path:
    """Return the run folder that ``outlast run`` would use for a script."""
    from outlast.launcher.command.options import folder_name

    return Path(DEFAULT) if script is None else Path(DEFAULT, folder_name(script.name.removesuffix(".py")))


def _of_the_host(ranks: int, environment: Mapping[str, str]) -> list[Check]:
    return [
        ("scratch", partial(host.scratch, environment)),
        ("processors", partial(host.processors, ranks, environment)),
        ("core-files", partial(host.core_files, ranks)),
        ("interfaces", partial(host.interfaces, environment)),
        ("caches", partial(host.caches, environment)),
        ("locked-memory", host.locked_memory),
        ("overcommit", host.overcommit),
        ("driver", host.driver),
    ]


def _of_the_job(
    files: Sequence[Path],
    config: Config,
    environment: Mapping[str, str],
    measured: policy.Measured,
    rate: float,
) -> list[Diagnosis]:
    try:
        texts = job.of_the_scheduler(files, environment)
    except OSError as error:
        raise UsageError(f"--job-file {error.filename}: {error.strerror or error}") from error
    takes = max(measured.pause, measured.nbytes / rate if rate else 0.0) or _SAVE
    found = [one for name, text in texts.items() for one in job.linted(name, text, takes)]
    found += policy.timeouts(config, measured, rate, job.grace_of(texts, environment))
    return [*found, policy.saving(config, measured, rate)]


def _told(one: Diagnosis) -> Iterator[str]:
    word = "ok" if one.ok else ("FAILED" if one.fails else "warning")
    yield f"{word:<7}  {one.check:<13}  {one.found}"
    if not one.ok:
        yield f"{'':<7}  {'':<13}  expected: {one.expected}"
        yield f"{'':<7}  {'':<13}  cure: {one.cure}"
