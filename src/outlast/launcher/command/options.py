"""The command line of ``outlast run``: torchrun's, whole, and a few options of its own.

Every option of torchrun is taken with its meaning or refused by name; none is ignored. Both
``--a-b`` and ``--a_b`` are understood, and ``PET_A_B`` in the environment is the default.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from outlast import settings
from outlast.config import RESTARTS_PER_DAY, Config, FaultTolerance
from outlast.errors import ConfigError, ScriptNotFound, UsageError
from outlast.health.agent import devices
from outlast.launcher.command import node_options, torchrun_options
from outlast.launcher.command.node_options import NodesSpec


class ScriptKind(Enum):
    """What the positional argument names."""

    FILE = "file"
    MODULE = "module"
    COMMAND = "command"


class StartKind(Enum):
    """How workers come to be."""

    WARM = "forked from the zygote"
    COLD = "plain subprocesses"


@dataclass(frozen=True)
class ScriptSpec:
    """The program of every rank.

    Args:
        python: interpreter of a cold start, from ``PYTHON_EXEC``; "": the launcher's own.
    """

    kind: ScriptKind
    target: str
    args: tuple[str, ...]
    python: str = ""

    def command(self, python: str, local_rank: int) -> list[str]:
        """Return the command of a cold start, as torchrun would run it."""
        args = self.rank_args(local_rank)
        if self.kind is ScriptKind.COMMAND:
            return [self.target, *args]
        module = ["-m"] if self.kind is ScriptKind.MODULE else []
        return [self.python or python, "-u", *module, self.target, *args]

    def rank_args(self, local_rank: int) -> list[str]:
        """Return the arguments with torchrun's ``${local_rank}`` macro filled in."""
        return [arg.replace("${local_rank}", str(local_rank)) for arg in self.args]


@dataclass(frozen=True)
class WorldSpec:
    """How many ranks, and what torchrun calls them.

    Args:
        node_rank: of this node, as the user gave it; -1: not given.
        master_addr, master_port: where ranks are to meet, as the user gave it; port 0: anywhere.
        virtual_gpus: what ``--virtual-local-rank`` lets each rank see; empty: it was not given.
    """

    nproc_per_node: int
    node_rank: int = -1
    role: str = "default"
    virtual_gpus: tuple[str, ...] = ()
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True)
class LogSpec:
    """Where the streams of the ranks go.

    Args:
        log_dir: folder that takes the place of the run folder's; "": it does not.
        redirects, tee: per local rank, bit 1 for stdout and bit 2 for stderr; None: not given.
        template: torchrun's prefix template for shown lines; "" when none was given.
        only: local ranks shown on the console; empty: all.
        copied_stdout, copied_stderr: shown lines that hold one of these texts are copied to a file.
    """

    redirects: str | None = None
    tee: str | None = None
    log_dir: str = ""
    template: str = ""
    only: tuple[int, ...] = ()
    copied_stdout: tuple[str, ...] = ()
    copied_stderr: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """Everything that the command line of ``outlast run`` says.

    Args:
        caveats: what was said and has no effect; told when the job begins.
        event_log: torchelastic's handler of events.
        cpus: processors of each local rank; empty: any (``--numa-binding``).
        named: the user named the run folder, or the run; else a launch that finds it in use takes another.
    """

    script: ScriptSpec
    world: WorldSpec
    logs: LogSpec
    config: Config
    run_dir: str
    run_id: str
    signals: tuple[str, ...]
    preload: tuple[str, ...]
    start: StartKind
    nodes: NodesSpec = field(default_factory=NodesSpec)
    caveats: tuple[str, ...] = ()
    event_log: str = "null"
    cpus: tuple[tuple[int, ...], ...] = ()
    named: bool = True


