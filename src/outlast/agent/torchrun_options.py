"""The tables of options: torchrun's, outlast's own, NVRx's, and what is taken for each.

An option is taken with its meaning, or its reader refuses what this version cannot do; none is
ignored. Sources: ``get_args_parser`` of torch 2.13 (distributed/run.py); NVRx's launcher.py,
cli_args.py and config.py of 2026-08.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import fields
from typing import NoReturn

from outlast.agent.command_line import Kind, Option
from outlast.core.config import FaultTolerance

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# Keys that torchrun's static and c10d back ends read.
RDZV_CONF = frozenset(
    "rank timeout read_timeout join_timeout last_call_timeout close_timeout heartbeat_timeout keep_alive_interval "
    "keep_alive_max_attempt is_host store_type use_libuv".split()
)
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


def whole(text: str) -> int:
    """Read a count."""
    if not re.fullmatch(r"\d+", text.strip()):
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """Read a finite duration."""
    try:
        found = float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not 0 <= found < math.inf:
        raise ValueError("expected a number of seconds, 0 or more")
    return found


def some_seconds(text: str) -> float:
    """Read a duration that is not zero."""
    found = seconds(text)
    if found == 0:
        raise ValueError("expected more than 0 seconds")
    return found


def timeout(text: str) -> float:
    """Read a timeout; "off" (NVRx: "none", "null") means that nothing is watched there."""
    if text.strip().lower() in ("off", "none", "null", "inf"):
        return math.inf
    try:
        return some_seconds(text)
    except ValueError:
        raise ValueError("expected more than 0 seconds, or 'off'") from None


def factor(text: str) -> float:
    """Read a plain number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


def sections(text: str) -> dict[str, float]:
    """Read ``name:seconds,name:seconds``."""
    found: dict[str, float] = {}
    for entry in text.split(","):
        name, colon, limit = entry.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"{entry!r} is not NAME:SECONDS")
        try:
            found[name.strip()] = timeout(limit)
        except ValueError as error:
            raise ValueError(f"section {name.strip()}: {error}") from None
    return found


def streams(text: str) -> dict[int, int] | int:
    """Read torchrun's choice of streams: bits (1 stdout, 2 stderr) for all ranks or per local rank."""
    if not _STREAMS.fullmatch(text):
        raise ValueError("expected 0, 1, 2, 3 or RANK:N,RANK:N")
    if ":" not in text:
        return int(text)
    pairs = (entry.split(":") for entry in text.split(","))
    return {int(rank): int(bits) for rank, bits in pairs}


def ranks(text: str) -> tuple[int, ...]:
    """Read a list of local ranks."""
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise ValueError("expected local ranks with commas between them, such as 0,1,2")
    return tuple(int(rank) for rank in text.split(",")) if text else ()


def filters(text: str) -> tuple[str, ...]:
    """Read texts with commas between them; two commas stand for one."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def signals(text: str) -> tuple[str, ...]:
    """Read names of signals that a process can handle."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name!r} is no signal that can be handled; a name is SIGTERM, SIGUSR1, ...")
    return names


