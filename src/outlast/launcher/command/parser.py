"""The command line of ``outlast run``: its options, their spellings, and its help page.

This module imports as little as it can, so that the page is printed in the time in which an interpreter
starts; defaults of ``[fault_tolerance]`` are repeated here for that reason. What the options mean is in
:mod:`outlast.launcher.command.options`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from outlast.errors import UsageError

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
PING_TIMEOUT = 5.0
_NVRX_ONLY = frozenset(
    (
        "--ft-rank-termination-signal",
        "--ft-log-level",
        "--ft-node-health-check-interval",
        "--ft-node-health-check-endpoint",
        "--ft-enable-nic-monitor",
        "--ft-enable-nic-healthcheck",
        "--ft-gpu-memory-reclaim-timeout",
        "--ft-max-no-progress-cycles",
        "--ft-min-progress-iterations",
        "--ft-checkpoint-iteration-file",
        "--ft-restart-policy",
        "--ft-rdzv-impl",
        "--ft-segment",
        "--ft-per-cycle-applog-prefix",
        "--ft-enable-log-server",
        "--ft-cycle-info-dir",
        "--ft-attribution-endpoint",
        "--ft-no-restart-exit-code",
        "--ft-restart-check-interval",
        "--ft-skip-section-response",
    )
)
_KEYS_OF_MEGATRON = {  # options of Megatron-LM and Megatron Bridge: keys of ours with another name
    "exit_signal": "exit_signals",
    "exit_signal_handler": "enable_exit_handler",
    "exit_signal_handler_for_dataloader": "enable_exit_handler_for_data_loader",
    "non_persistent_ckpt_type": "non_persistent_save_interval",
    "non_persistent_local_ckpt_algo": "ckpt_fully_parallel_save",
    "num_in_job_restarts": "max_restarts",
}
_EXAMPLES = """\
examples:
  outlast run --standalone --nproc-per-node=4 train.py --lr 1e-3
  outlast run --nnodes=2 --nproc-per-node=8 --rdzv-endpoint=node0:29400 --rdzv-id=job1 train.py

Options end at the script; what follows is its own. --a_b means --a-b, and PET_A_B in the
environment is an option's default, as under torchrun. See docs/reference/options.md."""
_EXPECTED: Mapping[Callable[[str], Any], str] = {int: "expected a whole number", float: "expected a number"}


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
    """Collects everything that is wrong with the values, so that it can be reported at once."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.problems: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Refuse a command line that cannot be split into options and a script."""
        raise UsageError(f"{message}; see outlast run --help")

    def reading(self, flag: str, variable: tuple[str, str | None], read: Callable[[str], Any]) -> Any:
        """Return a reader that records what it cannot read, under the flag or variable it came from."""

        def take(text: str) -> Any:
            try:
                return read(text)
            except ValueError as error:
                name, value = variable
                why = _EXPECTED.get(read, str(error))
                self.problems.append(f"{name if text == value else flag}={text}: {why}")
                return None

        return take