class OneSpelling(argparse.RawDescriptionHelpFormatter):
    """Shows each option under its first name, and the short one; ``--a_b`` is understood and not shown."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        short = [name for name in action.option_strings if not name.startswith("--")]
        long = [name for name in action.option_strings if name.startswith("--") and "_" not in name]
        switch = [f"--no-{name[2:]}" for name in long[:1] if f"--no-{name[2:]}" in long]
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join([*short, *long[:1], *switch]) + value


class Parser(argparse.ArgumentParser):
    """Collects what is wrong with the values, so that all of it can be told at once."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.problems: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Refuse a command line that cannot be cut into options and a script."""
        raise UsageError(f"{message}; see outlast run --help")

    def reading(self, flag: str, variable: tuple[str, str | None], read: Callable[[str], Any]) -> Any:
        """Return a reader that notes what it cannot read under the name of where it came from."""

        def take(text: str) -> Any:
            try:
                return read(text)
            except ValueError as error:
                name, value = variable
                why = _EXPECTED.get(read, str(error))
                self.problems.append(f"{name if text == value else flag}={text}: {why}")
                return None

        return take


_EXAMPLES = """\
examples:
  outlast run --standalone --nproc-per-node=4 train.py --lr 1e-3
  outlast run --nnodes=2 --nproc-per-node=8 --rdzv-endpoint=node0:29400 --rdzv-id=job1 train.py

Options end at the script; what follows is its own. --a_b means --a-b, and PET_A_B in the
environment is an option's default, as under torchrun. See docs/reference/options.md."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch 2.13, launcher/api.py
_NAME_BYTES = 100  # of a folder's name: a file system takes 255, and the name gets additions

_EXPECTED: Mapping[Callable[[str], Any], str] = {int: "expected a whole number", float: "expected a number"}


def _off(text: str) -> bool:
    return text.strip().lower() in ("off", "none", "inf")


def _patience(text: str) -> float:
    """Read a timeout of hang detection: 0 or less would take every rank for hung."""
    seconds = math.inf if _off(text) else _number(text, "expected a positive number of seconds, or off")
    if not seconds > 0:
        raise ValueError("expected a positive number of seconds, or off")
    return seconds


def _seconds(text: str) -> float:
    """Read a time that may be 0."""
    seconds = _number(text, "expected a number of seconds")
    if not 0 <= seconds < math.inf:
        raise ValueError("expected a number of seconds")
    return seconds


def _stop_time(text: str) -> float:
    return math.inf if _off(text) else _seconds(text)


def _capture_time(text: str) -> float:
    return 0.0 if _off(text) else _seconds(text)


def _positive(text: str) -> float:
    number = _number(text, "expected a positive number")
    if not 0 < number < math.inf:
        raise ValueError("expected a positive number")
    return number


def _number(text: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(expected) from None


def _switch(text: str) -> bool:
    """Read a variable that stands for a switch, a number as under torchrun."""
    try:
        return bool(int(text or "0"))
    except ValueError:
        raise ValueError("expected 1 or 0") from None


def _sections(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, colon, seconds = entry.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"{entry!r} is not NAME:SECONDS")
        found[name.strip()] = _patience(seconds)
    return found


_FT_READERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "rank_section_timeouts": (_sections, "NAME:SECONDS,NAME:SECONDS"),
    "safety_factor": (_positive, f"default {FaultTolerance.safety_factor}"),
    "num_warmup_iterations": (int, f"default {FaultTolerance.num_warmup_iterations}"),
    "workload_check_interval": (_positive, f"seconds; default {FaultTolerance.workload_check_interval}"),
    "max_restarts_per_day": (int, f"default {RESTARTS_PER_DAY}, or --max-restarts where that is more"),
    "workers_stop_timeout": (_stop_time, f"seconds, or off; default {FaultTolerance.workers_stop_timeout}"),
    "busy_rank_timeout": (_patience, f"seconds, or off; default {FaultTolerance.busy_rank_timeout}"),
    "capture_stacks": (_capture_time, f"seconds, or off; default {FaultTolerance.capture_stacks}"),
}


def _add_ours(add: Any) -> None:
    add(
        "--scheduler", default="", help="take nodes from slurm, kubernetes, ray or another, and requeue there"
    )
    add("--run-dir", default=None, help="run folder (default outlast-runs/<rdzv-id or script>)")
    add(
        "--config",
        "--ft-cfg-path",
        default=None,
        help="TOML file with [fault_tolerance], [checkpoints], ..., or YAML as for ft_launcher",
    )
    add("--preload", default=[], action="append", help="module that the zygote imports besides torch")
    add("--no-zygote", flag=True, help="start every rank cold, as torchrun does")
    add(
        "--log-line-prefix-template",
        default="",
        help="prefix of shown lines; ${role_name}, ${rank}, ${local_rank}",
    )
    for spec in fields(FaultTolerance):
        name = "--ft-" + spec.name.replace("_", "-")
        if spec.name == "calc_ft_timeouts":
            add(name, default=None, action=argparse.BooleanOptionalAction, help="learn what is not fixed")
        elif spec.name != "max_restarts":
            read, text = _FT_READERS.get(spec.name, (_patience, "seconds, or off"))
            add(name, type=read, default=None, help=text)


def _spellings(name: str) -> list[str]:
    """Return each way to write an option; NVRx's documents mix both: ``--ft-rank_section_timeouts``."""
    if not name.startswith("--"):
        return [name]
    found = [name, "--" + name[2:].replace("-", "_")]
    if name.startswith("--ft-"):
        found.append("--ft-" + name[5:].replace("-", "_"))
    return list(dict.fromkeys(found))


