"""The rules of ``outlast slurm lint``: each looks at a batch file for one kind of mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.integrations import slurm_signal_rules
from outlast.integrations.slurm_finding import Finding, Rule, error, top, warning
from outlast.integrations.slurm_script import Command, Script


def unreadable(script: Script, _save: float) -> Iterator[Finding]:
    """sbatch itself refuses the file."""
    if "\r\n" in script.text:
        line = script.text[: script.text.index("\r\n")].count("\n") + 1
        yield error(line, "dos-lines", "lines end with CR LF", "sbatch refuses the file", "dos2unix FILE")
    if not script.text.startswith("#!"):
        what, fix = "the first line names no interpreter", "#!/bin/bash as the first line"
        yield error(1, "no-shebang", what, "sbatch refuses the file", fix)


def ignored_directives(script: Script, _save: float) -> Iterator[Finding]:
    """Lines that were meant for sbatch and do not reach it."""
    for line in script.late:
        because = "sbatch stops reading at the first command: the option has no effect, and nothing says so"
        what = "#SBATCH after the first command"
        yield error(line, "late-directive", what, because, "move it above the first command")
    for number, text in enumerate(script.text.splitlines(), 1):
        if re.match(r"(#+\s+SBATCH|\s+#SBATCH|##+SBATCH)\s+-", text):
            because = "sbatch takes it for a comment: the option has no effect"
            yield warning(
                number, "no-directive", f"{text.strip()!r} is no directive", because, "#SBATCH, at the margin"
            )
    for one in script.directives:
        if "$" in one.value or "`" in one.value:
            because = "sbatch expands no shell variables: the text is taken as it is"
            fix = "give the option on sbatch's command line, or use %j, %x, %A, %a in file names"
            yield error(one.line, "variable-in-directive", f"--{one.name}={one.value}", because, fix)


def requeue(script: Script, _save: float) -> Iterator[Finding]:
    """The job does not come back after preemption or the loss of a node."""
    refused = script.directive("no-requeue")
    if refused is not None:
        because = "a preempted job and one whose node died are gone; scontrol requeue is refused"
        yield error(refused.line, "no-requeue", "--no-requeue", because, "#SBATCH --requeue")
    elif script.directive("requeue") is None:
        because = (
            "whether a preempted job, or one whose node died, comes back is left to the cluster (JobRequeue)"
        )
        yield error(top(script), "no-requeue", "no --requeue", because, "#SBATCH --requeue")


def requeue_call(script: Script, _save: float) -> Iterator[Finding]:
    """Nothing asks for another allocation, or nothing stops asking."""
    if script.supervised is not None or not script.training:
        return
    line = script.training[-1].line
    call = next((one for one in script.commands if one.words[:2] in _REQUEUES), None)
    handlers = [one for one in script.commands if one.program == "trap" and "requeue" in " ".join(one.words)]
    if call is None and not handlers and "exit 75" not in script.text:
        because = (
            "--requeue alone does not help where ranks do it right: they save on the signal, exit 0, and "
            "the job is COMPLETED and gone; and a job that runs into its time limit is never requeued"
        )
        fix = "exec outlast slurm supervise --run-dir DIR -- OPTIONS SCRIPT; or scontrol requeue after srun"
        yield error(line, "never-requeued", "nothing asks for another allocation", because, fix)
    elif "SLURM_RESTART_COUNT" not in script.text:
        where = call or (handlers[0] if handlers else script.training[-1])
        because = "a job that fails at once is requeued for ever"
        fix = '[ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] in front; outlast slurm supervise asks for progress'
        yield warning(where.line, "unbounded-requeue", "the requeue has no bound", because, fix)


_REQUEUES = (("scontrol", "requeue"), ("scontrol", "requeuehold"))


def swallowed_status(script: Script, _save: float) -> Iterator[Finding]:
    """The exit code of the job is that of something else."""
    pipefail = any(one.program == "set" and "pipefail" in one.words for one in script.commands)
    for one in script.training:
        if one.after in ("|", "|&") and not pipefail:
            reader = one.then[0] if one.then else "the last part"
            because = f"the exit code is that of {reader}: a failure counts as success"
            yield error(
                one.line, "status-lost", "a pipe", because, "set -o pipefail above, or #SBATCH --output"
            )
        if one.after == "||" and one.then[:1] in (("true",), (":",), ("echo",)):
            because = "a failure counts as success, and 93 (do not requeue) as well"
            yield error(
                one.line, "status-lost", f"|| {one.then[0]}", because, "rc=0; srun ... || rc=$?; exit $rc"
            )
        if one.after == "&" and not any(other.program == "wait" for other in script.commands):
            because = "the batch shell goes on and ends; Slurm ends the job with it"
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
            "commands behind the training",
            because,
            "rc=$? behind it; exit $rc at the end",
        )


def _stops_on_error(script: Script) -> Command | None:
    for one in script.commands:
        if one.program == "set" and any(re.fullmatch(r"-\w*e\w*|errexit", word) for word in one.words):
            return one
    shebang = script.text.partition("\n")[0]
    return Command(1, ()) if re.search(r"\s-\w*e", shebang) else None


def stops_on_error(script: Script, _save: float) -> Iterator[Finding]:
    """``set -e`` ends the file before it has looked at the exit code."""
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
        because = (
            "when the training fails the shell ends at once: that line, and the requeue, are never reached"
        )
        fix = "rc=0; srun ... || rc=$?"
        yield error(handled[0].line, "set-e", f"set -e in line {switch.line}", because, fix)


def output(script: Script, _save: float) -> Iterator[Finding]:
    """Logs that are lost, and folders that are another one after a requeue."""
    mode = script.directive("open-mode")
    if mode is None or mode.value != "append":
        because = "the output of the allocation before is cut off to nothing when the job starts again"
        yield error(top(script), "no-append", "no --open-mode=append", because, "#SBATCH --open-mode=append")
    for number, line in enumerate(script.text.splitlines(), 1):
        found = _MOVING.match(line)
        if found is not None:
            because = "it is another one after a requeue: the job finds no checkpoint and starts anew"
            fix = "a fixed name, or $SLURM_JOB_ID, which a requeue keeps"
            yield error(number, "moving-folder", found[1], because, fix)


# A folder's name that is made of what changes: the time, a random number, the count of restarts.
_MOVING = re.compile(
    r"(?i)^[^#]*?(\b[\w-]*(?:dir|folder|path|output|ckpt|checkpoint)[\w-]*[= ][^\s;]*"
    r"(?:\$\(date|`date|\$\{?RANDOM|\$\{?SLURM_RESTART_COUNT|\$\(mktemp|\$\(uuidgen))"
)


def one_agent_a_node(script: Script, _save: float) -> Iterator[Finding]:
    """A launcher starts the ranks of its node by itself, so there is one a node."""
    command = next((one for one in script.training if one.launcher), None)
    if command is None and script.supervised is None:
        return
    line = (command or script.supervised or script.commands[0]).line
    launcher = command.launcher if command is not None else "outlast slurm supervise"
    per_node = _count(script, command, "ntasks-per-node")
    nodes, tasks = _count(script, command, "nodes"), _count(script, command, "ntasks", "-n")
    because = f"that many copies of {launcher} run on each node, each starts all ranks of the node"
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
    """Options of srun that are not what they seem."""
    cpus = script.directive("cpus-per-task")
    for one in script.training:
        if one.program != "srun":
            continue
        if "-K" in one.words or one.option("--kill-on-bad-exit") not in (None, "0"):
            because = "the first rank that ends with a code after its save takes down those that still save"
            yield warning(one.line, "kill-on-bad-exit", "--kill-on-bad-exit", because, "--kill-on-bad-exit=0")
        told = one.option("-c", "--cpus-per-task") is not None or "SRUN_CPUS_PER_TASK" in script.text
        if cpus is not None and not told:
            because = f"from Slurm 22.05 on srun does not take over --cpus-per-task={cpus.value}"
            fix = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
            yield warning(one.line, "cpus-per-task", "srun without --cpus-per-task", because, fix)


RULES: tuple[Rule, ...] = (
    unreadable,
    ignored_directives,
    requeue,
    requeue_call,
    slurm_signal_rules.signal_missing,
    slurm_signal_rules.signal_to_the_shell,
    slurm_signal_rules.no_step,
    swallowed_status,
    stops_on_error,
    output,
    one_agent_a_node,
    slurm_signal_rules.torchrun,
    steps,
)
