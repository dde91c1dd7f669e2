"""The summary of bench/checkpoint.py: ratios within each measurement, their spread, goals met and missed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from peers import figures

BUFFERS = 3  # outlast's default
Record = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A bound for one figure of one system.

    Args:
        system: whose.
        figure: which.
        bound: of the median.
        most: the bound is a maximum; else a minimum.
    """

    system: str
    figure: str
    bound: float
    most: bool

    def met(self, found: float) -> bool:
        return found <= self.bound if self.most else found >= self.bound

    def __str__(self) -> str:
        return f"{self.system}: {self.figure} {'<=' if self.most else '>='} {self.bound:g}"


GOALS = (
    Goal("outlast", "stall / memcpy", 1.2, most=True),
    Goal("outlast-lazy", "stall / memcpy", 0.05, most=True),
    Goal("outlast", "raw write / total", 0.9, most=False),
    Goal("outlast", "raw read / load, cold", 0.8, most=False),
    Goal("outlast", "raw read / load, warm", 0.8, most=False),
    Goal("outlast", "digests / total", 0.05, most=True),
    Goal("outlast", "digests / load, cold", 0.05, most=True),
)


def _saved(figure: Callable[[Record], float], *kinds: str) -> Callable[[Record], float | None]:
    return lambda one: figure(one) if one["record"] in kinds else None


def _stall(one: Record) -> float | None:
    if one["record"] == "busy":
        return float(one["stall"])
    return float(one["call"]) if one["record"] == "save" and one["system"] in _BLOCKING else None


def _of_memcpy(one: Record) -> float | None:
    stall = _stall(one)
    # On a busy host the threads of a copy_ wait for each other; then one thread is the faster memcpy.
    return None if stall is None else stall / min(one["raw"]["memcpy"], one["raw"]["memmove"])


def _after_call(one: Record) -> float | None:
    if one["record"] != "save" or one["system"] in _BLOCKING:
        return None
    return _raw_write(one) / float(one["total"] - one["call"])


def _raw_write(one: Record) -> float:
    return float(min(one["raw"]["buffered"], one["raw"]["direct"]))


def _raw_read(one: Record) -> float:
    return float(min(one["raw"], one.get("direct", one["raw"])))