def make_parser(env: Mapping[str, str]) -> Parser:
    """Return the parser of ``outlast run``; ``PET_*`` variables become defaults."""
    parser = Parser(
        prog="outlast run",
        description="Start a training script and keep it going.",
        epilog=_EXAMPLES,
        formatter_class=OneSpelling,
    )

    def add(*names: str, flag: bool = False, **how: Any) -> None:
        spellings = [spelling for name in names for spelling in _spellings(name)]
        long = names[0] if names[0].startswith("--") else names[-1]
        dest = long.lstrip("-").replace("-", "_")
        variable = f"PET_{dest.upper()}"
        value = env.get(variable)
        reading = (long, (variable, value))
        if flag:
            how |= {"action": "store_true", "default": False}
        if value is not None:
            if flag or how.get("action") is argparse.BooleanOptionalAction:
                how["default"] = parser.reading(*reading, _switch)(value)
            else:
                how["default"] = list(filter(None, value.split(","))) if how.get("action") else value
        if "type" in how:
            how["type"] = parser.reading(*reading, how["type"])
        parser.add_argument(*spellings, dest=dest, **how)

    torchrun_options.add_to(parser, add)
    node_options.add_to(add)
    _add_ours(add)
    return parser


def parse_run(
    argv: Sequence[str], env: Mapping[str, str], placed: Callable[[str], Sequence[str]] | None = None
) -> LaunchOptions:
    """Parse the command line of ``outlast run``.

    Args:
        placed: returns what a scheduler, by its name, says of the nodes; options that the words have win.

    Raises:
        UsageError: something on it is wrong; the text names everything that is.
        ConfigError: nothing but the configuration is wrong.
        ScriptNotFound: nothing is wrong but that there is no such script.
    """
    parser = make_parser(env)
    script_at = torchrun_options.refuse_unknown(argv, parser)
    given = parser.parse_args(argv[: script_at + 1])
    if given.scheduler and placed is not None:
        return parse_run([*placed(given.scheduler), *argv], env)
    given.training_script_args = list(argv[script_at + 1 :])  # never taken for abbreviations of our options
    problems = [*parser.problems, *torchrun_options.problems(given)]
    world = _world(given, env, problems)
    nodes = node_options.read(given, env, problems)
    script = _script(given, env, problems)
    absent = _absent(script, env)
    overrides = _overrides(given, env, problems)
    try:
        config = settings.load_config(given.config, overrides)
    except ConfigError as error:
        if not problems and not absent:
            raise
        config = Config()
        problems += [f"{error.source}: {problem}" for problem in error.problems]
    if problems:
        lines = ["the command line cannot be carried out; nothing was started", *problems, absent]
        raise UsageError("\n".join(filter(None, lines)))
    if absent:
        raise ScriptNotFound(absent)
    run_id = "" if given.rdzv_id == "none" else given.rdzv_id
    name = folder_name(run_id or re.sub(r"\.py$", "", os.path.basename(script.target.rstrip("/"))))
    logs = _logs(given, env)
    return LaunchOptions(
        script=script,
        world=world,
        logs=logs,
        config=config,
        run_dir=given.run_dir or os.path.join("outlast-runs", name),
        run_id=run_id,
        signals=torchrun_options.signal_names(given.signals_to_handle),
        preload=tuple(given.preload),
        start=StartKind.COLD if given.no_zygote or script.python else StartKind.WARM,
        nodes=nodes,
        caveats=(
            *torchrun_options.caveats(given, world.nproc_per_node, logs.template),
            *settings.unknown_variables(env, [action.dest for action in parser._actions]),
        ),
        event_log=given.event_log_handler,
        cpus=_processors(given, world),
        named=bool(given.run_dir or run_id),
    )


