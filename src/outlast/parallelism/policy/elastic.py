"""Layouts of a job for each number of nodes with which it may run, from the planner.

The table is worked out before the job starts, from what all nodes know alike, so that every leader has the
same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.planner import Job, NoLayout, ranked_layouts

_SHOWN = 8  # layouts, or runs of numbers, that a message has


@dataclass(frozen=True)
class Nodes:
    """The nodes that a job may have.

    Args:
        node: each of them; its devices are the ranks that it runs.
        least: with fewer the job does not run.
        most: with more it does not run either.
        group: nodes that are used together; the job has a multiple of it.
    """

    node: Node
    least: int
    most: int
    group: int = 1

    @property
    def counts(self) -> range:
        """Every number of nodes that the job may have."""
        return range(self.least, self.most + 1, self.group)


def planned_layouts(job: Job, nodes: Nodes) -> tuple[Layout, ...]:
    """Return the layouts with which a job may run, that of the most ranks first.

    A number of nodes has no layout of its own where the planner uses fewer of them: the other ones are spares
    then. The least number of nodes always has one, which uses every rank.

    Args:
        job: its layout of today is preferred; None: the best one on all nodes is.
        nodes: that it may have.

    Raises:
        UsageError: the job cannot be, or the least number of nodes has no layout; names what has one.
    """
    unit = nodes.node.devices * nodes.group
    asked = replace(job, multiple=unit)
    found: list[Layout] = []
    count = nodes.most
    try:
        if asked.today is None:
            asked = replace(asked, today=ranked_layouts(asked, [nodes.node] * count)[0].layout)
        while count > nodes.least:
            best = ranked_layouts(asked, [nodes.node] * count)[0].layout
            count = best.ranks // nodes.node.devices
            if count > nodes.least:
                found.append(best)
            count -= nodes.group
        count = nodes.least
        every = replace(asked, every_device=True)
        found.append(ranked_layouts(every, [nodes.node] * count)[0].layout)
    except NoLayout as error:
        raise UsageError(_why_none(nodes, count, found, str(error))) from error
    return tuple(found)


def _why_none(nodes: Nodes, count: int, found: list[Layout], why: str) -> str:
    cure = ""
    if found:
        enough = found[-1].ranks // nodes.node.devices
        cure = f"; the least number of nodes that has a layout is {enough}: --nnodes={enough}:{nodes.most}"
    return f"{_nodes([count], nodes.group)} with {nodes.node.devices} rank(s) each: {why}{cure}"


def without_layout(layouts: Collection[Layout], nodes: Nodes) -> str:
    """Return what happens at numbers of nodes that have no layout; empty: all have one.

    Args:
        layouts: empty: any number of ranks will do.
        nodes: that the job may have.
    """
    sizes = {one.ranks for one in layouts}
    none = [count for count in nodes.counts if layouts and count * nodes.node.devices not in sizes]
    if not none:
        return ""
    return (
        f"[parallelism] has no layout for {_nodes(none, nodes.group)}: the job then runs on the next smaller"
        " number of nodes that has one, and the others wait as spares"
    )


def table(layouts: Iterable[Layout], nodes: Nodes) -> str:
    """Return the first layouts by number of nodes, in one line."""
    words = [f"{_nodes([one.ranks // nodes.node.devices], nodes.group)}: {one}" for one in layouts]
    return "; ".join(words[:_SHOWN]) + f"; and {len(words) - _SHOWN} more" * (len(words) > _SHOWN)


def _nodes(counts: Collection[int], step: int) -> str:
    """Return numbers of nodes as text, "1, 3 to 5 nodes"; those that follow each other are ``step`` apart."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and count == runs[-1][-1] + step:
            runs[-1].append(count)
        else:
            runs.append([count])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f" and {len(words) - _SHOWN} more numbers of" * (len(words) > _SHOWN)
    return f"{', '.join(words[:_SHOWN])}{more} node{'s' * (list(counts) != [1])}"
