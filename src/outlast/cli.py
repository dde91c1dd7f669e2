"""The ``outlast`` command: dispatch to the parts that carry out each subcommand.

A module is imported when its subcommand needs it: pages of help import nothing of what runs a job, and
``outlast run`` starts without torch, numpy and rich.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from outlast.errors import ExitCode, OutlastError

if TYPE_CHECKING:
    from outlast.integrations.schedulers import ScheduledRun

USAGE = """\
usage: outlast COMMAND ...

  run        start a training script and restart it after faults (takes torchrun's command line)
  plan       how a job goes on with fewer nodes: dp, tp, pp, throughput, checkpoint
  preflight  check whether this node can run a job
  doctor     what would make a job fail or slow on this machine, each with its cure
  health     show this node's devices, live; calibrate the prediction of failures; the node ledger
  top        what a run does now: step, rate, ranks, checkpoints, the latest incident
  dashboard  runs in a browser, live: timeline, incidents, where the time went, logs
  request    ask a running job to save now, to end, or to have a spare replace a node
  metrics    what runs do now, for Prometheus; recording and alert rules
  report     where the wall time of a run went, and each incident
  stragglers which ranks slowed a run, and a heat map of all ranks
  ckpt       list, verify, remove and convert a run's checkpoints
  replay     repeat part of a run and find the first step that went wrong
  chaos      inject a fault into a run
  slurm      write, submit, check and supervise a Slurm batch job
  k8s        write a manifest for Kubernetes, or check one
  ray        run a job on a Ray cluster, or submit it
  demo       train a small GPT twice, with and without faults, and compare bit by bit
  completion complete commands and options in bash, zsh or fish

See outlast COMMAND --help; outlast --version prints the version."""


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        from outlast.launcher.command.parser import make_parser

        make_parser({}).print_help()
        return ExitCode.OK
    from outlast import settings
    from outlast.launcher.command.launch import launch
    from outlast.launcher.command.options import parse_run

    scheduled: list[ScheduledRun] = []

    def placed(name: str) -> Sequence[str]:
        from outlast.integrations.schedulers import ScheduledRun

        scheduled.append(ScheduledRun(name, settings.inherited()))
        return scheduled[0].options

    try:
        options = parse_run(arguments, settings.inherited(), placed)
        return scheduled[0].run(options, launch) if scheduled else launch(options)
    except OutlastError as error:
        from outlast.recovery.agent import hand_over

        hand_over(settings.error_file(), None, f"{type(error).__name__}: {error}")
        raise


def _top(arguments: Sequence[str]) -> int:
    from outlast.observe import top

    return top.main(arguments)


def _request(arguments: Sequence[str]) -> int:
    from outlast.observe import request_command

    return request_command.main(arguments)


def _dashboard(arguments: Sequence[str]) -> int:
    from outlast.observe.dashboard import command as dashboard_command

    return dashboard_command.main(arguments)


def _metrics(arguments: Sequence[str]) -> int:
    from outlast.observe.metrics import command

    return command.main(arguments)


def _report(arguments: Sequence[str]) -> int:
    from outlast.observe import report

    return report.main(arguments)


def _stragglers(arguments: Sequence[str]) -> int:
    from outlast.observe import stragglers

    return stragglers.main(arguments)


def _ckpt(arguments: Sequence[str]) -> int:
    from outlast.checkpoint.tools import commands

    return commands.main(arguments)


def _replay(arguments: Sequence[str]) -> int:
    from outlast.checkpoint.tools import replay

    return replay.main(arguments)


def _chaos(arguments: Sequence[str]) -> int:
    from outlast.chaos import commands

    return commands.main(arguments)


def _slurm(arguments: Sequence[str]) -> int:
    from outlast.integrations.slurm import cli as slurm_cli

    return slurm_cli.main(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from outlast.parallelism import command as plan_command

    return plan_command.main(arguments)


def _preflight(arguments: Sequence[str]) -> int:
    from outlast.health.agent import command as preflight_command

    return preflight_command.main(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from outlast.doctor import command as doctor_command

    return doctor_command.main(arguments)


def _health(arguments: Sequence[str]) -> int:
    from outlast.health.agent.telemetry import command as health_command

    return health_command.main(arguments)


def _k8s(arguments: Sequence[str]) -> int:
    from outlast.integrations.kubernetes import cli as kubernetes_cli

    return kubernetes_cli.main(arguments)


def _ray(arguments: Sequence[str]) -> int:
    from outlast.integrations.ray import cli as ray_cli

    return ray_cli.main(arguments)


def _completion(arguments: Sequence[str]) -> int:
    from outlast import completion

    return completion.main(arguments, COMMANDS)


def _demo(arguments: Sequence[str]) -> int:
    from outlast.chaos import commands

    return commands.demo(arguments)


COMMANDS = {
    "run": _run,
    "plan": _plan,
    "preflight": _preflight,
    "doctor": _doctor,
    "health": _health,
    "top": _top,
    "dashboard": _dashboard,
    "request": _request,
    "metrics": _metrics,
    "report": _report,
    "stragglers": _stragglers,
    "ckpt": _ckpt,
    "replay": _replay,
    "chaos": _chaos,
    "slurm": _slurm,
    "k8s": _k8s,
    "ray": _ray,
    "demo": _demo,
    "completion": _completion,
}


_UNREAD = ExitCode.SIGNAL_BASE + signal.SIGPIPE  # as of a Unix tool that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command and return its exit code; it ends quietly when nobody reads what it prints."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell has closed it, as with >&-
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    try:
        code = _carry_out(given)
        sys.stdout.flush()
    except BrokenPipeError:
        unread = [one for one in (sys.stdout, sys.stderr) if _is_unread(one)]
        if not unread:
            raise
        for stream in unread:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return _UNREAD
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich has met it, and has closed the stream
            return _UNREAD
        raise
    return code


def _is_unread(stream: TextIO) -> bool:
    """Say whether a stream is a pipe or socket whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return False


def _carry_out(given: list[str]) -> int:
    name = given[0] if given else "--help"
    if name in ("-h", "--help", "help"):
        sys.stdout.write(USAGE + "\n")
        return ExitCode.OK if given else ExitCode.USAGE
    if name == "--version":
        from outlast import __version__

        sys.stdout.write(f"outlast {__version__}\n")
        return ExitCode.OK
    command = COMMANDS.get(name)
    if command is None:
        sys.stderr.write(f"outlast: {name!r} is not a command; known are {', '.join(COMMANDS)}\n\n{USAGE}\n")
        return ExitCode.USAGE
    try:
        return command(given[1:])
    except OutlastError as error:
        sys.stderr.write(f"outlast {name}: {error}\n")
        return int(error.exit_code)
    except SystemExit as ended:
        if not ended.code and given[-1] in ("-h", "--help"):  # argparse has printed the page
            from outlast.examples import ending

            sys.stdout.write(ending(name))
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"outlast {name}: interrupted (SIGINT)\n")
        return ExitCode.SIGNAL_BASE + 2


if __name__ == "__main__":
    sys.exit(main())
