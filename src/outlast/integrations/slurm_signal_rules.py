"""The rules of ``outlast slurm lint`` that are about signals: whether the ranks get one, and in time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from outlast.integrations.slurm_batch import seconds_of
from outlast.integrations.slurm_finding import Finding, error, top, warning
from outlast.integrations.slurm_script import Command, Directive, Script

_SIGNALS = re.compile(r"(?:SIG)?(?:TERM|INT|HUP|USR1|USR2|QUIT|CONT|ALRM|\d{1,2})")
_KILL_WAIT = 30  # seconds from SIGTERM to SIGKILL where Slurm was told nothing (KillWait)
_TORCHRUN_STOP = 30.0  # seconds after which torchrun kills ranks that still save
_DEFAULT_LEAD = 60.0


@dataclass(frozen=True)
class _Signal:
    """The value of ``--signal``: ``[{R|B}:]NUMBER_OR_NAME[@SECONDS]``."""

    where: Directive
    name: str
    lead: float
    batch_only: bool


def _signal(script: Script) -> _Signal | None:
    where = script.directive("signal")
    if where is None:
        return None
    options, colon, rest = where.value.rpartition(":")
    name, _, seconds = rest.partition("@")
    lead = float(seconds) if seconds.isdigit() else _DEFAULT_LEAD
    return _Signal(where, name.upper().removeprefix("SIG"), lead, bool(colon) and "B" in options.upper())


def _trap(script: Script, name: str) -> Command | None:
    names = {name, f"SIG{name}"}
    return next((one for one in script.commands if one.program == "trap" and names & set(one.words)), None)


def signal_missing(script: Script, save: float) -> Iterator[Finding]:
    """No signal ahead of the time limit, a wrong one, or one that comes too late or too early."""
    signal = _signal(script)
    if signal is None:
        because = (
            f"at the time limit the ranks get SIGTERM and, KillWait ({_KILL_WAIT} s by default) later, "
            "SIGKILL; a longer save is lost"
        )
        fix = f"#SBATCH --signal=TERM@{max(180, int(2 * save))}"
        yield error(top(script), "no-signal", "no --signal", because, fix)
        return
    line = signal.where.line
    if not _SIGNALS.fullmatch(signal.name):
        fix = "TERM, or USR1 with a handler for it"
        yield error(line, "unknown-signal", f"--signal={signal.where.value}", "sbatch refuses the file", fix)
    if signal.lead <= save:
        because = f"a save takes {save:.0f} s (--save-seconds): it is killed before it is done"
        fix = f"--signal={signal.name}@{int(2 * save + 60)}"
        yield error(line, "short-lead", f"the lead is {signal.lead:.0f} s", because, fix)
    limit = script.directive("time")
    try:
        seconds = seconds_of(limit.value) if limit is not None else None
    except ValueError:
        return
    if seconds is not None and seconds <= signal.lead:
        because = "the signal comes as soon as the job starts: it never trains"
        what = f"the lead is {signal.lead:.0f} s, the time limit {seconds:.0f} s"
        yield error(line, "long-lead", what, because, "a longer --time or a shorter lead")


def signal_to_the_shell(script: Script, _save: float) -> Iterator[Finding]:
    """``B:`` gives the signal to the batch shell alone, and the ranks wait for it in vain."""
    signal = _signal(script)
    if signal is None or not signal.batch_only or not script.training or script.supervised is not None:
        return
    line, last = signal.where.line, script.training[-1]
    trap = _trap(script, signal.name)
    waits = any(one.program == "wait" for one in script.commands)
    if last.replaces_the_shell:
        if last.is_step and signal.name == "TERM":
            because = (
                "srun itself gets SIGTERM and forces its step to end: the ranks are killed without a save"
            )
            fix = f"--signal=TERM@{signal.lead:.0f} without B:"
            yield error(
                line, "signal-to-shell-only", f"--signal={signal.where.value} and exec srun", because, fix
            )
    elif trap is None:
        because = (
            "only the batch shell gets the signal, it has no trap and dies of it; Slurm then ends the job, "
            f"and the ranks have KillWait ({_KILL_WAIT} s by default), not {signal.lead:.0f} s; "
            "the job is not requeued"
        )
        fix = f"--signal={signal.name}@{signal.lead:.0f} without B:"
        if not last.is_step:
            fix = "exec in front of the command, so that it takes the shell's place; or srun, and no B:"
        rule = "signal-to-shell-only" if last.is_step else "no-exec"
        yield error(line, rule, f"--signal={signal.where.value}, and no trap", because, fix)
    elif last.after != "&" or not waits:
        because = "bash runs a trap only when its foreground command has ended: the signal arrives too late"
        fix = f"srun ... & and wait; or --signal={signal.name}@{signal.lead:.0f} without B: and no trap"
        yield error(trap.line, "trap-too-late", "a trap, and a command in the foreground", because, fix)


def no_step(script: Script, _save: float) -> Iterator[Finding]:
    """Without srun there is no step, so nothing runs elsewhere and no signal arrives."""
    if script.supervised is not None or not script.training or any(one.is_step for one in script.training):
        return
    line = script.training[-1].line
    nodes = script.directive("nodes")
    if nodes is not None and not re.fullmatch(r"1(-1)?", nodes.value):
        because = f"the command runs on the first node only; the others of --nodes={nodes.value} do nothing"
        yield error(line, "no-srun", "no srun", because, "srun in front of the command")
        return
    signal = _signal(script)
    if signal is not None and not signal.batch_only:
        because = f"--signal={signal.where.value} goes to steps, not to the batch shell: nobody gets it"
        yield error(line, "no-srun", "no srun", because, "srun in front of the command")


def torchrun(script: Script, _save: float) -> Iterator[Finding]:
    """torchrun's own habits on a signal."""
    command = next(
        (one for one in script.training if one.launcher in ("torchrun", "torch.distributed.run")), None
    )
    signal = _signal(script)
    if command is None or signal is None:
        return
    told = command.option("--shutdown-timeout", "--shutdown_timeout") is not None
    if signal.lead > _TORCHRUN_STOP and not told and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in script.text:
        because = f"it kills the ranks {_TORCHRUN_STOP:.0f} s after the signal, whatever the lead is"
        fix = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={signal.lead:.0f}, or outlast run"
        yield warning(command.line, "torchrun-kills", "torchrun and no --shutdown-timeout", because, fix)
    if (
        signal.name in ("USR1", "USR2")
        and command.option("--signals-to-handle", "--signals_to_handle") is None
    ):
        because = f"torchrun has no handler for {signal.name}: it dies of the signal, and the ranks with it"
        fix = f"--signal=TERM@{signal.lead:.0f}, or --signals-to-handle"
        yield error(
            command.line, "torchrun-dies", f"torchrun and --signal={signal.where.value}", because, fix
        )