def _logs(given: argparse.Namespace, env: Mapping[str, str]) -> LogSpec:
    return LogSpec(
        given.redirects,
        given.tee,
        given.log_dir or "",
        given.log_line_prefix_template or env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        tuple(int(rank) for rank in filter(None, given.local_ranks_filter.split(","))),
        torchrun_options.filters(given.duplicate_stdout_filters),
        torchrun_options.filters(given.duplicate_stderr_filters),
    )


def _processors(given: argparse.Namespace, world: WorldSpec) -> tuple[tuple[int, ...], ...]:
    """Return what ``--numa-binding`` comes to.

    Raises:
        UsageError: it cannot be carried out here.
    """
    if given.numa_binding is None:
        return ()
    try:
        return devices.processors(given.numa_binding, world.nproc_per_node)
    except ValueError as error:
        raise UsageError(f"--numa-binding={given.numa_binding}: {error}; nothing was started") from None


def folder_name(text: str) -> str:
    """Return a name for one folder, whatever the text holds: no path, not hidden, not long, never empty."""
    name = re.sub(r"[^\w.=+@:, -]+", "-", text).strip(".- ") or "run"
    if len(os.fsencode(name)) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    return f"{os.fsencode(name)[: _NAME_BYTES - 9].decode(errors='ignore')}-{digest}"


def _overrides(given: argparse.Namespace, env: Mapping[str, str], problems: list[str]) -> dict[str, object]:
    """Return what words and variables say about fault tolerance; what they do not say, the file may."""
    overrides: dict[str, Any] = {
        spec.name: getattr(given, "ft_" + spec.name)
        for spec in fields(FaultTolerance)
        if getattr(given, "ft_" + spec.name, None) is not None
    }
    if given.max_restarts is not None:
        overrides["max_restarts"] = given.max_restarts
    named = env.get(_SHUTDOWN, "")
    if named and given.shutdown_timeout is None and "workers_stop_timeout" not in overrides:
        try:
            overrides["workers_stop_timeout"] = _seconds(named)
        except ValueError as error:
            problems.append(f"{_SHUTDOWN}={named}: {error}")
    if given.shutdown_timeout is not None and given.shutdown_timeout < 0:
        problems.append(f"--shutdown-timeout={given.shutdown_timeout}: expected a number of seconds")
    elif given.shutdown_timeout is not None:
        seconds = float(given.shutdown_timeout)
        if overrides.setdefault("workers_stop_timeout", seconds) != seconds:
            problems.append(
                f"--shutdown-timeout={given.shutdown_timeout}: the same as --ft-workers-stop-timeout, "
                f"which says {overrides['workers_stop_timeout']}"
            )
    if given.monitor_interval is not None and given.monitor_interval > 0:
        asked = overrides.get("workload_check_interval", given.monitor_interval)
        overrides["workload_check_interval"] = min(given.monitor_interval, asked)
    return overrides