class _Options:
    """Adds options to a parser, group by group, in both spellings and with their ``PET_*`` variable."""

    def __init__(self, parser: Parser, env: Mapping[str, str]) -> None:
        self._parser, self._env = parser, env
        self._group: Any = parser

    def group(self, title: str) -> None:
        """Begin a group of the help page; the options added next belong to it."""
        self._group = self._parser.add_argument_group(title)

    def add(self, *names: str, flag: bool = False, **how: Any) -> None:
        """Add one option; ``flag`` means that it takes no value."""
        spellings = [spelling for name in names for spelling in _spellings(name)]
        long = names[0] if names[0].startswith("--") else names[-1]
        dest = long.lstrip("-").replace("-", "_")
        variable = f"PET_{dest.upper()}"
        value = self._env.get(variable)
        reading = (long, (variable, value))
        if flag:
            how |= {"action": "store_true", "default": False}
        if value is not None:
            if flag or how.get("action") is argparse.BooleanOptionalAction:
                how["default"] = self._parser.reading(*reading, _switch)(value)
            else:
                how["default"] = list(filter(None, value.split(","))) if how.get("action") else value
        if "type" in how:
            how["type"] = self._parser.reading(*reading, how["type"])
        self._group.add_argument(*spellings, dest=dest, **how)

    def timeout(self, field: str, read: Callable[[str], Any] | None = None, text: str = "") -> None:
        """Add the option of a field of ``[fault_tolerance]``."""
        self.add(
            "--ft-" + field.replace("_", "-"),
            type=read or _timeout,
            default=None,
            help=text or "seconds, or off",
        )


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
        usage="outlast run [OPTION ...] SCRIPT [ARGUMENT ...]",
        description="Start a training script on all ranks of this node and restart it after faults.",
        epilog=_EXAMPLES,
        formatter_class=OneSpelling,
    )
    parser.add_argument("training_script", help="path of a script, or a module with -m, or a program")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = _Options(parser, env)
    options.group("options that most jobs need")
    _add_usual(options)
    options.group("advanced: several nodes")
    _add_nodes(options)
    options.group("advanced: workers")
    _add_workers(options)
    options.group("advanced: logs and metrics")
    _add_logs(options)
    options.group("advanced: hang detection and restarts (keys of [fault_tolerance])")
    _add_fault_tolerance(options)
    return parser


def _add_usual(options: _Options) -> None:
    add = options.add
    add("--nnodes", default="1:1", help="nodes: N, or MIN:MAX")
    add("--nproc-per-node", default="1", help="ranks: a number, cpu, gpu or auto, counted as torch counts")
    add("--standalone", flag=True, help="one node")
    add("--rdzv-endpoint", default="", help="HOST:PORT of one node, the same on each node")
    add("--rdzv-id", default="none", help="the run id")
    add("--spares", type=int, default=0, help="nodes that wait to replace a lost one")
    add("-m", "--module", flag=True, help="the script is a module's name")
    add("--run-dir", default=None, help="run folder (default outlast-runs/<rdzv-id or script>)")
    add(
        "--config",
        "--ft-cfg-path",
        default=None,
        help="TOML file with [fault_tolerance], [checkpoints], ..., or YAML as for ft_launcher",
    )
    add("--max-restarts", type=int, default=None, help="restarts without progress in between (default 3)")
    options.timeout(
        "rank_heartbeat_timeout", text="longest silence of a rank: seconds, or off; default learned"
    )
    options.timeout(
        "initial_rank_heartbeat_timeout",
        text="longest time from a rank's start to its first heartbeat: seconds, or off; default learned",
    )
    options.timeout(
        "workers_stop_timeout",
        _stop_time,
        "from SIGTERM to SIGKILL of the ranks when the job is stopped: seconds, or off; default 15",
    )
    add("-t", "--tee", default=None, help="streams that go to files and to the console; default 3")
    add(
        "--log-dir",
        default=None,
        help="folder for the logs of the ranks, below it one a launch (default: logs in the run folder)",
    )
    add("--preflight", default="auto", help="checks before a node joins: auto, full or off")
    add(
        "--scheduler", default="", help="take nodes from slurm, kubernetes, ray or another, and requeue there"
    )


