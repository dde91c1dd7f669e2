"""What the command line of ``outlast run`` means: the script, the ranks, the logs and the configuration.

Every option of torchrun is taken with its meaning or refused by name; none is ignored.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from importlib.machinery import PathFinder
from typing import Any

from outlast import settings
from outlast.config import Config, FaultToleranceOptions
from outlast.errors import ConfigError, ScriptNotFound, UsageError
from outlast.health.agent import devices
from outlast.launcher.command import node_options, torchrun_options
from outlast.launcher.command.node_options import NodesSpec
from outlast.launcher.command.parser import options_after_script, parse, seconds
from outlast.observe.policy.launches import unwrapped
from outlast.parallelism.policy.degrees import refusals
from outlast.stragglers.policy.options import StragglerAction


class ScriptKind(Enum):
    """What the positional argument names."""

    FILE = "file"
    MODULE = "module"
    COMMAND = "command"


class StartKind(Enum):
    """How workers are started."""

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
    """The ranks of this node.

    Args:
        node_rank: of this node, as the user gave it; -1: not given.
        master_addr, master_port: where ranks meet, as the user gave it; port 0: any.
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
    """The command line of ``outlast run``.

    Args:
        caveats: options without an effect, and numbers of nodes without a layout; shown when the job starts.
        event_log: torchelastic's handler of events.
        cpus: processors of each local rank; empty: any (``--numa-binding``).
        metrics_port: ``[HOST:]PORT`` of this node's metrics; empty: they are not served.
        named: the user named the run folder, or the run; else a launch that finds it in use makes another.
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
    warm_imports: bool = False
    nodes: NodesSpec = field(default_factory=NodesSpec)
    caveats: tuple[str, ...] = ()
    event_log: str = "null"
    cpus: tuple[tuple[int, ...], ...] = ()
    named: bool = True
    metrics_port: str = ""


_REFUSED = "the command line cannot be carried out; nothing was started"
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch 2.13, launcher/api.py
_NAME_BYTES = 100  # of a folder's name: a file system takes 255, and the name gets additions


def parse_run(
    argv: Sequence[str], env: Mapping[str, str], placed: Callable[[str], Sequence[str]] | None = None
) -> LaunchOptions:
    """Return what a command line of ``outlast run`` means.

    Args:
        placed: returns what a scheduler, by its name, says of the nodes; options that the words have win.

    Raises:
        UsageError: some of it is wrong; the text names everything that is.
        ConfigError: only the configuration is wrong.
        ScriptNotFound: only the script is missing.
    """
    given, unreadable = parse(argv, env)
    if given.scheduler and placed is not None:
        return parse_run([*placed(given.scheduler), *argv], env)
    problems = [*unreadable, *torchrun_options.problems(given)]
    world = _world(given, env, problems)
    nodes = node_options.read(given, env, problems)
    script = _script(given, env, problems)
    absent = _absent(script, env)
    try:
        config = settings.load_config(given.config, _overrides(given, env, problems))
    except ConfigError as error:
        if not problems and not absent:
            raise
        config = Config()
        problems += [f"{error.source}: {problem}" for problem in error.problems]
    problems += _only_ranks_would_see(config, world, nodes, env) + _no_address(given.metrics_port)
    problems += [f"{given.config}: {problem}" for problem in _unfit_for_nodes(config, world, nodes)]
    config, layouts = _with_layouts(config, world, nodes, problems)
    if problems:
        raise UsageError("\n".join(filter(None, [_REFUSED, *problems, absent])))
    if absent:
        raise ScriptNotFound(absent)
    run_id = "" if given.rdzv_id == "none" else given.rdzv_id
    name = folder_name(run_id or name_of_run(script))
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
        warm_imports=given.warm_imports,
        nodes=nodes,
        caveats=(
            *torchrun_options.caveats(given, world.nproc_per_node, logs.template),
            *settings.unknown_variables(env, vars(given)),
            *layouts,
            *(
                f"{name} stands after the script, so it is an argument of {script.target}; options of outlast"
                " run stand before the script"
                for name in options_after_script(script.args, env)
            ),
        ),
        event_log=given.event_log_handler,
        cpus=_processors(given, world),
        named=bool(given.run_dir or run_id),
        metrics_port=given.metrics_port,
    )


def _no_address(metrics_port: str) -> list[str]:
    if not metrics_port:
        return []
    from outlast.observe.metrics import endpoint  # where nobody asks for metrics, it is not imported

    try:
        endpoint.address(metrics_port)
    except ValueError as error:
        return [f"--metrics-port={metrics_port}: {error}"]
    return []


def _only_ranks_would_see(
    config: Config, world: WorldSpec, nodes: NodesSpec, env: Mapping[str, str]
) -> list[str]:
    """Return a line for each value that nothing but the ranks uses, and that they would refuse."""
    found = settings.unreadable_numbers(env)
    checkpoints, ranks = config.checkpoints, world.nproc_per_node
    if checkpoints.global_url:
        from outlast.checkpoint.tiers import remote  # takes 50 ms

        try:
            remote.check(checkpoints.global_url, checkpoints.global_options)
        except UsageError as error:
            found.append(f"checkpoints.global_url: {error}")
    named = {rank for group in config.tripwire.tripwire_replicas for rank in group}
    absent = sorted(rank for rank in named if not 0 <= rank < ranks)
    if absent and not nodes.several:
        found.append(f"tripwire.tripwire_replicas: found rank {absent[0]}, expected 0 to {ranks - 1}")
    return found


def _unfit_for_nodes(config: Config, world: WorldSpec, nodes: NodesSpec) -> list[str]:
    """Return a line for each part of the configuration that the given nodes cannot carry out."""
    found = []
    if config.stragglers.action == StragglerAction.REPLACE.value and not nodes.spares:
        cure = "add a spare, or use log or stop"
        found.append(f"stragglers.action: replace needs a spare node (--spares); {cure}")
    ranks = world.nproc_per_node
    asked = {f"--nproc-per-node={ranks}": ranks}
    if nodes.several:
        asked = {
            f"--nnodes={nodes.least}:{nodes.most} with {ranks} ranks a node, {count} node(s)": count * ranks
            for count in (nodes.least, nodes.most)
        }
    return found + refusals(config.parallelism.chosen, asked)


def _with_layouts(
    config: Config, world: WorldSpec, nodes: NodesSpec, problems: list[str]
) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with the layouts that the planner makes, and what is to be said of them.

    Args:
        config: its layouts stay where it names no model.
        world, nodes: ranks of a node, and how many nodes there may be.
        problems: takes what prevents a layout.
    """
    if not (config.parallelism.model or config.parallelism.layouts) or problems:
        return config, ()
    from outlast.parallelism.agent import with_layouts
    from outlast.parallelism.policy import elastic
    from outlast.parallelism.policy.layouts import Node

    memory = int(config.parallelism.memory * (1 << 30))
    each = Node(world.nproc_per_node, memory)
    there = elastic.Nodes(each, nodes.least, nodes.most, nodes.group_size)
    told = []
    if config.parallelism.model:
        try:
            config = replace(config, parallelism=with_layouts(config.parallelism, there))
        except UsageError as error:
            problems.append(f"[parallelism] {error}")
            return config, ()
        told.append(f"[parallelism] layouts: {elastic.table(config.parallelism.chosen, there)}")
    return config, (*told, *filter(None, [elastic.without_layout(config.parallelism.chosen, there)]))


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
    """Return a valid name of one folder for any text: no path, not hidden, not long, not empty."""
    name = re.sub(r"[^\w.=+@:, -]+", "-", text).strip(".- ") or "run"
    if len(os.fsencode(name)) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    return f"{os.fsencode(name)[: _NAME_BYTES - 9].decode(errors='ignore')}-{digest}"