def _world(given: argparse.Namespace, env: Mapping[str, str], problems: list[str]) -> WorldSpec:
    ranks = 1
    gpus: tuple[str, ...] = ()
    try:
        ranks = devices.rank_count(given.nproc_per_node, env)
    except ValueError as error:
        problems.append(f"--nproc-per-node={given.nproc_per_node}: {error}")
    if given.virtual_local_rank:
        try:
            gpus = devices.virtual_gpus(ranks, env.get("CUDA_VISIBLE_DEVICES"))
        except ValueError as error:
            problems.append(f"--virtual-local-rank: {error}")
    master_addr, master_port = node_options.master(given, problems)
    return WorldSpec(ranks, node_options.node_rank(given), given.role, gpus, master_addr, master_port)


def _script(given: argparse.Namespace, env: Mapping[str, str], problems: list[str]) -> ScriptSpec:
    target, args = given.training_script, tuple(given.training_script_args)
    if given.run_path:  # in the launcher's own interpreter, and before --no-python and -m, as by torchrun
        problems += _not_importable(given, target)
        return ScriptSpec(ScriptKind.FILE, target, args)
    if given.no_python:
        return ScriptSpec(ScriptKind.COMMAND, target, args)
    python = env.get("PYTHON_EXEC", "")
    if python and shutil.which(python, path=env.get("PATH")) is None:
        problems.append(f"PYTHON_EXEC={python}: no such program")
    elif python and given.preload:
        problems.append(f"--preload: there is no zygote to import it (PYTHON_EXEC={python} is started cold)")
    problems += _not_importable(given, target)
    kind = ScriptKind.MODULE if given.module else ScriptKind.FILE
    return ScriptSpec(kind, target, args, "" if python == sys.executable else python)


def _not_importable(given: argparse.Namespace, target: str) -> list[str]:
    """Return a line for each module of ``--preload`` that the zygote would not find; nothing is imported."""
    first = os.getcwd() if given.module else os.path.dirname(os.path.realpath(target))
    found = []
    for name in given.preload:
        path: Sequence[str] | None = [first, *sys.path]
        top = name.partition(".")[0]
        if top in sys.builtin_module_names:
            continue
        full = ""
        for part in name.split("."):
            full = f"{full}.{part}" if full else part
            spec = PathFinder.find_spec(full, path) if path is not None else None
            if spec is None:
                found.append(
                    f"--preload={name}: there is no module {full} where the script would look for it"
                )
                break
            path = spec.submodule_search_locations
    return found


def _absent(script: ScriptSpec, env: Mapping[str, str]) -> str:
    """Say why what is to be run cannot be, or nothing."""
    target = script.target
    if script.kind is ScriptKind.COMMAND:
        return _no_program(target, env)
    if script.kind is not ScriptKind.FILE:
        return ""
    if not os.path.exists(target):
        return f"script {target!r} does not exist (looked in {os.getcwd()}); nothing was started"
    if os.path.isdir(target) and not os.path.isfile(os.path.join(target, "__main__.py")):
        return f"script {target!r} is a folder without a __main__.py; nothing was started"
    if not os.path.isdir(target) and not os.path.isfile(target):
        return f"script {target!r} is no regular file, and every rank has to read it; nothing was started"
    if not os.access(target, os.R_OK):
        return f"script {target!r} cannot be read by this user; nothing was started"
    return ""


def _no_program(target: str, env: Mapping[str, str]) -> str:
    if shutil.which(target, path=env.get("PATH")) is not None:
        return ""
    if os.path.isdir(target):
        what = "is a folder"
    elif os.path.exists(target) and "/" in target:
        what = "may not be executed by this user"
    else:
        what = "does not exist" if "/" in target else "is not in PATH"
    return f"program {target!r} {what}; nothing was started"
