"""torchrun's own options: each is taken with its meaning, or refused by name.

Source: torch 2.13, distributed/run.py; NVRx's names from its ft_launcher at 0.7.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence

from outlast.core.errors import UsageError

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_RDZV_CONF = frozenset(
    (
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
    )
)
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
_NEVER_HANDLED = ("SIGKILL", "SIGSTOP")
_NOT_HERE = ("duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs", "numa_binding")


def add_to(parser: argparse.ArgumentParser, add: Callable[..., None]) -> None:
    """Add torchrun's options; ``add`` knows both spellings and the PET variable."""
    add("--nnodes", default="1:1", help="nodes: N, or MIN:MAX")
    add("--nproc-per-node", default="1", help="ranks: a number, cpu, gpu or auto, counted as torch counts")
    add("--rdzv-backend", default="static", help="static or c10d: the same here")
    add("--rdzv-endpoint", default="", help="HOST:PORT of one node, the same on each")
    add("--rdzv-id", default="none", help="the run id")
    add("--rdzv-conf", default="", help="torchrun's keys: join_timeout=600, last_call_timeout=30, ...")
    add("--standalone", flag=True, help="one node")
    add("--max-restarts", type=int, default=None, help="restarts without progress in between (default 3)")
    add(
        "--monitor-interval",
        type=float,
        default=None,
        help="time between two looks at the ranks, as --ft-workload-check-interval",
    )
    add("--start-method", default="spawn", help="only spawn is accepted")
    add("--event-log-handler", default="null", help="only null: events go to events.jsonl in the run folder")
    add("--role", default="default", help="name of the ranks' role")
    add("-m", "--module", flag=True, help="the script is a module's name")
    add("--no-python", flag=True, help="the script is a program; started cold")
    add("--run-path", flag=True, help="as a script, in this interpreter whatever PYTHON_EXEC says")
    add(
        "--log-dir",
        default=None,
        help="folder for the logs of the ranks, below it one a launch (default: logs in the run folder)",
    )
    add("-r", "--redirects", default=None, help="streams that go to files: 0, 1, 2, 3 or 0:1,1:2")
    add("-t", "--tee", default=None, help="streams that go to files and to the console; default 3")
    add("--local-ranks-filter", default="", help="local ranks shown on the console; others are silent there")
    add("--duplicate-stdout-filters", default="", help="refused: not supported by this version")
    add("--duplicate-stderr-filters", default="", help="refused: not supported by this version")
    add("--node-rank", type=int, default=0, help="accepted; ranks follow the topology")
    add("--master-addr", default="127.0.0.1", help="with --master-port, as --rdzv-endpoint")
    add("--master-port", type=int, default=None, help="each generation has a port of its own")
    add("--local-addr", default=None, help="address by which other nodes reach this one")
    add("--logs-specs", default=None, help="refused: not supported by this version")
    add("--numa-binding", default=None, help="refused: not supported by this version")
    add("--signals-to-handle", default=DEFAULT_SIGNALS, help="signals that end the job")
    add("--shutdown-timeout", type=int, default=None, help="the same as --ft-workers-stop-timeout")
    add("--virtual-local-rank", flag=True, help="LOCAL_RANK=0 for every rank, one visible GPU each")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def refuse_unknown(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse an unknown option before the script, with the closest known one.

    Raises:
        UsageError: names the option.
    """
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
        if word[:2] in known and word[:2] != "--":
            expect_value = word in takes_value  # "-t3" has its value attached
            continue
        name = word.partition("=")[0]
        if name.replace("_", "-") in _NVRX_ONLY:
            raise UsageError(f"{name}: known to NVRx, not supported by this version; nothing was started")
        if name not in known and not any(one.startswith(name) for one in known if name.startswith("--")):
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"unknown option {name}{hint} (see outlast run --help); nothing was started")
        expect_value = name in takes_value and "=" not in word


def signal_names(text: str) -> tuple[str, ...]:
    """Return the signals in a list with commas and, perhaps, spaces; each once."""
    return tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))


def problems(given: argparse.Namespace) -> list[str]:
    """Return a line for each option that cannot be carried out."""
    return [*_rendezvous(given), *_not_supported(given), *_malformed(given)]


def _rendezvous(given: argparse.Namespace) -> Iterator[str]:
    if given.rdzv_backend not in ("static", "c10d"):
        yield f"--rdzv-backend={given.rdzv_backend}: known are static and c10d"
    for entry in filter(None, given.rdzv_conf.split(",")):
        key = entry.partition("=")[0].strip()
        if key not in _RDZV_CONF:
            yield f"--rdzv-conf: unknown key {key!r}; known are {', '.join(sorted(_RDZV_CONF))}"


def _not_supported(given: argparse.Namespace) -> Iterator[str]:
    if given.start_method != "spawn":
        yield f"--start-method={given.start_method}: workers are forked from a zygote; see --no-zygote"
    if given.event_log_handler != "null":
        yield f"--event-log-handler={given.event_log_handler}: events go to events.jsonl in the run folder"
    for name in _NOT_HERE:
        if getattr(given, name):
            yield f"--{name.replace('_', '-')}: known to torchrun, not supported by this version"
    kinds = [name for name in ("module", "no_python", "run_path") if getattr(given, name)]
    if len(kinds) > 1:
        yield f"{' and '.join(f'--{name}'.replace('_', '-') for name in kinds)} exclude each other"
    if given.preload and (given.no_zygote or given.no_python):
        yield "--preload: there is no zygote to import it (--no-zygote or --no-python was given)"


def _malformed(given: argparse.Namespace) -> Iterator[str]:
    for name in ("redirects", "tee"):
        text = getattr(given, name)
        if text is not None and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            yield f"--{name}={text}: expected 0, 1, 2, 3 or RANK:N,RANK:N"
    for rank in filter(None, given.local_ranks_filter.split(",")):
        if not rank.isdigit():
            yield f"--local-ranks-filter: {rank!r} is no rank"
    for name in signal_names(given.signals_to_handle):
        if name not in signal.Signals.__members__:
            yield f"--signals-to-handle: {name!r} is no signal"
        elif name in _NEVER_HANDLED:
            yield f"--signals-to-handle: {name} cannot be handled by any process"
    if given.log_dir and os.path.exists(given.log_dir) and not os.path.isdir(given.log_dir):
        yield f"--log-dir={given.log_dir}: is a file, expected a folder"
    if given.monitor_interval is not None and not given.monitor_interval > 0:
        yield f"--monitor-interval={given.monitor_interval}: not a positive number of seconds"