def name_of_run(script: ScriptSpec) -> str:
    """Return what the run folder of a script is called where the user names none.

    Of a program that runs a script (a profiler, an interpreter, a shell) the script tells which run it is.
    """
    if script.kind is not ScriptKind.FILE:
        runs = unwrapped((script.target, *script.args))
        if runs[0] == "-c":
            return settings.name_of_code(runs[1])
        if len(runs) <= len(script.args):
            return re.sub(r"\.(py|sh)$", "", os.path.basename(runs[0]))
    return re.sub(r"\.py$", "", os.path.basename(script.target.rstrip("/")))


def _overrides(given: argparse.Namespace, env: Mapping[str, str], problems: list[str]) -> dict[str, object]:
    """Return what words and variables say about fault tolerance; what they do not say, the file may."""
    overrides: dict[str, Any] = {
        spec.name: getattr(given, "ft_" + spec.name)
        for spec in fields(FaultToleranceOptions)
        if getattr(given, "ft_" + spec.name, None) is not None
    }
    if given.max_restarts is not None:
        overrides["max_restarts"] = given.max_restarts
    named = env.get(_SHUTDOWN, "")
    if named and given.shutdown_timeout is None and "workers_stop_timeout" not in overrides:
        try:
            overrides["workers_stop_timeout"] = seconds(named)
        except ValueError as error:
            problems.append(f"{_SHUTDOWN}={named}: {error}")
    if given.shutdown_timeout is not None and given.shutdown_timeout < 0:
        problems.append(f"--shutdown-timeout={given.shutdown_timeout}: expected a number of seconds")
    elif given.shutdown_timeout is not None:
        limit = float(given.shutdown_timeout)
        if overrides.setdefault("workers_stop_timeout", limit) != limit:
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
            gpus = devices.virtual_gpus(ranks, env)
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
    """Return why the program cannot be run; "": it can."""
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
