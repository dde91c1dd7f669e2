"""torchrun's own options: each is taken with its meaning, or refused by name.

Source: torch 2.13, distributed/run.py; NVRx's names from its ft_launcher at 0.7.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from string import Template

from outlast.errors import UsageError

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
_START_METHODS = ("spawn", "fork", "forkserver")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")  # torch 2.13, elastic/events/handlers.py
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")  # torch 2.13, numa/binding.py
PREFIX_NAMES = ("role_name", "rank", "local_rank")


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
    add("--start-method", default="spawn", help="spawn, fork or forkserver; without effect on scripts")
    add("--event-log-handler", default="null", help="null, or console: torchelastic's events on stderr")
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
    add(
        "--duplicate-stdout-filters",
        default="",
        help="texts with commas; shown lines with one of them are copied",
    )
    add("--duplicate-stderr-filters", default="", help="the same for stderr")
    add("--node-rank", type=int, default=None, help="place of this node's ranks, with --rdzv-backend static")
    add("--master-addr", default=None, help="host of node rank 0 (default 127.0.0.1)")
    add("--master-port", type=int, default=None, help="port where ranks meet there (static default 29500)")
    add("--local-addr", default=None, help="address by which other nodes reach this one")
    add("--logs-specs", default=None, help="only default: a class for torchrun's agent cannot be used")
    add(
        "--numa-binding",
        default=None,
        help="node, socket, exclusive or core-complex: processors near the GPU",
    )
    add("--signals-to-handle", default=DEFAULT_SIGNALS, help="signals that end the job")
    add("--shutdown-timeout", type=int, default=None, help="the same as --ft-workers-stop-timeout")
    add("--virtual-local-rank", flag=True, help="LOCAL_RANK=0 for every rank, one visible GPU each")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def refuse_unknown(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Refuse an unknown option before the script, with the closest known one; return the script's place.

    Raises:
        UsageError: names the option.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    takes_value = {
        option for action in parser._actions if action.nargs is None for option in action.option_strings
    }
    expect_value = False
    for at, word in enumerate(argv):
        if expect_value:
            expect_value = False
            continue
        if not word.startswith("-") or word == "--":
            return at + (word == "--")
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
    return len(argv)


def signal_names(text: str) -> tuple[str, ...]:
    """Return the signals in a list with commas and, perhaps, spaces; each once."""
    return tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))


def problems(given: argparse.Namespace) -> list[str]:
    """Return a line for each option that cannot be carried out."""
    return [*_rendezvous(given), *_not_supported(given), *_malformed(given), *_of_the_logs(given)]


def _rendezvous(given: argparse.Namespace) -> Iterator[str]:
    if given.rdzv_backend not in ("static", "c10d") and not given.standalone:
        yield (
            f"--rdzv-backend={given.rdzv_backend}: known are static and c10d; agents meet without another"
            " service, so leave it out"
        )
    for entry in _entries(given.rdzv_conf):
        key, _, value = (part.strip() for part in entry.partition("="))
        if not (key and value):
            yield f"--rdzv-conf: {entry!r}: expected KEY=VALUE"


def _entries(text: str) -> Iterator[str]:
    return filter(None, (entry.strip() for entry in text.strip().split(",")))


def _not_supported(given: argparse.Namespace) -> Iterator[str]:
    for name, value, known in (
        ("start-method", given.start_method, _START_METHODS),
        ("event-log-handler", given.event_log_handler, EVENT_HANDLERS),
        ("numa-binding", given.numa_binding, (None, *NUMA_BINDINGS)),
    ):
        if value not in known:
            yield f"--{name}={value}: known are {', '.join(filter(None, known))}"
    if given.logs_specs not in (None, "default"):
        yield (
            f"--logs-specs={given.logs_specs}: only default; a LogsSpecs class is a part of torchrun's agent,"
            " so use --log-dir, --redirects, --tee and the duplicate filters"
        )
    if given.module and given.no_python and not given.run_path:
        yield "--module and --no-python exclude each other"
    if given.preload and (given.no_zygote or (given.no_python and not given.run_path)):
        yield "--preload: there is no zygote to import it (--no-zygote or --no-python was given)"


def _malformed(given: argparse.Namespace) -> Iterator[str]:
    names = signal_names(given.signals_to_handle)
    if not names:
        yield "--signals-to-handle: names no signal, so nothing could end the job in order"
    for name in names:
        if name not in signal.Signals.__members__:
            yield f"--signals-to-handle: {name!r} is no signal"
        elif name in _NEVER_HANDLED:
            yield f"--signals-to-handle: {name} cannot be handled by any process"
    if given.monitor_interval is not None and not 0 < given.monitor_interval < math.inf:
        yield f"--monitor-interval={given.monitor_interval}: not a positive number of seconds"


def _of_the_logs(given: argparse.Namespace) -> Iterator[str]:
    for name in ("redirects", "tee"):
        text = getattr(given, name)
        if text is not None and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            yield f"--{name}={text}: expected 0, 1, 2, 3 or RANK:N,RANK:N"
    for rank in filter(None, given.local_ranks_filter.split(",")):
        if not rank.strip().isdecimal():
            yield f"--local-ranks-filter: {rank!r} is no rank"
    folder = given.log_dir
    if folder and folder != os.devnull and os.path.exists(folder) and not os.path.isdir(folder):
        yield f"--log-dir={folder}: is a file, expected a folder"


def caveats(given: argparse.Namespace, ranks: int, template: str) -> list[str]:
    """Return a line for each part of torchrun's options that is accepted and has no effect, as there.

    Args:
        given: the command line.
        ranks: on this node.
        template: of the prefix of shown lines.
    """
    return [*_idle_conf(given), *_idle_ranks(given, ranks), *_idle_names(template)]


def _idle_conf(given: argparse.Namespace) -> Iterator[str]:
    for entry in _entries(given.rdzv_conf):
        key = entry.partition("=")[0].strip()
        if key not in _RDZV_CONF:
            close = difflib.get_close_matches(key, sorted(_RDZV_CONF), n=1)
            yield f"--rdzv-conf: {key} has no effect{f'; did you mean {close[0]}?' if close else ''}"


def _idle_ranks(given: argparse.Namespace, ranks: int) -> Iterator[str]:
    for name in ("redirects", "tee"):
        text = getattr(given, name) or ""
        named = [int(entry.partition(":")[0]) for entry in text.split(",") if ":" in entry]
        for rank in sorted({rank for rank in named if rank >= ranks}):
            yield f"--{name}={text}: this node has no local rank {rank}; that part has no effect"
    shown = {int(rank) for rank in filter(None, given.local_ranks_filter.split(","))}
    if shown and not shown & set(range(ranks)):
        yield (
            f"--local-ranks-filter={given.local_ranks_filter}: this node has local ranks 0 to {ranks - 1},"
            " so the console shows none of them"
        )


def _idle_names(template: str) -> Iterator[str]:
    for found in Template.pattern.finditer(template):
        name = found["named"] or found["braced"]
        if name and name not in PREFIX_NAMES:
            yield (
                f"the prefix template names {name!r}, which is shown as it stands; known are"
                f" {', '.join(PREFIX_NAMES)}"
            )


def filters(text: str) -> tuple[str, ...]:
    """Return the texts in a list with commas; two commas stand for one in a text, as under torchrun."""
    mark = "\0"
    found = (one.replace(mark, ",") for one in text.replace(",,", mark).split(","))
    return tuple(one for one in found if one)
