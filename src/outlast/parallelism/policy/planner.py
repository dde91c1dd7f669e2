"""Ranks the layouts in which a job can go on with the devices that it has.

For each way to divide the model, the number of data-parallel copies is the one with the most tokens a second.
These are ranked by what they are expected to train until the next change:

    score = tokens a second x (seconds until the next change - seconds that the change to this layout takes)

The ideal is today's throughput, times the share of devices that are left. Of the layouts that reach 0.9 of
it, those come first in which only dp changes, then those that keep tp and pp, then those that keep tp. All
others follow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from outlast.errors import UsageError
from outlast.parallelism.policy import memory, throughput
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.layouts import Node, Pool, divisors, pools, problems, shapes
from outlast.parallelism.policy.limits import ModelLimits
from outlast.parallelism.policy.memory import Footprint, RankParameters, Training
from outlast.parallelism.policy.throughput import Hardware, Pace

GOOD = 0.9  # share of the ideal that a layout must reach to be preferred for keeping tp, or tp and pp; ours
STAYS = 1.01  # times as fast another dp must be than today's; ours
_OTHER = 3  # tier of a layout that is preferred for nothing


class NoLayout(UsageError):
    """There is no layout in which the job can run on these devices; the text says what prevents it."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is divided today.

    Args:
        model: its shape.
        global_batch: samples of a step.
        training: size of a micro-batch, and what decides on memory.
        today: the layout in force; None: the job has not begun.
        fixed: degrees of ``degrees.MAY_BE_FIXED`` that must stay as they are today.
        even: every data-parallel copy computes as many micro-batches, as trainers need it that cannot weigh
            gradients by tokens.
        every_device: none may be idle.
        multiple: the ranks are a multiple of it, and tp divides the devices of a node, as under a launcher
            that uses each node whole; 1: devices are used one by one.
    """

    model: ModelLimits
    global_batch: int
    training: Training = field(default_factory=Training)
    today: Layout | None = None
    fixed: frozenset[str] = frozenset()
    even: bool = False
    every_device: bool = False
    multiple: int = 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch // self.training.micro_batch


@dataclass(frozen=True)
class Ranked:
    """A layout and what is expected of it.

    Args:
        layout: degrees of parallelism.
        idle: devices that it does not use: spares.
        micro_batches: of a step, on the busiest data-parallel copy.
        fewest: the same on the least busy one.
        tokens: a second, in the planner's model.
        share: of the ideal throughput; 0 where there is no layout of today.
        memory: bytes that the fullest rank needs.
        pause: seconds that the change takes.
        score: tokens until the next change.
        tier: 0: only dp changes, 1: keeps tp and pp, 2: keeps tp, 3: any other; ranked so, then by score.
        reason: why it stands where it does.
    """

    layout: Layout
    idle: int
    micro_batches: int
    fewest: int
    tokens: float
    share: float
    memory: float
    pause: float
    score: float
    tier: int
    reason: str = ""


def ranked_layouts(job: Job, nodes: Sequence[Node], hardware: Hardware | None = None) -> list[Ranked]:
    """Return the layouts for these nodes, the best first: one for each way to divide the model.

    Args:
        job: model, global batch and today's layout.
        nodes: that are left.
        hardware: speeds; the default is an A100's.

    Raises:
        NoLayout: there is none.
        UsageError: the batch is no whole number of micro-batches, or the layout of today cannot be.
    """
    check(job)
    hardware = hardware or Hardware()
    groups = pools(nodes)
    best: dict[Layout, Ranked] = {}
    for pool in groups[:1] if job.every_device else groups:
        for one in _of_pool(job, pool, groups[0], hardware):
            shape = one.layout.shape
            best[shape] = max(best.get(shape, one), one, key=lambda each: each.tokens)
    if not best:
        raise NoLayout(_why_none(job, groups))
    found = sorted(best.values(), key=lambda one: (one.tier, -one.score, -one.tokens, one.layout))
    return [replace(one, reason=_reason(job.today, one, found, groups[0].devices)) for one in found]


def check(job: Job) -> None:
    """Check what a job says of itself.

    Raises:
        UsageError: names what cannot be.
    """
    batch, micro = job.global_batch, job.training.micro_batch
    if micro < 1 or batch < micro or batch % micro:
        raise UsageError(f"a global batch of {batch} samples is no whole number of micro-batches of {micro}")
    if job.today is None:
        if job.fixed:
            raise UsageError(f"{', '.join(sorted(job.fixed))}: fixed, but no layout of today says at what")
        return
    if min(job.today.tp, job.today.pp, job.today.dp, job.today.cp, job.today.ep, job.today.virtual) < 1:
        raise UsageError(f"{job.today}: every degree is at least 1")
    wrong = problems(job.model, job.today)
    if job.micro_batches < job.today.dp * _unit(job.today):
        wrong.append(f"{job.micro_batches} micro-batches are too few for dp {job.today.dp}")
    if wrong:
        raise UsageError(f"{job.model.name} cannot have today's layout ({job.today}): {'; '.join(wrong)}")


def throughput_today(job: Job, hardware: Hardware, node: int) -> float:
    """Return the tokens a second of today's layout on devices of speed 1.

    Args:
        job: with a layout of today.
        hardware: speeds.
        node: devices of a node.
    """
    layout = job.today
    assert layout is not None
    rank = memory.parameters_of_rank(job.model, layout)
    times = throughput.pace((job.model, job.training), layout, rank, hardware, node)
    return job.global_batch * job.model.sequence / times.step(layout, _busiest(job, layout))


def _unit(layout: Layout) -> int:
    """Return what a copy's micro-batches are a multiple of: pp in Megatron-LM's interleaved schedule."""
    return layout.pp if layout.virtual > 1 else 1


def _of_pool(job: Job, pool: Pool, whole: Pool, hardware: Hardware) -> Iterator[Ranked]:
    """Yield the best layout on the devices of a pool, one of all, for each way to divide the model."""
    today, devices = job.today, whole.devices
    faster = replace(hardware, flops=hardware.flops * pool.speed)
    ideal = 0.0
    if today is not None:
        ideal = throughput_today(job, hardware, whole.largest) * devices / today.ranks
    horizon, limit = hardware.until_change(devices), _usable(job, pool)
    for shape in shapes(job.model, pool, [today.virtual] if today else []):
        if job.fixed and any(getattr(shape, name) != getattr(today, name) for name in job.fixed):
            continue
        if job.multiple > 1 and pool.largest % shape.tp:
            continue
        rank = memory.parameters_of_rank(job.model, shape)
        times = throughput.pace((job.model, job.training), shape, rank, faster, pool.largest)
        needs = memory.footprint(job.model, shape, job.training, rank)
        chosen = _fastest(job, pool, shape, (times, needs, limit))
        if chosen is None:
            continue
        layout, count = chosen
        tokens = job.global_batch * job.model.sequence / times.step(layout, count)
        pause = hardware.restart + _moved(today, layout, rank, needs) / hardware.load_bandwidth
        unit = _unit(layout)
        share = tokens / ideal if ideal else 0.0
        yield Ranked(
            layout,
            devices - layout.ranks,
            count,
            job.micro_batches // unit // layout.dp * unit,
            tokens,
            share,
            needs.needed(layout.dp, count),
            pause,
            tokens * max(0.0, horizon - pause),
            _tier(today, layout, share),
        )


def _usable(job: Job, pool: Pool) -> float:
    """Return the bytes that a rank may use: 0.95 of a device, or what today's layout needs if it fits."""
    if not pool.memory:
        return math.inf
    limit = memory.USABLE * pool.memory
    if job.today is not None:
        rank = memory.parameters_of_rank(job.model, job.today)
        needs = memory.footprint(job.model, job.today, job.training, rank)
        today = needs.needed(job.today.dp, _busiest(job, job.today))
        if today <= pool.memory:
            limit = max(limit, today)
    return limit