def _add_nodes(options: _Options) -> None:
    add = options.add
    add("--rdzv-backend", default="static", help="static or c10d: the same here")
    add("--rdzv-conf", default="", help="torchrun's keys: join_timeout=600, last_call_timeout=30, ...")
    add("--node-rank", type=int, default=None, help="place of this node's ranks, with --rdzv-backend static")
    add("--master-addr", default=None, help="host of node rank 0 (default 127.0.0.1)")
    add("--master-port", type=int, default=None, help="port where ranks meet there (static default 29500)")
    add("--local-addr", default=None, help="address by which other nodes reach this one")
    add("--node-name", default="", help="name of this node (default: OUTLAST_NODE, or the host's name)")
    add("--node-group", default="", help="nodes of one group are used together or not at all")
    add("--node-group-size", type=int, default=1, help="nodes of a group")
    add(
        "--token-file",
        default="",
        help="file with the secret that admits a node to the job (default: in the run folder)",
    )
    add(
        "--tls",
        default="",
        help="CERTIFICATE,KEY[,AUTHORITY]: PEM files for TLS between agents and between checkpoint writers",
    )
    add(
        "--ping-timeout",
        type=float,
        default=PING_TIMEOUT,
        help=f"seconds of silence after which a node is lost; default {PING_TIMEOUT:g}",
    )


def _add_workers(options: _Options) -> None:
    add = options.add
    add("--no-python", flag=True, help="the script is a program; started without the zygote")
    add("--run-path", flag=True, help="run the script in this interpreter whatever PYTHON_EXEC says")
    add("--preload", default=[], action="append", help="module that the zygote imports besides torch")
    add("--warm-imports", flag=True, help="learn what the ranks import, and import it before a restart")
    add("--no-zygote", flag=True, help="start every rank as a new interpreter, as torchrun does")
    add("--start-method", default="spawn", help="spawn, fork or forkserver; without effect on scripts")
    add("--role", default="default", help="name of the ranks' role")
    add(
        "--numa-binding",
        default=None,
        help="node, socket, exclusive or core-complex: processors near the GPU",
    )
    add("--virtual-local-rank", flag=True, help="LOCAL_RANK=0 for every rank, one visible GPU each")
    add("--signals-to-handle", default=DEFAULT_SIGNALS, help="signals that end the job")
    add("--shutdown-timeout", type=int, default=None, help="the same as --ft-workers-stop-timeout")


def _add_logs(options: _Options) -> None:
    add = options.add
    add("-r", "--redirects", default=None, help="streams that go to files: 0, 1, 2, 3 or 0:1,1:2")
    add("--local-ranks-filter", default="", help="local ranks shown on the console; others are silent there")
    add(
        "--duplicate-stdout-filters",
        default="",
        help="texts with commas; shown lines with one of them are copied",
    )
    add("--duplicate-stderr-filters", default="", help="the same for stderr")
    add(
        "--log-line-prefix-template",
        default="",
        help="prefix of shown lines; ${role_name}, ${rank}, ${local_rank}",
    )
    add("--event-log-handler", default="null", help="null, or console: torchelastic's events on stderr")
    add(
        "--metrics-port",
        default="",
        help="[HOST:]PORT where Prometheus finds this node's metrics (default host 127.0.0.1)",
    )
    add("--logs-specs", default=None, help="only default: a class for torchrun's agent cannot be used")


def _add_fault_tolerance(options: _Options) -> None:
    options.timeout("rank_section_timeouts", _sections, "NAME:SECONDS,NAME:SECONDS")
    options.timeout("rank_out_of_section_timeout", text="longest time between two sections: seconds, or off")
    options.add(
        "--ft-calc-ft-timeouts",
        default=None,
        action=argparse.BooleanOptionalAction,
        help="learn the timeouts that are not fixed",
    )
    options.timeout(
        "safety_factor",
        _positive,
        "learned timeout over the observed 99th percentile; default 5",
    )
    options.timeout(
        "num_warmup_iterations",
        int,
        "first steps, which teach nothing; default 5",
    )
    options.timeout(
        "workload_check_interval",
        _positive,
        "seconds between two looks at the ranks; default 0.25",
    )
    options.add(
        "--monitor-interval", type=float, default=None, help="the same as --ft-workload-check-interval"
    )
    options.timeout(
        "max_restarts_per_day", int, "restarts in any 24 h; default 20, or --max-restarts where that is more"
    )
    options.timeout(
        "busy_rank_timeout",
        text="how much longer a rank that computes may keep others waiting: seconds, or off; default 300",
    )
    options.timeout(
        "capture_stacks",
        _capture_time,
        "time to collect stacks of a hung rank: seconds, or off; default 1",
    )


