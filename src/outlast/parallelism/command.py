"""``outlast plan``: in which layout a job goes on when it has lost nodes, worked out before it has."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from outlast.errors import ExitCode, UsageError
from outlast.observe.text import say, table
from outlast.parallelism.agent import read_model
from outlast.parallelism.policy.checkpoints import FORMATS
from outlast.parallelism.policy.degrees import MAY_BE_FIXED, Layout
from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.limits import PRESETS, ModelLimits
from outlast.parallelism.policy.losses import Row, after_losses, remaining, require, usual_losses
from outlast.parallelism.policy.memory import Training
from outlast.parallelism.policy.planner import Job, Ranked, ranked_layouts
from outlast.parallelism.policy.throughput import Hardware

_MOST_NODES = 1 << 17
_GIB = 1 << 30
_NODES = re.compile(r"(\d{1,6})x(\d{1,4})(?:@(\d+(?:\.\d+)?)(?:GiB)?)?(?:\*(\d+(?:\.\d+)?))?")
_DESCRIPTION = """\
Print in which layout (dp, tp, pp, cp, ep) a job goes on after the loss of nodes, how fast it is then, and
whether its checkpoint can be loaded there. With one node, devices are lost one by one. Nothing is started."""
_EPILOG = """\
nodes: COUNTxDEVICES[@MEMORY][*SPEED],... as in 60x8@80GiB,4x8@40GiB*0.5
models: """ + ", ".join(PRESETS)


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast plan ...`` and return its exit code.

    Raises:
        UsageError: an option is wrong, there is no layout, or the job does not survive what it must.
    """
    given = _parser().parse_args(arguments)
    model = read_model(given.model, given.sequence, "--model")
    nodes = _nodes(given)
    job = _job(given, model, nodes)
    hardware = Hardware(
        flops=given.flops,
        node_bandwidth=given.node_bandwidth,
        network_bandwidth=given.network_bandwidth,
        load_bandwidth=given.load_bandwidth,
        horizon=given.hours_until_change * 3600,
    )
    if given.ranking is not None:
        found = ranked_layouts(job, remaining(nodes, given.ranking), hardware)
        _print_ranking(found, given.json)
        return ExitCode.OK
    # A layout after a larger loss is one after a smaller loss, too, unless it has to use every device.
    required = range(given.must_survive + 1) if given.every_gpu else [given.must_survive]
    devices = sum(node.devices for node in nodes)
    if given.must_survive > devices:
        raise UsageError(f"--must-survive {given.must_survive}: the job has {devices} devices")
    losses = sorted({0, *(given.lost or usual_losses(nodes)), *required})
    rows = after_losses(job, nodes, losses, given.checkpoint, hardware)
    _print_rows(rows, nodes, given.json)
    require(rows, given.must_survive, given.checkpoint)
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="preset, config.json of Hugging Face, or TOML file")
    add(
        "--sequence", type=_count, default=0, metavar="TOKENS", help="of a sample (default: the model's most)"
    )
    add("--global-batch", type=_count, required=True, metavar="SAMPLES", help="of a step")
    add("--micro-batch", type=_count, default=1, metavar="SAMPLES", help="that a rank computes at once")
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--gpus", type=_count, metavar="N", help="devices of the job")
    devices.add_argument("--nodes", metavar="NODES", help="of unequal nodes; see below")
    add("--gpus-per-node", type=_count, default=8, metavar="N", help="with --gpus (default 8)")
    add(
        "--memory", type=_gib, default=0, metavar="GIB", help="of a device; without it, memory is not checked"
    )
    for name, what in (("tp", "tensors"), ("pp", "layers"), ("cp", "sequences"), ("ep", "experts")):
        add(f"--{name}", type=_count, metavar="N", help=f"ranks among which {what} are divided today")
    add("--dp", type=_count, metavar="N", help="data-parallel copies today (default: all that fit)")
    add("--virtual-stages", type=_count, metavar="N", help="chunks of layers of a pipeline rank today")
    add("--fixed", type=_degrees, default=frozenset(), metavar="NAMES", help="must stay, as in tp,pp")
    add("--even", action="store_true", help="every copy must compute as many micro-batches")
    add("--every-gpu", action="store_true", help="no device may be idle")
    add("--recompute", action="store_true", help="activations are computed again in the backward pass")
    add("--replicated-optimizer", action="store_true", help="every copy keeps all of the optimizer's state")
    add("--checkpoint", choices=FORMATS, default="outlast", metavar="FORMAT", help=", ".join(FORMATS))
    add("--lost", type=_counts, metavar="N,N,...", help="losses to show (default 0 to 4, then doubled)")
    add(
        "--must-survive",
        type=_count,
        default=0,
        metavar="N",
        help="exit code 2 if the loss of N ends the job",
    )
    add("--ranking", type=_count, metavar="N", help="show all layouts after the loss of N instead")
    usual = Hardware()
    for name, default, what in (
        ("flops", usual.flops, "operations a second of a device"),
        ("node-bandwidth", usual.node_bandwidth, "bytes a second within a node"),
        ("network-bandwidth", usual.network_bandwidth, "bytes a second of a device between nodes"),
        ("load-bandwidth", usual.load_bandwidth, "bytes a second of a rank that loads"),
    ):
        add(f"--{name}", type=_positive, default=default, metavar="X", help=f"{what} (default {default:g})")
    add("--hours-until-change", type=_positive, default=0.0, metavar="H", help="default: from the devices")
    add("--json", action="store_true", help="one JSON object a line instead of a table")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(one) for one in text.split(",")]


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _gib(text: str) -> int:
    return int(_positive(text.removesuffix("GiB")) * _GIB)