_BLOCKING = {"outlast-blocking", "torch.save", "dcp"}
FIGURES: dict[str, Callable[[Record], float | None]] = {
    "GiB to memory a save": _saved(lambda one: one["memory"] / 2**30, "written"),
    "GiB to disk a save": _saved(lambda one: one["disk"] / 2**30, "written"),
    "GiB of buffers": _saved(lambda one: one["buffers"] / 2**30, "written"),
    "stall": _stall,
    "stall / memcpy": _of_memcpy,
    "slower meanwhile": _saved(lambda one: one["computed"] / one["alone"] - 1, "busy"),
    "total": _saved(lambda one: one["total"], "save"),
    "raw write / total": _saved(lambda one: _raw_write(one) / one["total"], "save"),
    "raw write / after call": _after_call,
    "first call": _saved(lambda one: one["call"], "first"),
    "first total": _saved(lambda one: one["total"], "first"),
    "load, cold": _saved(lambda one: one["load"], "cold"),
    "raw read / load, cold": _saved(lambda one: _raw_read(one) / one["load"], "cold"),
    "load, warm": _saved(lambda one: one["load"], "warm"),
    "raw read / load, warm": _saved(lambda one: _raw_read(one) / one["load"], "warm"),
    "load, from memory": _saved(lambda one: one["load"], "memory"),
    "digests / load, cold": _saved(lambda one: one["digest"] / one["load"], "cold"),
}
RAW: dict[str, Callable[[Record], float | None]] = {
    "memcpy, torch copy_": _saved(lambda one: one["raw"]["memcpy"], "save", "busy"),
    "memcpy, one thread": _saved(lambda one: one["raw"]["memmove"], "save", "busy"),
    "write, synced": _saved(lambda one: one["raw"]["buffered"], "save", "busy"),
    "the same, O_DIRECT": _saved(lambda one: one["raw"]["direct"], "save", "busy"),
    "read, cold": _saved(lambda one: one["raw"], "cold"),
    "the same past the cache": _saved(lambda one: one["direct"], "cold"),
    "read, warm": _saved(lambda one: one["raw"], "warm"),
    "digests": _saved(lambda one: one["digest"], "cold", "warm"),
    "new memory, huge pages": _saved(lambda one: one["huge"], "fresh"),
    "new memory, ordinary": _saved(lambda one: one["ordinary"], "fresh"),
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return count, median, least and 90th percentile."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"n": len(ordered), "median": statistics.median(ordered), "min": ordered[0], "p90": last}


def _gathered(
    records: Sequence[Record], figures_: dict[str, Callable[[Record], float | None]]
) -> dict[str, dict[str, float]]:
    found = {}
    for name, figure in figures_.items():
        found[name] = spread([value for one in records if (value := figure(one)) is not None])
    return found


def report(records: Sequence[Record], world: int, lines: figures.Lines) -> bool:
    """Print and write the summary of one world size; return whether all goals are met."""
    systems = list(dict.fromkeys(one["system"] for one in records))
    abouts = {one["system"]: one for one in records if one["record"] == "about"}
    raw = _gathered(records, RAW)
    lines.write({"record": "raw", "world": world, **raw})
    for about in list(abouts.values())[:1]:
        figures.say(
            f"\n{world} rank(s), {about['nbytes'] / 2**30:.2f} GiB in all, {about['threads']} torch"
            " thread(s) a rank; seconds: median (least, p90)"
        )
    for name, one in raw.items():
        figures.say(f"  {name:<24}{_shown(one)}")
    accounts = {}
    for system in systems:
        account = _gathered([one for one in records if one["system"] == system], FIGURES)
        if account["total"]["n"] and raw["digests"]["n"]:
            share = raw["digests"]["median"] / account["total"]["median"]
            account["digests / total"] = {**account["total"], "median": share, "min": share, "p90": share}
        accounts[system] = account
        lines.write({"record": "summary", "system": system, "world": world, **account})
        figures.say(f"{system}   {abouts.get(system, {}).get('note', '')}")
        for name, one in account.items():
            if one["n"] and ("digests" not in name or system.startswith("outlast")):
                figures.say(f"  {name:<24}{_shown(one)}")
    _compare(accounts)
    return _judge(accounts, world, lines)


def _compare(accounts: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the effect of writing replicas once."""
    before, after = (accounts.get(name, {}) for name in ("outlast-replicas-each", "outlast-replicas"))
    if before and after:
        figures.say("ranks that hold the same: saved by each -> saved once, medians")
        for name, one in before.items():
            other = after.get(name, {"n": 0})
            if one["n"] and other["n"] and (name.startswith("GiB") or "/" not in name):
                figures.say(f"  {name:<24}{one['median']:8.3f} -> {other['median']:8.3f}")


def _shown(one: dict[str, float]) -> str:
    return f"{one['median']:8.3f}  ({one['min']:.3f}, {one['p90']:.3f})  n {one['n']}" if one["n"] else "none"


def _judge(accounts: dict[str, dict[str, dict[str, float]]], world: int, lines: figures.Lines) -> bool:
    fine = True
    figures.say(f"goals, {world} rank(s), of medians:")
    for goal in GOALS:
        found = accounts.get(goal.system, {}).get(goal.figure, {"n": 0})
        if not found["n"]:
            continue
        met = goal.met(found["median"])
        fine &= met
        record = {"record": "goal", "world": world, "goal": str(goal), "found": found["median"], "met": met}
        lines.write(record)
        figures.say(f"  {goal!s:<48}{found['median']:8.3f}  {'met' if met else 'MISSED'}")
    return fine


def report_memory(peaks: Sequence[Record], lines: figures.Lines) -> bool:
    """Print and write the memory of each system; return whether the goal is met."""
    fine = True
    if peaks:
        figures.say("\nhost memory during saves, the live state included, in states: most")
    for peak in peaks:
        states = 1 + (peak["peak"] - peak["baseline"]) / peak["nbytes"]
        text = f"  {peak['system']:<20}{states:6.2f}   {peak['samples']} samples"
        if peak["system"] in ("outlast", "outlast-lazy"):
            met = states <= 1 + BUFFERS
            fine &= met
            text += f"; goal <= {1 + BUFFERS}: {'met' if met else 'MISSED'}"
            lines.write({"record": "goal", "goal": f"{peak['system']}: memory", "found": states, "met": met})
        figures.say(text)
    return fine
