"""The command line of ``outlast run``: torchrun's, whole, and a few options of its own.

Every option of torchrun is taken with its meaning or refused by name; none is ignored. Both
``--a-b`` and ``--a_b`` are understood, and ``PET_A_B`` in the environment is the default.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NoReturn

from outlast import settings
from outlast.core.config import Config, FaultTolerance
from outlast.core.errors import ScriptNotFound, UsageError

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torchrun --signals-to-handle
_RDZV_CONF = frozenset(
    [
        "join_timeout",
        "timeout",
        "read_timeout",
        "last_call_timeout",
        "close_timeout",
        "is_host",
        "rank",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "store_type",
        "use_libuv",
        "cert_path",
    ]
)


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


def _add_torchrun(parser: argparse.ArgumentParser, add: Any) -> None:
    """Add torchrun's options; ``add`` knows both spellings and the PET variable."""
    add("--nnodes", default="1:1", help="nodes, N or MIN:MAX; this version runs on one")
    add("--nproc-per-node", default="1", help="ranks: a number, cpu, gpu or auto")
    add("--rdzv-backend", default="static", help="static or c10d; on one node nothing has to meet")
    add("--rdzv-endpoint", default="", help="accepted; on one node nothing has to meet")
    add("--rdzv-id", default="none", help="the run id")
    add("--rdzv-conf", default="", help="accepted keys are torchrun's; on one node nothing waits")
    add("--standalone", flag=True, help="one node, as here always")
    add("--max-restarts", type=int, default=None, help="restarts without progress in between (default 3)")
    add("--monitor-interval", type=float, default=None, help="upper bound for the time between two looks")
    add(
        "--start-method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="only spawn is accepted",
    )
    add("--event-log-handler", default="null", help="only null: events go to events.jsonl in the run folder")
    add("--role", default="default", help="name of the ranks' role")
    add("-m", "--module", flag=True, help="the script is a module's name")
    add("--no-python", flag=True, help="the script is a program; started cold")
    add("--run-path", flag=True, help="the script is run through runpy.run_path; the same as a script here")
    add("--log-dir", default=None, help="folder for the logs of the ranks (default: logs in the run folder)")
    add("-r", "--redirects", default=None, help="streams that go to files: 0, 1, 2, 3 or 0:1,1:2")
    add("-t", "--tee", default=None, help="streams that go to files and to the console; default 3")
    add("--local-ranks-filter", default="", help="local ranks shown on the console")
    add("--duplicate-stdout-filters", default="", help="refused: not supported by this version")
    add("--duplicate-stderr-filters", default="", help="refused: not supported by this version")
    add("--node-rank", type=int, default=0, help="0 on one node")
    add("--master-addr", default="127.0.0.1", help="accepted; ranks meet on loopback")
    add("--master-port", type=int, default=None, help="accepted; each generation has a port of its own")
    add("--local-addr", default=None, help="accepted; ranks meet on loopback")
    add("--logs-specs", default=None, help="refused: not supported by this version")
    add("--numa-binding", default=None, help="refused: not supported by this version")
    add("--signals-to-handle", default=DEFAULT_SIGNALS, help="signals that end the job")
    add("--shutdown-timeout", type=int, default=None, help="the same as --ft-workers-stop-timeout")
    add("--virtual-local-rank", flag=True, help="LOCAL_RANK=0 for every rank, one visible GPU each")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def _add_ours(parser: argparse.ArgumentParser, add: Any) -> None:
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

    _add_torchrun(parser, add)
    _add_ours(parser, add)
    return parser


def parse_run(argv: Sequence[str], env: Mapping[str, str]) -> LaunchOptions:
    """Parse the command line of ``outlast run``.

    Raises:
        UsageError: something on it is wrong; the text names everything that is.
        ConfigError: the configuration is wrong.
        ScriptNotFound: there is no such script.
    """
    parser = make_parser(env)
    given = parser.parse_args(_checked(argv, parser))
    problems = _problems(given)
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


def _checked(argv: Sequence[str], parser: argparse.ArgumentParser) -> Sequence[str]:
    """Refuse an unknown option before the script with the closest known one."""
    known = {option for action in parser._actions for option in action.option_strings}
    takes_value = {
        option for action in parser._actions if action.nargs is None for option in action.option_strings
    }
    expect_value = False
    for word in argv:
        if expect_value:
            expect_value = False
            continue
        if not word.startswith("-") or word == "--":
            break
        name = word.partition("=")[0]
        if name not in known and not any(one.startswith(name) for one in known if name.startswith("--")):
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"unknown option {name}{hint} (see outlast run --help); nothing was started")
        expect_value = name in takes_value and "=" not in word
    return argv


def _problems(given: argparse.Namespace) -> list[str]:
    found: list[str] = []
    if given.nnodes not in ("1", "1:1"):
        found.append(f"--nnodes={given.nnodes}: this version runs on one node; start with --nnodes=1")
    if given.node_rank != 0:
        found.append(f"--node-rank={given.node_rank}: this version runs on one node, whose rank is 0")
    if given.rdzv_backend not in ("static", "c10d"):
        found.append(f"--rdzv-backend={given.rdzv_backend}: known are static and c10d")
    for entry in filter(None, given.rdzv_conf.split(",")):
        key = entry.partition("=")[0].strip()
        if key not in _RDZV_CONF:
            found.append(f"--rdzv-conf: unknown key {key!r}; known are {', '.join(sorted(_RDZV_CONF))}")
    if given.start_method != "spawn":
        found.append(
            f"--start-method={given.start_method}: workers are forked from a zygote; see --no-zygote"
        )
    if given.event_log_handler != "null":
        found.append(
            f"--event-log-handler={given.event_log_handler}: events go to events.jsonl in the run folder"
        )
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs", "numa_binding"):
        if getattr(given, name):
            found.append(f"--{name.replace('_', '-')}: known to torchrun, not supported by this version")
    if given.module and given.no_python:
        found.append("--module and --no-python exclude each other")
    for name in ("redirects", "tee"):
        text = getattr(given, name)
        if text is not None and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            found.append(f"--{name}={text}: expected 0, 1, 2, 3 or RANK:N,RANK:N")
    if given.preload and (given.no_zygote or given.no_python):
        found.append("--preload: there is no zygote to import it (--no-zygote or --no-python was given)")
    return found


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