def _degrees(text: str) -> frozenset[str]:
    found = frozenset(text.split(","))
    if not found <= set(MAY_BE_FIXED):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {', '.join(MAY_BE_FIXED)} are expected")
    return found


def _nodes(given: argparse.Namespace) -> list[Node]:
    """Return the nodes of ``--gpus`` or ``--nodes``."""
    if given.nodes is None:
        if not given.gpus or not given.gpus_per_node:
            raise UsageError("--gpus, --gpus-per-node: at least 1 is expected; nothing was planned")
        whole, rest = divmod(given.gpus, given.gpus_per_node)
        _limit(whole)
        return [Node(given.gpus_per_node, given.memory)] * whole + [Node(rest, given.memory)] * (rest > 0)
    found: list[Node] = []
    for part in given.nodes.split(","):
        match = _NODES.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--nodes {part}: COUNTxDEVICES[@MEMORY][*SPEED] is expected, as in 60x8@80GiB")
        memory = int(float(match[3]) * _GIB) if match[3] else given.memory
        _limit(len(found) + int(match[1]))
        found += [Node(int(match[2]), memory, float(match[4] or 1))] * int(match[1])
    return found


def _limit(nodes: int) -> None:
    if nodes > _MOST_NODES:
        raise UsageError(f"{nodes} nodes: at most {_MOST_NODES} can be planned for")


def _job(given: argparse.Namespace, model: ModelLimits, nodes: Sequence[Node]) -> Job:
    training = Training(given.micro_batch, given.recompute, not given.replicated_optimizer)
    degrees = [given.tp, given.pp, given.cp, given.ep, given.virtual_stages]
    today = None
    if given.dp is not None or any(one is not None for one in degrees):
        tp, pp, cp, ep, virtual = (1 if one is None else one for one in degrees)
        dp = given.dp if given.dp is not None else sum(one.devices for one in nodes) // max(1, tp * pp * cp)
        today = Layout(tp, pp, dp, cp, ep, virtual)
    return Job(model, given.global_batch, training, today, given.fixed, given.even, given.every_gpu)


def _print_rows(rows: Sequence[Row], nodes: Sequence[Node], as_json: bool) -> None:
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps({**asdict(row), "possible": row.possible}) + "\n")
        return
    lost = "GPUs lost" if len(nodes) == 1 else "nodes lost"
    lines = [(lost, "GPUs left", "layout", "idle", "tokens/s", "share", "checkpoint", "pause")]
    for row in rows:
        best = row.best
        if best is None:
            lines.append((str(row.lost), str(row.devices), "none", "", "", "0", "", ""))
            continue
        tokens, pause = f"{best.tokens:.4g}", f"{best.pause:.0f} s" if row.lost else ""
        can = "yes" if row.checkpoint.can else "no"
        words = (
            str(row.lost),
            str(row.devices),
            str(best.layout),
            str(best.idle),
            tokens,
            f"{row.share:.3f}",
        )
        lines.append((*words, can, pause))
    say(*table(lines))
    sys.stdout.write("\n")
    for row in rows:
        refused = (
            "" if row.checkpoint.can or row.best is None else f"; the checkpoint cannot: {row.checkpoint.why}"
        )
        sys.stdout.write(f"{row.lost}: {row.why}{refused}\n")
    condition = next((row.checkpoint.why for row in rows if row.checkpoint.can and row.checkpoint.why), "")
    if condition:
        sys.stdout.write(f"checkpoint: yes, if {condition}\n")
    if any(not node.memory for node in nodes):
        sys.stdout.write("memory was not checked: --memory is not given\n")


def _print_ranking(found: Sequence[Ranked], as_json: bool) -> None:
    if as_json:
        for one in found:
            sys.stdout.write(json.dumps(asdict(one)) + "\n")
        return
    lines = [("layout", "idle", "tokens/s", "memory", "pause", "why")]
    for one in found:
        used, pause = f"{one.memory / _GIB:.1f} GiB", f"{one.pause:.0f} s"
        lines.append((str(one.layout), str(one.idle), f"{one.tokens:.4g}", used, pause, one.reason))
    say(*table(lines))
