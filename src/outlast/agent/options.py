"""The command line of ``outlast run``: torchrun's, whole, and a few options of its own.

Every option of torchrun is taken with its meaning or refused by name; none is ignored. Both
``--a-b`` and ``--a_b`` are understood, and ``PET_A_B`` in the environment is the default.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NoReturn

from outlast import settings
from outlast.agent import torchrun_options
from outlast.core.config import Config, FaultTolerance
from outlast.core.errors import ScriptNotFound, UsageError


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
    """The program of every rank."""

    kind: ScriptKind
    target: str
    args: tuple[str, ...]

    def command(self, python: str, local_rank: int) -> list[str]:
        """Return the command of a cold start, as torchrun would run it."""
        args = self.rank_args(local_rank)
        if self.kind is ScriptKind.COMMAND:
            return [self.target, *args]
        module = ["-m"] if self.kind is ScriptKind.MODULE else []
        return [python, "-u", *module, self.target, *args]

    def rank_args(self, local_rank: int) -> list[str]:
        """Return the arguments with torchrun's ``${local_rank}`` macro filled in."""
        return [arg.replace("${local_rank}", str(local_rank)) for arg in self.args]


@dataclass(frozen=True)
class WorldSpec:
    """How many ranks, and what torchrun calls them."""

    nproc_per_node: int
    node_rank: int = 0
    role: str = "default"
    virtual_local_rank: bool = False


@dataclass(frozen=True)
class LogSpec:
    """Where the streams of the ranks go.

    Args:
        redirects, tee: per local rank, bit 1 for stdout and bit 2 for stderr; None: not given.
        template: torchrun's prefix template for shown lines; "" when none was given.
        only: local ranks shown on the console; empty: all.
    """

    redirects: str | None = None
    tee: str | None = None
    log_dir: str = ""
    template: str = ""
    only: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """Everything that the command line of ``outlast run`` says."""

    script: ScriptSpec
    world: WorldSpec
    logs: LogSpec
    config: Config
    run_dir: str
    run_id: str
    signals: tuple[str, ...]
    preload: tuple[str, ...]
    start: StartKind


class _Parser(argparse.ArgumentParser):
    """Fails with every problem and a hint, not with the first one and the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see outlast run --help")


def _timeout(text: str) -> float:
    if text.lower() in ("off", "none", "inf"):
        return math.inf
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, nor 'off'") from None


def _sections(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, colon, seconds = entry.partition(":")
        if not colon or not name.strip():
            raise argparse.ArgumentTypeError(f"{entry!r} is not NAME:SECONDS")
        found[name.strip()] = _timeout(seconds)
    return found


def _add_ours(add: Any) -> None:
    add("--run-dir", default=None, help="run folder (default outlast-runs/<rdzv-id or script>)")
    add("--config", "--ft-cfg-path", default=None, help="TOML file with [fault_tolerance] and [checkpoints]")
    add("--preload", default=[], action="append", help="module that the zygote imports besides torch")
    add("--no-zygote", flag=True, help="start every rank cold, as torchrun does")
    add(
        "--log-line-prefix-template",
        default="",
        help="prefix of shown lines; ${role_name}, ${rank}, ${local_rank}",
    )
    for spec in fields(FaultTolerance):
        if spec.name == "max_restarts":
            continue
        name = "--ft-" + spec.name.replace("_", "-")
        if spec.name == "rank_section_timeouts":
            add(name, type=_sections, default=None, help="NAME:SECONDS,NAME:SECONDS")
        elif spec.name == "calc_ft_timeouts":
            add(name, default=None, action=argparse.BooleanOptionalAction, help="learn what is not fixed")
        elif str(spec.type) == "int":
            add(name, type=int, default=None, help=f"default {spec.default}")
        else:
            add(name, type=_timeout, default=None, help="seconds, or off")


def make_parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of ``outlast run``; ``PET_*`` variables become defaults."""
    parser = _Parser(prog="outlast run", description="Start a training script and keep it going.")

    def add(*names: str, flag: bool = False, **how: Any) -> None:
        spellings: list[str] = []
        for name in names:
            spellings += [name] if "-" not in name.lstrip("-") else [name, "--" + name[2:].replace("-", "_")]
        dest = names[-1 if names[0].startswith("-") and not names[0].startswith("--") else 0]
        dest = dest.lstrip("-").replace("-", "_")
        value = env.get(f"PET_{dest.upper()}")
        if flag:
            how |= {"action": "store_true", "default": value not in (None, "", "0")}
        elif value is not None and not isinstance(how.get("default"), list):
            how["default"] = value
        parser.add_argument(*spellings, dest=dest, **how)

    torchrun_options.add_to(parser, add)
    _add_ours(add)
    return parser


