"""What a job does when it has lost nodes: one row for each number of them, worked out before any is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outlast.errors import UsageError
from outlast.parallelism.policy.checkpoints import Loadable, loadable
from outlast.parallelism.policy.layouts import Node
from outlast.parallelism.policy.planner import Job, NoLayout, Ranked, check, ranked_layouts
from outlast.parallelism.policy.throughput import Hardware


@dataclass(frozen=True)
class Row:
    """What follows from the loss of some nodes.

    Args:
        lost: nodes, or devices of the one node.
        devices: that are left.
        best: the layout to go on in; None: there is none.
        share: of the tokens a second of the best layout on all nodes.
        checkpoint: whether the checkpoint can be loaded in it.
        why: the reason for the layout, or for there being none.
    """

    lost: int
    devices: int
    best: Ranked | None
    share: float
    checkpoint: Loadable
    why: str

    @property
    def possible(self) -> bool:
        """Whether the job can go on, from the checkpoint that it has."""
        return self.best is not None and self.checkpoint.can


def after_losses(
    job: Job, nodes: Sequence[Node], losses: Sequence[int], form: str, hardware: Hardware | None = None
) -> list[Row]:
    """Return a row for each number of nodes that are lost; of a single node, its devices.

    The nodes with the most devices are lost first, which is the worst case. The layout is the first of the
    ranking that the checkpoint can be loaded in; where it can be loaded in none, the first.

    Args:
        job: its layout of today is the best one on all nodes if it names none.
        nodes: of the job, all of them.
        losses: how many are lost.
        form: of the checkpoint, one of ``checkpoints.FORMATS``.
        hardware: speeds.

    Raises:
        NoLayout: there is none on all nodes either.
        UsageError: the job cannot be, or today's layout does not fit on the nodes.
    """
    check(job)
    devices = sum(node.devices for node in nodes)
    if (
        job.today is not None
        and sum(node.devices // job.today.tp for node in nodes) * job.today.tp < job.today.ranks
    ):
        raise UsageError(
            f"today's layout ({job.today}) has {job.today.ranks} ranks in groups of {job.today.tp} within a"
            f" node; {len(nodes)} nodes with {devices} devices have no room for them"
        )
    whole = ranked_layouts(job, nodes, hardware)
    today = job.today or whole[0].layout
    asked = replace(job, today=today)
    return [_row(asked, nodes, lost, (form, whole[0].tokens), hardware) for lost in losses]


def _row(
    job: Job, nodes: Sequence[Node], lost: int, known: tuple[str, float], hardware: Hardware | None
) -> Row:
    left = remaining(nodes, lost)
    devices = sum(node.devices for node in left)
    form, full = known
    assert job.today is not None
    if not left:
        return Row(lost, 0, None, 0.0, Loadable(False, ""), "no device is left")
    try:
        found = ranked_layouts(job, left, hardware)
    except NoLayout as error:
        return Row(lost, devices, None, 0.0, Loadable(False, ""), str(error))
    answers = [loadable(form, job.today, one.layout) for one in found]
    place = next((index for index, answer in enumerate(answers) if answer.can), 0)
    best, answer = found[place], answers[place]
    return Row(lost, devices, best, best.tokens / full, answer, best.reason)


def remaining(nodes: Sequence[Node], lost: int) -> list[Node]:
    """Return what is left when the largest nodes are lost, or devices of the only node."""
    if len(nodes) == 1:
        left = nodes[0].devices - lost
        return [Node(left, nodes[0].memory, nodes[0].speed)] if left > 0 else []
    return sorted(nodes, key=lambda node: node.devices, reverse=True)[lost:]


def usual_losses(nodes: Sequence[Node]) -> list[int]:
    """Return which losses a table shows: none, one to four, and each doubling up to half of the nodes."""
    count = nodes[0].devices if len(nodes) == 1 else len(nodes)
    found, more = [one for one in range(5) if one < count], 8
    while more <= count // 2:
        found.append(more)
        more *= 2
    return found


def require(rows: Sequence[Row], lost: int, form: str) -> None:
    """Check that a job can go on after each loss up to one of ``lost``.

    Args:
        rows: of :func:`after_losses`.
        lost: the largest loss that must not end the job.
        form: of the checkpoint.

    Raises:
        UsageError: names the smallest loss that would end it, and why.
    """
    fatal = next((row for row in rows if row.lost <= lost and not row.possible), None)
    if fatal is not None:
        why = (
            fatal.why
            if fatal.best is None
            else f"its {form} checkpoint cannot be loaded: {fatal.checkpoint.why}"
        )
        raise UsageError(f"the job would end with the loss of {fatal.lost}: {why}; nothing was started")
