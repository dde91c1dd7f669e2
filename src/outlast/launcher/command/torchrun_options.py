"""The values of torchrun's own options: each is taken with its meaning, or refused by name.

Source: torch 2.13, distributed/run.py; NVRx's names from its ft_launcher at 0.7.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import signal
from collections.abc import Iterator
from string import Template

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
_NEVER_HANDLED = ("SIGKILL", "SIGSTOP")
_START_METHODS = ("spawn", "fork", "forkserver")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")  # torch 2.13, elastic/events/handlers.py
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")  # torch 2.13, numa/binding.py
PREFIX_NAMES = ("role_name", "rank", "local_rank")


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
    for option, value in (("--preload", given.preload), ("--warm-imports", given.warm_imports)):
        if value and (given.no_zygote or (given.no_python and not given.run_path)):
            yield f"{option}: there is no zygote to import it (--no-zygote or --no-python was given)"


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