def parse_run(argv: Sequence[str], env: Mapping[str, str]) -> LaunchOptions:
    """Parse the command line of ``outlast run``.

    Raises:
        UsageError: something on it is wrong; the text names everything that is.
        ConfigError: the configuration is wrong.
        ScriptNotFound: there is no such script.
    """
    parser = make_parser(env)
    torchrun_options.refuse_unknown(argv, parser)
    given = parser.parse_args(argv)
    problems = torchrun_options.problems(given)
    if problems:
        raise UsageError(
            "\n".join(["the command line cannot be carried out; nothing was started", *problems])
        )
    overrides = {
        spec.name: getattr(given, "ft_" + spec.name, None)
        for spec in fields(FaultTolerance)
        if getattr(given, "ft_" + spec.name, None) is not None
    }
    if given.max_restarts is not None:
        overrides["max_restarts"] = given.max_restarts
    if given.shutdown_timeout is not None:
        overrides["workers_stop_timeout"] = float(given.shutdown_timeout)
    if given.monitor_interval is not None:
        asked = overrides.get("workload_check_interval", FaultTolerance.workload_check_interval)
        overrides["workload_check_interval"] = min(given.monitor_interval, asked)
    config = settings.load_config(given.config, overrides)
    script = _script(given)
    run_id = "" if given.rdzv_id == "none" else given.rdzv_id
    name = run_id or re.sub(r"\.py$", "", os.path.basename(script.target.rstrip("/"))) or "run"
    return LaunchOptions(
        script=script,
        world=WorldSpec(_ranks(given.nproc_per_node, env), 0, given.role, given.virtual_local_rank),
        logs=LogSpec(
            given.redirects,
            given.tee,
            given.log_dir or "",
            given.log_line_prefix_template or env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
            tuple(int(rank) for rank in filter(None, given.local_ranks_filter.split(","))),
        ),
        config=config,
        run_dir=given.run_dir or os.path.join("outlast-runs", name),
        run_id=run_id,
        signals=tuple(filter(None, given.signals_to_handle.split(","))),
        preload=tuple(given.preload),
        start=StartKind.COLD if given.no_zygote else StartKind.WARM,
    )


def _ranks(text: str, env: Mapping[str, str]) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("gpu", "auto"):
        count = _gpus(env)
        if count:
            return count
        if text == "auto":
            return os.cpu_count() or 1
        raise UsageError(
            "--nproc-per-node=gpu: no NVIDIA GPU is visible (/dev/nvidia0, CUDA_VISIBLE_DEVICES)"
        )
    raise UsageError(f"--nproc-per-node={text}: expected a positive number, cpu, gpu or auto")


def _gpus(env: Mapping[str, str]) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    try:
        return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])
    except OSError:
        return 0


def _script(given: argparse.Namespace) -> ScriptSpec:
    target, args = given.training_script, tuple(given.training_script_args)
    if given.module:
        return ScriptSpec(ScriptKind.MODULE, target, args)
    if given.no_python:
        return ScriptSpec(ScriptKind.COMMAND, target, args)
    if not os.path.exists(target):
        raise ScriptNotFound(
            f"script {target!r} does not exist (looked in {os.getcwd()}); nothing was started"
        )
    return ScriptSpec(ScriptKind.FILE, target, args)
