"""``outlast preflight``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast import files, settings
from outlast.errors import ExitCode, NodeUnfit, UsageError
from outlast.health.agent import bandwidth, preflight
from outlast.health.agent.bandwidth import Bandwidth
from outlast.health.agent.preflight import PreflightOptions
from outlast.health.policy.preflight import CHECK_OF_LIMIT, Check, Finding, Preflight, unfit, with_limit
from outlast.observe.progress import working

_SKIPPED = [check.value for check in Check if check is not Check.BANDWIDTH]
_DESCRIPTION = """\
Check whether this node can run a job: its folders, memory, ports, clock, limits and devices. Exit code 0:
it can; 69: it cannot, and one sentence names all failed checks."""


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast preflight ...`` and return its exit code.

    Raises:
        NodeUnfit: names all failed checks.
        UsageError: an option is wrong, or cannot take effect.
    """
    given = _parser().parse_args(arguments)
    options = _options(given)
    measure = _measurement(given)
    deadline = time.monotonic() + given.timeout
    probe = preflight.begin(options)
    with working("checking this node", not given.json):
        findings = preflight.quick(options, deadline)
    if probe:
        with working("importing torch, checking devices", not given.json):
            findings += preflight.finish(options, probe, deadline)
    if measure is not None:
        with working("measuring the bandwidth", not given.json):
            findings += measure(deadline).findings(options.limits)
    why = unfit(findings)
    if given.json:
        for finding in findings:
            sys.stdout.write(json.dumps(finding.to_json()) + "\n")
        sys.stdout.write(json.dumps({"node": os.uname().nodename, "unfit": why}) + "\n")
    else:
        _print(findings)
    if why:
        raise NodeUnfit(f"{os.uname().nodename} cannot run a job: {why}")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast preflight",
        description=_DESCRIPTION,
        epilog="limits and their defaults:\n"
        + "\n".join(f"  {name}={getattr(Preflight(), name)}" for name in CHECK_OF_LIMIT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("outlast-runs"), help="run folder (default outlast-runs)")
    add("--checkpoint-dir", type=Path, metavar="FOLDER", help="folder of checkpoints outside the run folder")
    add("--nproc-per-node", "--nproc_per_node", default="1", help="ranks: a number, cpu, gpu or auto")
    add("--gpus", type=_count, default=-1, metavar="N", help="expected GPUs (default: one a rank, or none)")
    add(
        "--address", default="", metavar="HOST", help="name by which others reach this node (default its own)"
    )
    add("--port", type=_count, action="append", default=[], help="port to listen on; may be repeated")
    add("--skip", action="append", default=[], choices=_SKIPPED, metavar="CHECK", help=", ".join(_SKIPPED))
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help="as in shm_size=512MiB; see below")
    wait = preflight.TIMEOUT
    add("--timeout", type=_seconds, default=wait, help=f"seconds for everything (default {wait:.0f})")
    add("--json", action="store_true", help="one JSON object a finding; the last line says unfit or not")
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--bandwidth-to", type=_address, metavar="HOST:PORT", help="measure to this server")
    pair.add_argument("--bandwidth-serve", type=_address, metavar="[HOST:]PORT", help="serve one measurement")
    add("--bandwidth-mib", type=_count, metavar="N", help=f"MiB each way (default {bandwidth.CHUNKS})")
    add("--token-file", type=Path, help="file with a token that both nodes have; without it, this host only")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to a day")
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in a port from 1 to 65535")
    return host.strip("[]"), int(port)


def _options(given: argparse.Namespace) -> PreflightOptions:
    limits = Preflight()
    for text in given.limit:
        limits = with_limit(limits, text)
    measured = given.bandwidth_to or given.bandwidth_serve
    if limits.bandwidth != Preflight().bandwidth and not measured:
        raise UsageError("--limit bandwidth needs --bandwidth-to or --bandwidth-serve; nothing was checked")
    return PreflightOptions(
        run_dir=given.run_dir,
        checkpoint_dir=given.checkpoint_dir,
        nproc_per_node=given.nproc_per_node,
        gpus=given.gpus,
        address=given.address,
        ports=tuple(given.port),
        skip=frozenset(map(Check, given.skip)),
        limits=limits,
        environment=settings.inherited(),
    )


def _measurement(given: argparse.Namespace) -> Callable[[float], Bandwidth] | None:
    """Return the function that measures the bandwidth until a deadline; None: it is not wanted."""
    to, here = given.bandwidth_to, given.bandwidth_serve
    if given.token_file is not None and not (to or here):
        raise UsageError("--token-file needs --bandwidth-to or --bandwidth-serve; nothing was checked")
    if given.bandwidth_mib is not None and not to:
        raise UsageError("--bandwidth-mib needs --bandwidth-to; nothing was checked")
    chunks = bandwidth.CHUNKS if given.bandwidth_mib is None else given.bandwidth_mib
    if not 0 < chunks <= bandwidth.MOST_CHUNKS:
        raise UsageError(
            f"--bandwidth-mib {chunks}: 1 to {bandwidth.MOST_CHUNKS} expected; nothing was checked"
        )
    token = "" if given.token_file is None else _token(given.token_file)
    if to:
        if not to[0]:
            raise UsageError("--bandwidth-to: HOST:PORT expected, no host found; nothing was checked")
        return lambda deadline: bandwidth.measure(to, token, deadline, chunks)
    if here:
        address = (here[0] or ("0.0.0.0" if token else "127.0.0.1"), here[1])
        return lambda deadline: _served(address, token, deadline)
    return None


def _served(address: tuple[str, int], token: str, deadline: float) -> Bandwidth:
    try:
        return bandwidth.serve(address, token, deadline)
    except OSError as error:
        return Bandwidth(f"port {address[1]}", error=f"cannot be listened on: {error.strerror or error}")


def _token(path: Path) -> str:
    try:
        token = files.read_text(path, files.TOKEN_BYTES).strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"--token-file {path}: cannot be read: {error}; nothing was checked") from error
    if not token:
        raise UsageError(f"--token-file {path}: is empty, a token expected; nothing was checked")
    return token


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("", "check", "found", "expected"):
        table.add_column(name, overflow="fold")
    table.add_column("seconds", justify="right")
    for one in findings:
        colour, word = ("green", "ok") if one.ok else ("yellow", "warning")
        if one.excludes:
            colour, word = "bold red", "FAILED"
        cells = (one.check.value, escape(one.found), escape(one.expected), f"{one.seconds:.3f}")
        table.add_row(f"[{colour}]{word}[/]", *cells)
    Console(highlight=False).print(table)
