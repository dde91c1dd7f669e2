"""Which layouts a model allows, and the nodes on which one has room.

Devices are grouped by what they have in common, so that 2,048 equal nodes cost as much as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outlast.errors import UsageError
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.limits import ModelLimits

MOST_KINDS = 16  # of devices that differ in memory or speed


@dataclass(frozen=True)
class Node:
    """A machine.

    Args:
        devices: that it has.
        memory: bytes of each; 0: not known, so no layout is refused for its memory.
        speed: of each, relative to the others of the job.
    """

    devices: int
    memory: int = 0
    speed: float = 1.0


@dataclass(frozen=True)
class Pool:
    """The nodes whose devices have at least some memory and speed.

    Args:
        memory: bytes that each device has at least; 0: not known.
        speed: that each device has at least.
        sizes: pairs of a number of devices and how many nodes have it.
    """

    memory: int
    speed: float
    sizes: tuple[tuple[int, int], ...]

    @property
    def devices(self) -> int:
        """Devices of all its nodes."""
        return sum(size * nodes for size, nodes in self.sizes)

    @property
    def largest(self) -> int:
        """Devices of the largest node."""
        return max(size for size, _ in self.sizes)

    def groups(self, tp: int) -> int:
        """Return how many groups of ``tp`` devices there are that lie within a node each."""
        return sum(size // tp * nodes for size, nodes in self.sizes)


def pools(nodes: Sequence[Node]) -> list[Pool]:
    """Return a pool for each memory and speed that a device has; the first one has all devices.

    Raises:
        UsageError: there is no device, or a node is impossible, or there are more than 16 kinds of device.
    """
    kinds = Counter(nodes)
    for node in kinds:
        if node.devices < 1 or node.memory < 0 or not 0 < node.speed < math.inf:
            raise UsageError(f"{node}: a node has at least one device, a size of memory and a speed above 0")
    if not kinds:
        raise UsageError("no device is left: at least one is expected")
    if len({(node.memory, node.speed) for node in kinds}) > MOST_KINDS:
        raise UsageError(
            f"more than {MOST_KINDS} kinds of device differ in memory or speed; round their speeds"
        )
    found: dict[frozenset[Node], Pool] = {}
    for memory in sorted({node.memory for node in kinds}):
        for speed in sorted({node.speed for node in kinds}):
            chosen = {
                one: count for one, count in kinds.items() if one.memory >= memory and one.speed >= speed
            }
            sizes: Counter[int] = Counter()
            for node, count in chosen.items():
                sizes[node.devices] += count
            if chosen:
                slowest = min(node.speed for node in chosen)
                pool = Pool(min(node.memory for node in chosen), slowest, tuple(sorted(sizes.items())))
                found[frozenset(chosen)] = pool
    return list(found.values())


def divisors(number: int) -> list[int]:
    """Return the divisors of a number of at least 1, ascending."""
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]


def problems(model: ModelLimits, layout: Layout) -> list[str]:
    """Return why a model cannot be divided so; each rule is the one of Megatron-LM that its line names."""
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    found = []
    for name, count in (("attention heads", model.heads), ("hidden size", model.hidden), ("ffn", model.ffn)):
        if count % tp:  # arguments.py and transformer_config.py: divisible by tensor_model_parallel_size
            found.append(f"{name} {count} % tp {tp} is {count % tp}")
    if model.kv_heads % tp and tp % model.kv_heads:  # transformer_config.py: num_query_groups
        found.append(f"{model.kv_heads} heads of keys and values and tp {tp}: neither divides the other")
    chunks = pp * layout.virtual  # transformer_config.py: num_layers, virtual_pipeline_model_parallel_size
    if model.layers % chunks:
        found.append(
            f"layers {model.layers} % (pp {pp} x virtual {layout.virtual}) is {model.layers % chunks}"
        )
    if layout.virtual > 1 and pp == 1:
        found.append(f"{layout.virtual} virtual stages need pp of at least 2")
    parts = tp * (2 * cp if cp > 1 else 1)  # arguments.py: seq_length; torchtitan: seq_len_divisor
    if model.sequence % parts:
        found.append(f"sequence {model.sequence} % {parts} (tp {tp}, cp {cp}) is {model.sequence % parts}")
    if max(1, model.experts) % ep:  # arguments.py: num_experts % expert_model_parallel_size
        found.append(f"experts {model.experts} % ep {ep} is {max(1, model.experts) % ep}")
    if layout.dp * cp % ep:  # parallel_state.py: ranks of a stage, expert tensor parallelism as tp
        found.append(f"dp {layout.dp} x cp {cp} % ep {ep} is {layout.dp * cp % ep}")
    return found


def shapes(model: ModelLimits, pool: Pool, virtual: Iterable[int]) -> Iterator[Layout]:
    """Yield every layout that the model allows with as few data-parallel copies as it may have.

    Args:
        model: to be divided.
        pool: limits tp to the devices of its largest node, and the ranks.
        virtual: numbers of virtual stages to try besides 1.
    """
    stages = divisors(model.layers)
    for tp in divisors(model.heads):
        if problems(model, Layout(tp)):
            continue
        groups = pool.groups(tp)
        halves = model.sequence // (2 * tp) if model.sequence % (2 * tp) == 0 else 1
        for cp in divisors(halves):
            for ep in divisors(max(1, model.experts)):
                dp = ep // math.gcd(ep, cp)
                for pp in (one for one in stages if one * cp * dp <= groups):
                    for chunks in {1, *virtual} if pp > 1 else {1}:
                        if model.layers % (pp * chunks) == 0:
                            yield Layout(tp, pp, dp, cp, ep, chunks)