def parse(argv: Sequence[str], env: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values on a command line, and a line for each that cannot be read.

    Raises:
        UsageError: an option is unknown, or there is no script.
        SystemExit: the help page was asked for and printed.
    """
    parser = make_parser(env)
    script_at = refuse_unknown(argv, parser)
    given = parser.parse_args(argv[: script_at + 1])
    given.training_script_args = list(argv[script_at + 1 :])  # never taken for abbreviations of our options
    return given, parser.problems


def refuse_unknown(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Refuse unknown options before the script, each with the closest known one; return the script's place.

    Raises:
        UsageError: names the options.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    takes_value = {
        option for action in parser._actions if action.nargs is None for option in action.option_strings
    }
    expect_value, script_at, unknown = False, len(argv), []
    for at, word in enumerate(argv):
        if expect_value:
            expect_value = False
            continue
        if not word.startswith("-") or word == "--":
            script_at = at + (word == "--")
            break
        if word[:2] in known and word[:2] != "--":
            expect_value = word in takes_value  # "-t3" has its value attached
            continue
        name = word.partition("=")[0]
        if name.replace("_", "-") in _NVRX_ONLY:
            unknown.append(f"{name}: known to NVRx, not supported by this version")
            continue
        meant = {name} & known or {one for one in known if name.startswith("--") and one.startswith(name)}
        if not meant:
            unknown.append(f"unknown option {name}{_hint(name, known)} (see outlast run --help)")
            continue
        expect_value = meant <= takes_value and "=" not in word
    if unknown:
        raise UsageError(f"{'; '.join(unknown)}; nothing was started")
    return script_at


def options_after_script(args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return options of ``outlast run`` that stand after the script and go to it.

    Names of one word, such as ``--config``, are likely the script's own.
    """
    known = {option for action in make_parser(env)._actions for option in action.option_strings}
    names = (word.partition("=")[0] for word in args if word.startswith("--"))
    found = {name for name in names if name.replace("_", "-") in known or name in known}
    return sorted(name for name in found if name == "--nnodes" or re.search("[-_]", name[2:]))


def _hint(name: str, known: set[str]) -> str:
    """Name what was meant: an option spelt otherwise, a key of the configuration, or the closest option."""
    import difflib  # not for a page of help
    from dataclasses import fields

    from outlast import settings

    key = name[2:].replace("-", "_")
    key = _KEYS_OF_MEGATRON.get(key, key)
    flag = key.replace("_", "-")
    close = [option for option in (f"--{flag}", f"--ft-{flag}") if option in known]
    for table, kind in settings.TABLES.items():
        if not close and "_" in key and key in [spec.name for spec in fields(kind)]:
            return f"; {key} is a key of [{table}] in the file of --config"
    close = close or difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _off(text: str) -> bool:
    return text.strip().lower() in ("off", "none", "inf")


def _timeout(text: str) -> float:
    """Read a timeout of hang detection: 0 or less would take every rank for hung."""
    seconds = math.inf if _off(text) else _number(text, "expected a positive number of seconds, or off")
    if not seconds > 0:
        raise ValueError("expected a positive number of seconds, or off")
    return seconds


def seconds(text: str) -> float:
    """Read a time that may be 0.

    Raises:
        ValueError: the text is none.
    """
    number = _number(text, "expected a number of seconds")
    if not 0 <= number < math.inf:
        raise ValueError("expected a number of seconds")
    return number


def _stop_time(text: str) -> float:
    return math.inf if _off(text) else seconds(text)


def _capture_time(text: str) -> float:
    return 0.0 if _off(text) else seconds(text)


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
        name, colon, time = entry.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"{entry!r} is not NAME:SECONDS")
        found[name.strip()] = _timeout(time)
    return found