def _fastest(
    job: Job, pool: Pool, shape: Layout, known: tuple[Pace, Footprint, float]
) -> tuple[Layout, int] | None:
    """Return the layout of a shape with the shortest step, and the micro-batches of its busiest copy."""
    times, needs, limit = known
    found: dict[tuple[Layout, int], float] = {}  # seconds of a step, with the least dp of each range
    today = None
    for copies, count in _copies(job, pool, shape):
        if times.step(shape, count) > STAYS * min(found.values(), default=math.inf):
            break  # a step takes longer than that, and still longer with fewer copies
        place = bisect_left(copies, True, key=lambda dp: needs.needed(dp, count) <= limit)
        fitting = copies[place:]
        if fitting:
            layout = replace(shape, dp=fitting[0])
            found[layout, count] = times.step(layout, count)
        elif copies:
            break  # fewer copies need more memory
        if job.today is not None and job.today.shape == shape.shape and job.today.dp in fitting:
            today = (job.today, count)
    best = min(found, key=found.__getitem__, default=None)
    if best and today and times.step(*today) <= STAYS * found[best]:
        return today  # another dp would hardly be faster
    return best


def _busiest(job: Job, layout: Layout) -> int:
    """Return the micro-batches of the busiest copy in a step."""
    unit = _unit(layout)
    return -(-job.micro_batches // (unit * layout.dp)) * unit


def _copies(job: Job, pool: Pool, shape: Layout) -> Iterator[tuple[range, int]]:
    """Yield ranges of dp, from the largest down, and how many micro-batches the busiest copy has in each."""
    unit = _unit(shape)
    if job.micro_batches % unit:
        return
    units = job.micro_batches // unit
    part = shape.tp * shape.pp * shape.cp
    most = min(pool.groups(shape.tp) // (shape.pp * shape.cp), units)
    step = math.lcm(shape.dp, job.multiple // math.gcd(job.multiple, part))
    while most > 0 and (not job.every_device or most * part == pool.devices):
        count = -(-units // most)
        low = most if job.every_device else -(-units // count)
        if not job.even or units % low == 0:
            yield range(-(-low // step) * step, (low if job.even else most) + 1, step), count * unit
        most = low - 1


def _moved(today: Layout | None, layout: Layout, rank: RankParameters, needs: Footprint) -> float:
    """Return the bytes that a rank loads for a change to a layout.

    Each rank gets its share of the optimizer's state, which depends on dp; and its parameters, in bf16,
    unless the model is divided as today.
    """
    if layout == today:
        return 0.0
    everything = rank.dense + rank.experts
    moved = needs.shared / layout.dp or memory.STATE * everything
    if today is None or layout.shape != today.shape:
        moved += 2 * everything
    return moved


def _tier(today: Layout | None, layout: Layout, share: float) -> int:
    if today is None or layout.tp != today.tp or share < GOOD:
        return _OTHER
    if layout.shape == today.shape:
        return 0
    return 1 if layout.pp == today.pp else 2


def _reason(today: Layout | None, one: Ranked, found: Sequence[Ranked], devices: int) -> str:
    """Return why a layout stands where it does, in one sentence."""
    words = [_change(today, one.layout), f"{one.layout.ranks} of {_devices(devices)}"]
    if one.fewest != one.micro_batches:
        words.append(f"copies compute {one.micro_batches} or {one.fewest} micro-batches")
    if today is not None:
        words.append(f"{one.share:.2f} of the ideal")
        if one is found[0] and (one.layout.tp, one.layout.pp) != (today.tp, today.pp):
            words.append(_not_kept(today, found))
    return ", ".join(words)


def _change(today: Layout | None, layout: Layout) -> str:
    if today is None:
        return "no layout of today to keep"
    names = ("tp", "pp", "cp", "ep", "virtual", "dp")
    changed = [name for name in names if getattr(layout, name) != getattr(today, name)]
    if not changed:
        return "today's layout"
    steps = ", ".join(f"{name} {getattr(today, name)} to {getattr(layout, name)}" for name in changed)
    if changed == ["dp"]:
        return f"keeps tp {today.tp} and pp {today.pp}: only {steps}"
    return f"changes {steps}"


def _not_kept(today: Layout, found: Sequence[Ranked]) -> str:
    """Return why the best layout does not keep tp and pp as they are today."""
    kept = [one for one in found if one.layout.tp == today.tp]
    kept = [one for one in kept if one.layout.pp == today.pp] or kept
    if not kept:
        return f"no layout with tp {today.tp} fits"
    best = max(kept, key=lambda one: one.tokens)
    return f"the best with tp {best.layout.tp} and pp {best.layout.pp} reaches {best.share:.2f}"


def _why_none(job: Job, groups: Sequence[Pool]) -> str:
    """Return what prevents every layout, and what would allow one."""
    pool = groups[0]
    name, devices = job.model.name, pool.devices
    held = {key: getattr(job.today, key) for key in sorted(job.fixed)}
    if held.get("tp", 1) > pool.largest:
        largest = _devices(pool.largest)
        return f"no layout for {name}: tp {held['tp']} is fixed, and the largest node has {largest}"
    relaxed = replace(job, even=False, every_device=False, multiple=1)
    if relaxed != job and any(True for _ in _everything(relaxed, groups)):
        prime = " (a prime number)" if divisors(devices) == [1, devices] else ""
        wanted = ["uses all of them"] * job.every_device
        wanted += [f"divides {job.micro_batches} micro-batches evenly"] * job.even
        wanted += [f"has a multiple of {job.multiple} ranks, on whole nodes"] * (job.multiple > 1)
        what = " and ".join(wanted)
        return f"no layout for {name} on {_devices(devices)}{prime} {what}; without this rule there is one"
    roomy = [replace(one, memory=0) for one in groups]
    leanest = min(_everything(job, roomy), key=lambda one: one.memory, default=None)
    if leanest is None:
        fixed = ", ".join(f"{key} {value}" for key, value in held.items())
        return f"no layout for {name} has its fixed degrees ({fixed}) on {_devices(devices)}"
    most = max(one.memory for one in groups)
    return (
        f"no layout for {name} fits into the memory of {_devices(devices)}: the leanest, {leanest.layout},"
        f" needs {leanest.memory / 2**30:.1f} GiB a device, and {memory.USABLE * most / 2**30:.1f} GiB of"
        f" {most / 2**30:.1f} GiB may be used; recompute activations, or keep more devices"
    )


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _everything(job: Job, groups: Sequence[Pool]) -> Iterator[Ranked]:
    for pool in groups:
        yield from _of_pool(job, pool, groups[0], Hardware())
