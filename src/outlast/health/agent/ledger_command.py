"""``outlast health fit`` and ``outlast health ledger``: calibrate the hazard, use the node ledger."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outlast import files
from outlast.errors import ExitCode, UsageError
from outlast.health.agent.node_ledger import NodeLedger
from outlast.health.policy.fault_logs import BadLog, Logs
from outlast.health.policy.fitting import Observed, fit
from outlast.health.policy.hazard import DAY, HOUR, OTHER, SIGNS, HazardModel, NodeHistory, probability
from outlast.health.policy.ledger import Entry, Ledger, What
from outlast.health.policy.options import HealthOptions

_MOST_BYTES = 256 << 20  # of one log


def fit_main(arguments: Sequence[str]) -> int:
    """Run ``outlast health fit LOGS...``.

    Raises:
        UsageError: a log cannot be read or is none, or there is too little in them.
    """
    parser = argparse.ArgumentParser(
        prog="outlast health fit",
        description="Calibrate the hazard from the faults of a site: fault traces in InfiniteHBD's format,"
        " event logs of outlast (events.jsonl), node ledgers. The file that is written is the model_file of"
        " [health].",
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="file, or folder of *.jsonl files")
    parser.add_argument("--nodes", type=int, default=0, help="nodes observed (default: those in the logs)")
    parser.add_argument("--prior", type=float, default=2.0, help="weight of the prior, in faults (default 2)")
    parser.add_argument(
        "--out", type=Path, default=Path("health-model.json"), help="default health-model.json"
    )
    given = parser.parse_args(arguments)
    if not 0 < given.prior < math.inf:
        raise UsageError(f"--prior {given.prior}: a positive number expected; nothing was written")
    logs = _read(given.logs)
    nodes = max(given.nodes, len(logs.nodes))
    if given.nodes and given.nodes < len(logs.nodes):
        raise UsageError(f"--nodes {given.nodes}: the logs name {len(logs.nodes)}; nothing was written")
    if not logs.end - logs.begin > HOUR:
        raise UsageError("the logs cover less than an hour; nothing was written")
    observed = Observed(logs.outages, logs.begin, logs.end, nodes, logs.signs)
    source = f"{nodes} nodes, {(logs.end - logs.begin) / DAY:.0f} days, {len(logs.outages)} faults"
    model = fit(observed, given.prior, source)
    given.out.write_text(json.dumps(model.to_json(), indent=1) + "\n", encoding="utf-8")
    _print(model, logs, source, given.out)
    return ExitCode.OK


def _read(paths: Sequence[Path]) -> Logs:
    logs = Logs()
    for named in paths:
        for path in sorted(named.rglob("*.jsonl")) if named.is_dir() else [named]:
            try:
                logs.add(files.read_whole(path, _MOST_BYTES, follow=True))
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror or error}; nothing was written") from error
            except BadLog as error:
                raise UsageError(f"{path}: {error}; nothing was written") from error
    return logs


def _print(model: HazardModel, logs: Logs, source: str, out: Path) -> None:
    write = sys.stdout.write
    write(f"{source}; {logs.skipped} lines were skipped\n")
    write(f"base: {model.base * 24000:.2f} faults in 1000 days of a node\n")
    for name, kinds in model.factors.items():
        shown = sorted(kinds.items(), key=lambda item: -item[1])
        write(
            f"{name}: " + ", ".join(f"{kind or 'none'} x{factor:.2f}" for kind, factor in shown[:12]) + "\n"
        )
    for since, words in ((0.0, "just back"), (DAY, "back for a day"), (30 * DAY, "back for 30 days")):
        history = NodeHistory(since, OTHER, 1 if since < 30 * DAY else 0)
        risk = probability(model.history_within(history, DAY))
        write(f"a node that is {words} fails within a day: {risk:.2%}\n")
    never = probability(model.history_within(NodeHistory(), DAY))
    write(f"a node that never failed: {never:.2%}\n")
    changed = {name: one for name, one in model.signs.items() if one != SIGNS[name]}
    for name, one in changed.items():
        write(f"sign {name}: leads to a failure with {one.chance:.1%} (before {SIGNS[name].chance:.1%})\n")
    write(f"written to {out}\n")


def ledger_main(arguments: Sequence[str]) -> int:
    """Run ``outlast health ledger FOLDER``.

    Raises:
        UsageError: there is no such folder.
    """
    parser = argparse.ArgumentParser(
        prog="outlast health ledger",
        description="Show how the nodes of a ledger stand, or write what a person knows of a node.",
    )
    parser.add_argument("folder", type=Path, help="as ledger in [health]; by default <run folder>/ledger")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--release", metavar="NODE", help="its faults so far count no more")
    change.add_argument(
        "--quarantine", metavar="NODE", help="it gets ranks only while no other node is there"
    )
    change.add_argument("--repaired", metavar="NODE", help="it is in service again")
    parser.add_argument("--reason", default="", help="for --release, --quarantine and --repaired")
    given = parser.parse_args(arguments)
    named = {
        What.RELEASE: given.release,
        What.QUARANTINE: given.quarantine,
        What.REPAIR: given.repaired,
    }
    change_ = next(((what, node) for what, node in named.items() if node), None)
    if given.reason and change_ is None:
        raise UsageError("--reason needs --release, --quarantine or --repaired; nothing was written")
    if change_ is None and not given.folder.is_dir():
        raise UsageError(f"{given.folder}: no such folder")
    problems: list[str] = []
    ledger = NodeLedger(given.folder, f"by-hand-{os.uname().nodename}", problems.append)
    if change_ is not None:
        what, node = change_
        ledger.append(Entry(time.time(), node, what, "", "", given.reason))
    _table(ledger.read(HealthOptions().quarantine_after), time.time())
    for problem in problems:
        sys.stderr.write(f"outlast health: {problem}\n")
    return ExitCode.FAILED if problems else ExitCode.OK


def _table(ledger: Ledger, now: float) -> None:
    for node in ledger.nodes:
        standing, history = ledger.standing(node, now), ledger.history(node, now)
        words = f"{node}: {standing.state.value}, {history.faults} faults in 30 days"
        sys.stdout.write(words + (f" ({standing.reason})" if standing.reason else "") + "\n")
