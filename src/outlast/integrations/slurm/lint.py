"""The rules of ``outlast slurm lint``: line, consequence and cure of each mistake in a batch file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from outlast.integrations.findings import Finding, error, warning
from outlast.integrations.slurm.batch import seconds_of
from outlast.integrations.slurm.script import Command, Directive, Script, parse

Rule = Callable[[Script, float], Iterable[Finding]]


def top(script: Script) -> int:
    """Return the line behind which a missing directive would stand."""
    return script.directives[-1].line if script.directives else 1


def lint(text: str, save_seconds: float = 60.0) -> list[Finding]:
    """Return what is wrong in a batch file, by line.

    Args:
        text: the file.
        save_seconds: how long a save takes; the lead has to be longer.
    """
    script = parse(text)
    found = [one for rule in RULES for one in rule(script, save_seconds)]
    return sorted(found, key=lambda one: (one.line, one.rule))


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
    """``B:`` sends the signal to the batch shell only; the ranks do not get it."""
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
            "only the batch shell gets the signal, and has no trap, so it ends; then Slurm ends the job, "
            f"and the ranks have KillWait ({_KILL_WAIT} s by default), not {signal.lead:.0f} s; "
            "the job is not requeued"
        )
        fix = f"--signal={signal.name}@{signal.lead:.0f} without B:"
        if not last.is_step:
            fix = "exec in front of the command, so that it replaces the shell; or srun, and no B:"
        rule = "signal-to-shell-only" if last.is_step else "no-exec"
        yield error(line, rule, f"--signal={signal.where.value}, and no trap", because, fix)
    elif last.after != "&" or not waits:
        because = "bash runs a trap only after its foreground command has ended, which is too late"
        fix = f"srun ... & and wait; or --signal={signal.name}@{signal.lead:.0f} without B: and no trap"
        yield error(trap.line, "trap-too-late", "a trap, and a command in the foreground", because, fix)


def no_step(script: Script, _save: float) -> Iterator[Finding]:
    """Without srun there is no step: other nodes run nothing, and no process gets the signal."""
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
        because = f"--signal={signal.where.value} goes to steps, not to the batch shell: no process gets it"
        yield error(line, "no-srun", "no srun", because, "srun in front of the command")


def torchrun(script: Script, _save: float) -> Iterator[Finding]:
    """What torchrun does on a signal."""
    command = next(
        (one for one in script.training if one.launcher in ("torchrun", "torch.distributed.run")), None
    )
    signal = _signal(script)
    if command is None or signal is None:
        return
    told = command.option("--shutdown-timeout", "--shutdown_timeout") is not None
    if signal.lead > _TORCHRUN_STOP and not told and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in script.text:
        because = (
            f"torchrun kills the ranks {_TORCHRUN_STOP:.0f} s after the signal, also if the lead is longer"
        )
        fix = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={signal.lead:.0f}, or outlast run"
        yield warning(command.line, "torchrun-kills", "torchrun and no --shutdown-timeout", because, fix)
    if (
        signal.name in ("USR1", "USR2")
        and command.option("--signals-to-handle", "--signals_to_handle") is None
    ):
        because = f"torchrun has no handler for {signal.name}: the signal ends torchrun and its ranks"
        fix = f"--signal=TERM@{signal.lead:.0f}, or --signals-to-handle"
        yield error(
            command.line, "torchrun-dies", f"torchrun and --signal={signal.where.value}", because, fix
        )


def unreadable(script: Script, _save: float) -> Iterator[Finding]:
    """sbatch itself refuses the file."""
    if "\r\n" in script.text:
        line = script.text[: script.text.index("\r\n")].count("\n") + 1
        yield error(line, "dos-lines", "lines end with CR LF", "sbatch refuses the file", "dos2unix FILE")
    if not script.text.startswith("#!"):
        what, fix = "the first line names no interpreter", "#!/bin/bash as the first line"
        yield error(1, "no-shebang", what, "sbatch refuses the file", fix)


def ignored_directives(script: Script, _save: float) -> Iterator[Finding]:
    """Lines that are meant for sbatch and that it does not read."""
    for line in script.late:
        because = "sbatch stops reading at the first command: the option has no effect, without a message"
        what = "#SBATCH after the first command"
        yield error(line, "late-directive", what, because, "move it above the first command")
    for number, text in enumerate(script.text.splitlines(), 1):
        if re.match(r"(#+\s+SBATCH|\s+#SBATCH|##+SBATCH)\s+-", text):
            because = "sbatch reads it as a comment: the option has no effect"
            yield warning(
                number,
                "no-directive",
                f"{text.strip()!r} is no directive",
                because,
                "#SBATCH in the first column",
            )
    for one in script.directives:
        if "$" in one.value or "`" in one.value:
            because = "sbatch expands no shell variables: the option gets the text as it is"
            fix = "give the option on sbatch's command line, or use %j, %x, %A, %a in file names"
            yield error(one.line, "variable-in-directive", f"--{one.name}={one.value}", because, fix)


def requeue(script: Script, _save: float) -> Iterator[Finding]:
    """The job does not come back after preemption or the loss of a node."""
    refused = script.directive("no-requeue")
    if refused is not None:
        because = "Slurm neither requeues the job after preemption or the loss of a node, nor on request"
        yield error(refused.line, "no-requeue", "--no-requeue", because, "#SBATCH --requeue")
    elif script.directive("requeue") is None:
        because = (
            "JobRequeue of the cluster decides whether Slurm requeues a job after preemption or a lost node"
        )
        yield error(top(script), "no-requeue", "no --requeue", because, "#SBATCH --requeue")


def requeue_call(script: Script, _save: float) -> Iterator[Finding]:
    """Nothing asks for another allocation, or the number of requests has no limit."""
    if script.supervised is not None or not script.training:
        return
    line = script.training[-1].line
    call = next((one for one in script.commands if one.words[:2] in _REQUEUES), None)
    handlers = [one for one in script.commands if one.program == "trap" and "requeue" in " ".join(one.words)]
    if call is None and not handlers and "exit 75" not in script.text:
        because = (
            "--requeue is not enough: if the ranks save on the signal and exit with 0, the job is COMPLETED "
            "and ends; and Slurm never requeues a job that reaches its time limit"
        )
        fix = "exec outlast slurm supervise --run-dir DIR -- OPTIONS SCRIPT; or scontrol requeue after srun"
        yield error(line, "never-requeued", "nothing asks for another allocation", because, fix)
    elif "SLURM_RESTART_COUNT" not in script.text:
        where = call or (handlers[0] if handlers else script.training[-1])
        because = "a job that fails at once is requeued for ever"
        fix = '[ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] in front; outlast slurm supervise asks for progress'
        yield warning(where.line, "unbounded-requeue", "the number of requeues has no limit", because, fix)


_REQUEUES = (("scontrol", "requeue"), ("scontrol", "requeuehold"))


def swallowed_status(script: Script, _save: float) -> Iterator[Finding]:
    """The exit code of the job is not that of the training."""
    pipefail = any(one.program == "set" and "pipefail" in one.words for one in script.commands)
    for one in script.training:
        if one.after in ("|", "|&") and not pipefail:
            reader = one.then[0] if one.then else "the last part"
            because = f"the exit code is that of {reader}: a failure counts as success"
            yield error(
                one.line, "status-lost", "a pipe", because, "set -o pipefail above, or #SBATCH --output"
            )
        if one.after == "||" and one.then[:1] in (("true",), (":",), ("echo",)):
            because = "a failure counts as success, also 93 (do not requeue)"
            yield error(
                one.line, "status-lost", f"|| {one.then[0]}", because, "rc=0; srun ... || rc=$?; exit $rc"
            )
        if one.after == "&" and not any(other.program == "wait" for other in script.commands):
            because = "the batch shell does not wait and ends; then Slurm ends the job"
            yield error(one.line, "no-wait", "& and no wait", because, "wait $! at the end")
    last = script.training[-1] if script.training else None
    if last is None or last.after in ("|", "|&", "||", "&", "&&") or last.in_condition:
        return
    behind = script.commands[script.commands.index(last) + 1 :]
    takes = any("$?" in " ".join((*one.words, *one.variables)) or one.program == "exit" for one in behind)
    if behind and not takes and not _stops_on_error(script):
        because = (
            f"the exit code of the job is that of {behind[-1].program or 'what follows'}, not of the training"
        )
        yield error(
            last.line,
            "status-lost",
            "commands after the training",
            because,
            "rc=$? after it; exit $rc at the end",
        )


def _stops_on_error(script: Script) -> Command | None:
    for one in script.commands:
        if one.program == "set" and any(re.fullmatch(r"-\w*e\w*|errexit", word) for word in one.words):
            return one
    shebang = script.text.partition("\n")[0]
    return Command(1, ()) if re.search(r"\s-\w*e", shebang) else None


def stops_on_error(script: Script, _save: float) -> Iterator[Finding]:
    """``set -e`` ends the script before it reads the exit code."""
    switch = _stops_on_error(script)
    if switch is None or not script.training:
        return
    last = script.training[-1]
    if last.after in ("||", "&&", "&") or last.in_condition or last.replaces_the_shell:
        return
    behind = script.commands[script.commands.index(last) + 1 :]
    handled = [
        one for one in behind if "$?" in " ".join((*one.words, *one.variables)) or one.words[:2] in _REQUEUES
    ]
    if handled:
        because = "if the training fails, the shell ends at once and never reaches that line or the requeue"
        fix = "rc=0; srun ... || rc=$?"
        yield error(handled[0].line, "set-e", f"set -e in line {switch.line}", because, fix)


def output(script: Script, _save: float) -> Iterator[Finding]:
    """Logs that are lost, and folders whose name changes at a requeue."""
    mode = script.directive("open-mode")
    if mode is None or mode.value != "append":
        because = "a requeue deletes the output of the allocation before"
        yield error(top(script), "no-append", "no --open-mode=append", because, "#SBATCH --open-mode=append")
    for number, line in enumerate(script.text.splitlines(), 1):
        found = _MOVING.match(line)
        if found is not None:
            because = "its name changes at a requeue: the job finds no checkpoint and starts at step 0"
            fix = "a fixed name, or $SLURM_JOB_ID, which a requeue keeps"
            yield error(number, "moving-folder", found[1], because, fix)


# A folder's name with the time, a random number or the count of restarts in it.
_MOVING = re.compile(
    r"(?i)^[^#]*?(\b[\w-]*(?:dir|folder|path|output|ckpt|checkpoint)[\w-]*[= ][^\s;]*"
    r"(?:\$\(date|`date|\$\{?RANDOM|\$\{?SLURM_RESTART_COUNT|\$\(mktemp|\$\(uuidgen))"
)


def one_agent_a_node(script: Script, _save: float) -> Iterator[Finding]:
    """A launcher starts all ranks of its node, so each node has one launcher."""
    command = next((one for one in script.training if one.launcher), None)
    if command is None and script.supervised is None:
        return
    line = (command or script.supervised or script.commands[0]).line
    launcher = command.launcher if command is not None else "outlast slurm supervise"
    per_node = _count(script, command, "ntasks-per-node")
    nodes, tasks = _count(script, command, "nodes"), _count(script, command, "ntasks", "-n")
    because = f"each node runs that many copies of {launcher}, and each of them starts all ranks of the node"
    if per_node is not None and per_node != 1:
        what = f"--ntasks-per-node={per_node} with {launcher}"
        yield error(_line(script, "ntasks-per-node", line), "agents", what, because, "--ntasks-per-node=1")
    elif per_node is None and tasks is not None and tasks != (nodes or 1):
        what = f"--ntasks={tasks} on {nodes or 1} node(s) with {launcher}"
        yield error(
            _line(script, "ntasks", line), "agents", what, because, "--ntasks-per-node=1, and no --ntasks"
        )


def _count(script: Script, command: Command | None, *names: str) -> int | None:
    text = command.option(f"--{names[0]}", *names[1:]) if command is not None and command.is_step else None
    where = script.directive(names[0])
    text = text if text is not None else where.value if where is not None else ""
    return int(text) if text.isdigit() else None


def _line(script: Script, name: str, otherwise: int) -> int:
    where = script.directive(name)
    return where.line if where is not None else otherwise


def steps(script: Script, _save: float) -> Iterator[Finding]:
    """Options of srun with unexpected effects."""
    cpus = script.directive("cpus-per-task")
    for one in script.training:
        if one.program != "srun":
            continue
        if "-K" in one.words or one.option("--kill-on-bad-exit") not in (None, "0"):
            because = (
                "when one rank ends with an error code after its save, srun kills the ranks that still save"
            )
            yield warning(one.line, "kill-on-bad-exit", "--kill-on-bad-exit", because, "--kill-on-bad-exit=0")
        told = one.option("-c", "--cpus-per-task") is not None or "SRUN_CPUS_PER_TASK" in script.text
        if cpus is not None and not told:
            because = f"since Slurm 22.05 srun does not inherit --cpus-per-task={cpus.value} from sbatch"
            fix = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
            yield warning(one.line, "cpus-per-task", "srun without --cpus-per-task", because, fix)


RULES: tuple[Rule, ...] = (
    unreadable,
    ignored_directives,
    requeue,
    requeue_call,
    signal_missing,
    signal_to_the_shell,
    no_step,
    swallowed_status,
    stops_on_error,
    output,
    one_agent_a_node,
    torchrun,
    steps,
)
