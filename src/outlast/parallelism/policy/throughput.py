"""Expected tokens a second of a layout, from a model's shape and three numbers of the hardware.

    step = (m + (pp - 1) / virtual) * micro + gradients

m is the number of micro-batches of the busiest data-parallel copy, and (pp - 1) / virtual the bubble of 1F1B
and of its interleaved form (Narayanan et al., arXiv 2104.04473, section 2.2). ``micro`` is the time of a
micro-batch on the slowest stage, forward and backward: the last one, which has the output layer. All
communication is counted, as if none of it were hidden behind computation:

- tp: four all-reduces a layer (Shoeybi et al., arXiv 1909.08053, section 3), as reduce-scatter and all-gather
- cp: keys and values go round a ring, and backward again with their gradients (Liu et al., arXiv 2310.01889)
- ep: tokens go to their experts and back, forward and backward (Lepikhin et al., arXiv 2006.16668)
- pp: activations to the next stage, gradients to the one before
- dp: a reduce-scatter of fp32 gradients and an all-gather of bf16 parameters at the end (Megatron-LM)

Seconds of the model mean little on other hardware; ratios of layouts are what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.limits import ModelLimits
from outlast.parallelism.policy.memory import RankParameters, Training

_BF16 = 2
_GRADIENTS = 6  # bytes a parameter: fp32 out, bf16 back


@dataclass(frozen=True)
class Hardware:
    """What the model of throughput and of changes knows of the devices.

    Args:
        flops: floating-point operations a second that a device sustains; Narayanan et al., table 1: 140e12 of
            an A100's 312e12.
        node_bandwidth: bytes a second between devices of a node, each way; NVLink of an A100.
        network_bandwidth: bytes a second of a device to other nodes; one 200 Gb/s port for each.
        load_bandwidth: bytes a second at which a rank gets state of another layout; ours: a common disk.
        restart: seconds of a restart without loading; ours: processes, rendezvous, communicators.
        horizon: seconds until devices are expected to fail or to return; 0: see :meth:`until_change`.
    """

    flops: float = 140e12
    node_bandwidth: float = 300e9
    network_bandwidth: float = 25e9
    load_bandwidth: float = 1e9
    restart: float = 30.0
    horizon: float = 0.0

    def until_change(self, devices: int) -> float:
        """Return the seconds until the next change is expected.

        The default is 50,000 hours of a device between interruptions (Llama 3, arXiv 2407.21783, section
        3.3.4: 419 unexpected ones in 54 days of 16,384 devices), and a day at most: then a lost node is back.
        """
        return self.horizon or min(86400.0, 50_000 * 3600.0 / devices)


@dataclass(frozen=True)
class Pace:
    """Times of a layout's parts in seconds, whatever the number of data-parallel copies.

    Args:
        micro: a micro-batch on the slowest stage.
        bubble: micro-batches for which the slowest stage waits in a step.
        dense: to reduce the gradients of what all copies have alike, over very many ranks.
        experts: the same of experts.
    """

    micro: float
    bubble: float
    dense: float
    experts: float

    def step(self, layout: Layout, micro_batches: int) -> float:
        """Return the seconds of a step with this many micro-batches on the busiest copy."""
        ranks = layout.dp * layout.cp
        reduced = self.dense * (1 - 1 / ranks) + self.experts * (1 - layout.ep / ranks)
        return (micro_batches + self.bubble) * self.micro + reduced


def compute(model: ModelLimits, layout: Layout, training: Training) -> float:
    """Return the floating-point operations of a micro-batch on a rank of the last stage.

    Two operations a parameter and token and 4 for each token pair and unit of attention width, forward; twice
    that backward, and forward once more with recomputation (Narayanan et al., equation 2).
    """
    tokens = model.sequence * training.micro_batch
    used = model.attention + max(1, model.experts_per_token) * model.expert
    pairs = 4 * model.sequence * model.heads * model.head_size
    passes = 4 if training.recompute else 3
    layers = model.layers / layout.pp * passes * (2 * used + pairs)
    return tokens * (layers + 3 * 2 * model.embedding) / (layout.tp * layout.cp)


def communication(
    model: ModelLimits, layout: Layout, training: Training, hardware: Hardware, node: int
) -> float:
    """Return the seconds for which a micro-batch waits for communication on a stage.

    Args:
        model: that is trained.
        layout: its parallelism.
        training: size of a micro-batch.
        hardware: its bandwidths.
        node: devices of a node; groups that are larger use the network.
    """
    tp, cp, ep = layout.tp, layout.cp, layout.ep

    def link(ranks: int) -> float:
        return hardware.node_bandwidth if ranks <= node else hardware.network_bandwidth

    tokens = model.sequence * training.micro_batch / cp
    wide = _BF16 * tokens * model.hidden
    layer = 4 * 2 * wide * (tp - 1) / tp / link(tp)
    keys = _BF16 * tokens * 2 * model.head_size * max(model.kv_heads / tp, 1)
    layer += 3 * keys * (cp - 1) / link(tp * cp)
    layer += 4 * model.experts_per_token * wide / tp * (ep - 1) / ep / link(tp * ep)
    between = 2 * layout.virtual * wide / tp / hardware.network_bandwidth if layout.pp > 1 else 0.0
    return layer * model.layers / layout.pp + between


def pace(
    work: tuple[ModelLimits, Training], layout: Layout, rank: RankParameters, hardware: Hardware, node: int
) -> Pace:
    """Return the times of a layout's parts on devices of speed 1.

    Args:
        work: the model and how it is trained.
        layout: its parallelism.
        rank: parameters of the fullest rank.
        hardware: its speeds.
        node: devices of a node.
    """
    model, training = work
    micro = compute(model, layout, training) / hardware.flops
    micro += communication(model, layout, training, hardware, node)
    reduce = _GRADIENTS / hardware.network_bandwidth
    return Pace(micro, (layout.pp - 1) / layout.virtual, reduce * rank.dense, reduce * rank.experts)