def one_node(text: str) -> str:
    """Read the number of nodes, N or MIN:MAX."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high:
        raise ValueError("expected N or MIN:MAX with 0 < MIN <= MAX")
    if high > 1:
        raise ValueError("several nodes are not supported by this version; start with --nnodes=1")
    return text


def rdzv_conf(text: str) -> str:
    """Check ``key=value,key=value``; torchrun takes any key and looks at those it knows."""
    for entry in text.split(",") if text.strip() else ():
        key, _, value = entry.partition("=")
        if key.strip() not in RDZV_CONF:
            raise ValueError(f"unknown key {key.strip()!r}; known are {', '.join(sorted(RDZV_CONF))}")
        if not value.strip():
            raise ValueError(f"key {key.strip()!r} has no value")
    return text


def only(*taken: str, why: str) -> Callable[[str], str]:
    """Return a reader that takes what this version does anyway, and says why nothing else."""

    def read(text: str) -> str:
        if text not in taken:
            raise ValueError(f"{why}; known: {', '.join(taken)}")
        return text

    return read


def refused(why: str) -> Callable[[str], NoReturn]:
    """Return a reader that takes nothing."""

    def read(_: str) -> NoReturn:
        raise ValueError(why)

    return read


_NOT_YET = refused("known to torchrun, not supported by this version")

TORCHRUN: tuple[Option, ...] = (
    Option("nnodes", "nodes, N or MIN:MAX; this version runs on one", one_node, "1:1"),
    Option("nproc-per-node", "ranks: a number, cpu, gpu or auto (default 1)", str, "1"),
    Option(
        "rdzv-backend",
        "static or c10d; on one node nothing has to meet",
        only("static", "c10d", why="on one node nothing has to meet, other back ends are not supported"),
        "static",
    ),
    Option("rdzv-endpoint", "accepted; on one node nothing has to meet", str, ""),
    Option("rdzv-id", "the run id (default: drawn, then kept in the run folder)", str, "none"),
    Option("rdzv-conf", "accepted if torchrun knows the keys; on one node nothing waits", rdzv_conf, ""),
    Option("standalone", "one node, as always here", kind=Kind.SWITCH, default=False),
    Option("max-restarts", "restarts without progress in between (default 3)", whole),
    Option("monitor-interval", "upper bound of --ft-workload-check-interval", some_seconds),
    Option(
        "start-method",
        "only spawn",
        only("spawn", why="ranks are forked from a warm process, or started cold with --no-zygote"),
        "spawn",
    ),
    Option(
        "event-log-handler",
        "only null",
        only("null", why="events go to events.jsonl in the run folder"),
        "null",
    ),
    Option("role", "name of the ranks' role (default: default)", str, "default"),
    Option("module", "the script is a module's name", kind=Kind.SWITCH, default=False, also=("-m",)),
    Option("no-python", "the script is a program; it is started cold", kind=Kind.SWITCH, default=False),
    Option("run-path", "the script is a file; wins over --no-python", kind=Kind.SWITCH, default=False),
    Option("log-dir", "folder for the logs of the ranks (default: logs/ in the run folder)", str, ""),
    Option("redirects", "streams that go to files only: 0, 1, 2, 3 or 0:1,1:2", streams, also=("-r",)),
    Option("tee", "streams that go to files and to the console (default 3)", streams, also=("-t",)),
    Option("local-ranks-filter", "local ranks that the console shows (default: all)", ranks, ()),
    Option("duplicate-stdout-filters", "texts: shown lines with one of them are copied to a file", filters, ()),
    Option("duplicate-stderr-filters", "the same for stderr", filters, ()),
    Option("node-rank", "0 on one node", only("0", why="this version runs on one node"), "0"),
    Option("master-addr", "accepted; the ranks meet on loopback", str, "127.0.0.1"),
    Option("master-port", "accepted; each generation has a free port of its own", whole),
    Option("local-addr", "accepted; the ranks meet on loopback", str),
    Option("logs-specs", "refused", _NOT_YET, variables=()),
    Option("numa-binding", "refused", _NOT_YET, variables=()),
    Option("signals-to-handle", f"signals that end the job ({','.join(DEFAULT_SIGNALS)})", signals, DEFAULT_SIGNALS),
    Option(
        "shutdown-timeout",
        "the same as --ft-workers-stop-timeout",
        seconds,
        variables=("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ),
    Option("virtual-local-rank", "LOCAL_RANK=0 and one visible GPU for each rank", kind=Kind.SWITCH, default=False),
)

OURS: tuple[Option, ...] = (
    Option("run-dir", "run folder (default outlast-runs/<rdzv-id or script>)", str, ""),
    Option(
        "config",
        "TOML file with [fault_tolerance] and [checkpoints]",
        also=("--ft-cfg-path", "--ft-cfg_path", "--ft_cfg_path"),
        variables=("PET_CONFIG", "PET_FT_CFG_PATH"),
    ),
    Option("preload", "module that is imported once, for all ranks; several times", kind=Kind.LIST, default=()),
    Option("no-zygote", "start every rank as a new interpreter, as torchrun does", kind=Kind.SWITCH, default=False),
    Option(
        "log-line-prefix-template",
        "prefix of shown lines; ${role_name}, ${rank}, ${local_rank}",
        default="",
        variables=("PET_LOG_LINE_PREFIX_TEMPLATE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    ),
)

# How the value of a field of FaultTolerance is read; max_restarts is torchrun's option.
_READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "initial_rank_heartbeat_timeout": (timeout, "seconds from spawn to first pulse, or off (default: learned)"),
    "rank_heartbeat_timeout": (timeout, "seconds between two pulses, or off (default: learned)"),
    "rank_section_timeouts": (sections, "name:seconds,name:seconds; others are learned"),
    "rank_out_of_section_timeout": (timeout, "seconds between two sections, or off (default: learned)"),
    "calc_ft_timeouts": (str, "learn the timeouts that are not fixed (default: yes)"),
    "safety_factor": (factor, "learned timeout over the 99th percentile"),
    "num_warmup_iterations": (whole, "first steps of a generation that teach nothing"),
    "workload_check_interval": (some_seconds, "longest time in seconds between two looks at the ranks"),
    "max_restarts_per_day": (whole, "restarts in any 24 h"),
    "workers_stop_timeout": (seconds, "seconds from SIGTERM to SIGKILL when the job is stopped"),
    "capture_stacks": (seconds, "seconds for collecting stacks of a hung rank; 0: none"),
}


def _fault_tolerance() -> tuple[Option, ...]:
    """Return an option for each field that is not torchrun's; a test compares with the dataclass."""
    found = []
    for spec in fields(FaultTolerance):
        if spec.name not in _READERS:
            continue
        read, text = _READERS[spec.name]
        toggle = spec.name == "calc_ft_timeouts"
        plain = isinstance(spec.default, (int, float)) and not toggle
        alias = spec.name == "workers_stop_timeout"  # NVRx's launcher has it without the prefix
        found.append(
            Option(
                f"ft-{spec.name.replace('_', '-')}",
                f"{text} (default {spec.default})" if plain else text,
                read,
                kind=Kind.TOGGLE if toggle else Kind.VALUE,
                also=("--workers-stop-timeout", "--workers_stop_timeout") if alias else (),
                variables=("PET_FT_WORKERS_STOP_TIMEOUT", "PET_WORKERS_STOP_TIMEOUT") if alias else None,
            )
        )
    return tuple(found)


