"""``outlast top``: what a run does now, on a terminal or once."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from outlast.codec import plain
from outlast.errors import ExitCode
from outlast.observe import report
from outlast.observe.following import RunFollower
from outlast.observe.policy.now import NodeNow, Now, State
from outlast.observe.refreshing import seconds_from, until_ctrl_c
from outlast.observe.text import clean
from outlast.recovery.policy.events import StepSource

QUIET = 60.0  # seconds without a record, after which that is said: progress is written every 5 s
NARROWEST = 40  # columns
_LABEL = 11  # columns of a label
_HOME, _END_LINE, _END_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"
_SLOW_SHOWN = 4


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast top ...`` and return its exit code.

    Raises:
        UsageError: there is no event log, or it cannot be read.
    """
    options = _parser().parse_args(arguments)
    follower = RunFollower(options.run_dir)
    if options.json:
        told = {
            **asdict(follower.poll()),
            "lines_skipped": follower.skipped,
            "lines_unknown": follower.unknown,
        }
        sys.stdout.write(json.dumps(plain(told), indent=2, allow_nan=False) + "\n")
        return ExitCode.OK
    if options.once or not sys.stdout.isatty():
        width = max(NARROWEST, shutil.get_terminal_size().columns)
        _print("".join(f"{line}\n" for line in _page(follower, width, math.inf)))
        return ExitCode.OK
    _print(_CLEAR)
    until_ctrl_c(lambda: _refresh(follower), options.interval)
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast top",
        description="Show what a run does now: step and rate, ranks and nodes, checkpoints, the latest"
        " incident. On a terminal it is shown again and again until Ctrl-C, else once.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run folder")
    parser.add_argument(
        "--interval",
        type=seconds_from(0.1),
        default=1.0,
        metavar="S",
        help="seconds between two looks (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="show it once, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _refresh(follower: RunFollower) -> None:
    size = shutil.get_terminal_size()
    shown = _page(follower, max(NARROWEST, size.columns), size.lines)[: max(1, size.lines - 1)]
    _print(_HOME + "".join(f"{line}{_END_LINE}\n" for line in shown) + _END_SCREEN)


def _print(text: str) -> None:
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
    sys.stdout.flush()


def _page(follower: RunFollower, width: int, height: float) -> list[str]:
    now = follower.poll()
    found = lines(now, time.time(), width, height)
    if follower.unknown:
        text = f"{follower.unknown} lines of the log are of a newer outlast and are not shown"
        found += textwrap.wrap(text, width)
    return found


def lines(now: Now, wall: float, width: int, height: float = math.inf) -> list[str]:
    """Return the page of a run as lines of plain text.

    Args:
        now: the run.
        wall: the time at which it is shown, in seconds since the epoch.
        width: columns, at least ``NARROWEST``.
        height: lines for which there is room; nodes are left out beyond it.
    """
    state = doing(now, wall)
    name = now.run_id or "without a name"
    found = textwrap.wrap(clean(f"run {name}: {state}"), width)
    for label, text in _fields(now, wall):
        found += textwrap.wrap(
            " ".join(clean(text).split()),
            width,
            initial_indent=f"{label:<{_LABEL}} ",
            subsequent_indent=" " * (_LABEL + 1),
            max_lines=4,
            placeholder=" ...",
        )
    if len(now.nodes) > 1:
        found += _nodes(now, wall, width, height - len(found))
    return found


def doing(now: Now, wall: float) -> str:
    """Return in a few words what a run does; a log that became quiet is told as that."""
    if now.end is not None and now.state is State.ENDED:
        return f"ended, exit code {now.end.exit_code}"
    if now.state not in (State.EMPTY, State.ENDED) and wall - now.heard > QUIET:
        return f"no record for {ago(wall - now.heard)} (it was {now.state.value})"
    if now.starts_at > wall:
        return f"{now.state.value}, next start in {ago(now.starts_at - wall)}"
    return now.state.value


def _fields(now: Now, wall: float) -> Iterator[tuple[str, str]]:
    if now.state is State.EMPTY:
        return
    yield "step", _step(now, wall)
    present = sum(one.present for one in now.nodes)
    yield "ranks", f"{now.ranks} on {_count(present, 'node')}, generation {now.generation}"
    restarts = ", ".join(f"{count} x {action}" for action, count in now.actions.items() if action != "stop")
    starts = f", {now.launches} starts of the launcher" if now.launches > 1 else ""
    yield "restarts", f"{now.restarts}{f' ({restarts})' if restarts else ''}{starts}"
    for one in now.checkpoints:
        where = "on disk" if one.tier == "disk" else "of the script's own"
        yield "checkpoint", f"step {one.step} {where}, {ago(wall - one.time)} ago"
    if not now.checkpoints:
        yield "checkpoint", "none"
    if now.saves_lost:
        yield "", f"{now.saves_lost} could not be written"
    if (last := now.incident) is not None:
        who = f" of rank {last.rank}" if last.rank >= 0 else ""
        where = f" on {last.node}" if last.node else ""
        step = f" at step {last.step}{counted(last.source)}" if last.step >= 0 else ""
        yield "incident", f"{last.kind}{who}{where}{step}, {ago(wall - last.time)} ago: {last.reason}"
        yield "action", f"{last.action}: {last.action_reason}"
    for slow in now.slow[:_SLOW_SHOWN]:
        yield "slow", f"rank {slow.rank} on {slow.node}: {slow.slowdown:.2f} times, {slow.activity}"
    if now.end is not None:
        yield "end", now.end.reason


def _step(now: Now, wall: float) -> str:
    if now.step < 0:
        return "none yet"
    speed = f", {rate(now.rate)}" if now.rate is not None and now.state is State.TRAINING else ""
    since = f", {ago(wall - now.stepped)} ago" if now.stepped else ""
    total = f" of {now.total}" if now.total > 0 else ""
    if speed and (left := now.seconds_left) is not None:
        speed += f", {ago(left)} left"
    return f"{now.step}{total}{counted(now.source)}{speed}{since}"


def counted(source: str) -> str:
    """Return what follows a step of this source: a mark where one process has counted it."""
    return " (counted by one process)" if source == StepSource.COUNTED.value else ""


def rate(steps: float) -> str:
    """Return a rate for people: steps a second, or seconds a step."""
    if steps >= 1 or steps <= 0:
        return f"{steps:.3g} steps/s"
    return f"{report.duration(1 / steps)} a step"


def _nodes(now: Now, wall: float, width: int, room: float) -> list[str]:
    """Return a line for each node: those that have no ranks first, then those that are the least far."""
    nodes = sorted(now.nodes, key=lambda one: (one.present, one.step, one.name))
    shown = nodes if len(nodes) <= room - 1 else nodes[: max(1, int(min(room, len(nodes))) - 3)]
    wide = min(max(len(one.name) for one in shown), width - 28)
    found = [f"{clean(one.name)[:wide]:<{wide}} {_node(one, wall)}"[:width] for one in shown]
    if len(shown) < len(nodes):
        found.append(f"and {len(nodes) - len(shown)} nodes that are further"[:width])
    return found


def _node(one: NodeNow, wall: float) -> str:
    step = "-" if one.step < 0 else str(one.step)
    what = f"{one.ranks} ranks" if one.present else f"gen {one.generation}"
    return f"step {step}, {what}, {ago(wall - one.heard)}"


def ago(seconds: float) -> str:
    """Return how long ago something was, to the second."""
    return report.duration(seconds) if seconds >= 59.5 else f"{max(0.0, seconds):.0f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