FAULT_TOLERANCE = _fault_tolerance()

_UNSUPPORTED_NVRX = """
    attribution-analysis-backend attribution-compute-timeout attribution-endpoint attribution-export-url
    attribution-llm-api-key-file attribution-llm-base-url attribution-llm-model attribution-log-level
    attribution-startup-timeout attribution-stop-action check-remaining-processes checkpoint-iteration-file
    cycle-info-dir cycle-info-job-id enable-dist-storage-healthcheck enable-log-server enable-nic-healthcheck
    enable-nic-monitor gpu-memory-poll-interval gpu-memory-reclaim-timeout gpu-memory-tolerance-mb
    install-exception-hook link-down-path-template link-state-path-template log-aggregator-count
    log-leaf-max-queue-chunks log-level log-server-graceful-shutdown-timeout log-server-log-prefix log-server-port
    max-no-progress-cycles min-progress-iterations node-health-check-endpoint node-health-check-interval
    numa-bind-strict nvrx-logfile pci-topo-file per-cycle-applog-prefix rdzv-impl restart-check-interval segment
    segment-health-check-dir skip-section-response storage-health-check-path
""".split()

_NVRX_ONLY = refused("known to NVRx, not supported by this version")

NVRX: tuple[Option, ...] = (
    Option("term-timeout", "", refused("known to NVRx; here it is --ft-workers-stop-timeout"), variables=()),
    Option("ft-ignore-missing-cfg", "", refused("known to NVRx; no file is needed here"), kind=Kind.SWITCH, variables=()),
    Option(
        "ft-restart-policy",
        "",
        only("any-failed", why="any failed rank restarts all of them"),
        variables=(),
    ),
    Option(
        "ft-rank-termination-signal",
        "",
        only("SIGKILL", why="after a fault the ranks are ended at once"),
        variables=(),
    ),
    Option(
        "ft-no-restart-exit-code",
        "",
        only("93", why="exit codes are fixed, see the reference"),
        variables=(),
    ),
    *(Option(f"ft-{name}", "", _NVRX_ONLY, variables=()) for name in _UNSUPPORTED_NVRX),
)

GROUPS = {
    "torchrun's options": TORCHRUN,
    "outlast's own": OURS,
    "hangs and restarts, under NVRx's names": FAULT_TOLERANCE,
    "known to NVRx": NVRX,
}
